"""Agents behind the interface of an environment: a function, a program or a service, each begun, awaited and judged."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from gspo_core.cli import main
from gspo_core.env import (
    AgentStart,
    EnvironmentFailed,
    InvalidEnvironment,
    Llm,
    NeedsAgent,
    Timeouts,
    load_environment,
)
from gspo_core.env.agent_runs import MAX_LAST_WORDS_BYTES, PART_CHARS, without_key
from gspo_core.env.agent_urls import AgentService, UrlRun
from gspo_core.testing import validate
from gspo_core.types import Split
from tests.core.agent_kit import serving
from tests.patience import HANG_S

LLM = Llm("http://127.0.0.1:1/v1", "ep_secret", episode="job-1/0/0/0")

AGENTS = """
import asyncio, threading, time

tasks = [{"word": "one"}, {"word": "two"}]
eval_tasks = [{"word": "three"}]
limits = {"max_turns": 4}
replayable = True
reward_range = (0, 1)

async def run(task, llm):
    await asyncio.sleep(0)
    return float(len(task["word"])) + (llm.base_url.endswith("/v1"))

def sync(task, llm, factor=2, *, ctx):
    ctx.metric("words", 1)
    return {"length": factor * len(task["word"])}

async def silent(task, llm):
    pass

async def raises(task, llm):
    raise RuntimeError(f"no answer with {llm.api_key}")

async def blocks(task, llm):
    GATE.wait()
    return 1.0

async def waits(task, llm):
    STARTED.set()
    try:
        await asyncio.Event().wait()
    finally:
        LEFT.append(task["word"])

async def text(task, llm):
    return "0.5"

async def leaves(task, llm):
    raise SystemExit(3)

async def narrow(task):
    ...

GATE, STARTED, LEFT = threading.Event(), threading.Event(), []
number = 5

class World:
    tasks = [{"word": "four"}]
    replayable = True

    def __init__(self, bonus=0.0):
        self.bonus = bonus

    def get_reward(self, task, result, folder):
        return self.bonus + ("four" in str(result)) + (folder / "made").exists()

class Unjudged:
    tasks = [{"word": "four"}]

class Empty:
    tasks = []

class Player:
    limits = {"max_turns": 2}
    num_tasks = 3

    def __init__(self, words, bonus=0.0):
        if not words:
            raise ValueError("no words")
        self.words, self.bonus, self.played = words, bonus, []

    def tasks(self, index):
        return {"word": self.words[index]}

    async def run(self, task, llm, ctx):
        self.played.append(task["word"])
        ctx.metric("played", len(self.played))
        return {"length": float(len(task["word"])), "bonus": self.bonus}

player = Player(["one", "two", "six"])
"""


REWARDS = """
import asyncio

async def slowly(task, result):
    await asyncio.sleep(0)
    return {"right": float(task["word"] in str(result)), "bonus": 0.25}

def whole(task, result, folder, ctx):
    ctx.metric("letters", len(task["word"]))
    return 0.5 * (result is not None)

def undecided():
    return None

class Judge: ...
"""


@pytest.fixture
def agents(tmp_path: Path) -> str:
    path = tmp_path / "agents.py"
    path.write_text(AGENTS)
    (tmp_path / "rewards.py").write_text(REWARDS)
    return str(path)


@pytest.mark.parametrize(
    ("function", "reward"), [("slowly", (1.25, {"right": 1.0, "bonus": 0.25})), ("whole", (0.5, {}))]
)
async def test_a_function_of_the_job_judges_in_place_of_any_other(agents: str, function: str, reward: Any) -> None:
    """Of a program, whose class would judge by itself."""
    named = agents.replace("agents.py", f"rewards.py:{function}")
    environment = load(f"{agents}:World", AgentStart(command=["echo", "four"], reward=named))
    assert environment.has_judge
    assert await play(environment) == reward


async def test_a_reward_function_that_says_nothing_gives_no_reward(agents: str) -> None:
    named = agents.replace("agents.py", "rewards.py:undecided")
    with pytest.raises(EnvironmentFailed, match="the agent gave no reward"):
        await play(load(f"{agents}:World", AgentStart(command=["echo", "four"], reward=named)))


@pytest.mark.parametrize(
    ("name", "why"), [("Judge", "is a type; agent.reward names a function"), ("absent", "has no 'absent'")]
)
def test_a_reward_function_that_is_none_is_refused(agents: str, name: str, why: str) -> None:
    named = agents.replace("agents.py", f"rewards.py:{name}")
    with pytest.raises(InvalidEnvironment, match=why):
        load(f"{agents}:World", AgentStart(command=["echo"], reward=named))


def load(ref: str, start: AgentStart | None = None, **config: Any) -> Any:
    return load_environment(ref, config, agent=start or AgentStart())


async def play(environment: Any, llm: Llm = LLM, index: int = 0) -> tuple[float, dict[str, float]]:
    session = environment.session()
    session.offer(llm)
    try:
        start = await session.start(await environment.task(Split.TRAIN, index), seed=0)
        assert (list(start.messages), list(start.tools)) == ([], [])
        await session.ended()
        reward: tuple[float, dict[str, float]] = await session.score()
        return reward
    finally:
        await session.close()


async def test_a_function_is_given_its_task_and_where_to_ask_and_returns_its_reward(agents: str) -> None:
    environment = load(f"{agents}:run")
    assert [environment.num_tasks(split) for split in Split] == [2, 1]
    assert (environment.limits, environment.replayable, environment.reward_range) == ({"max_turns": 4}, True, (0, 1))
    assert await play(environment, index=1) == (4.0, {})


async def test_a_function_may_be_sync_take_config_and_report_numbers(agents: str) -> None:
    environment = load(f"{agents}:sync", factor=3)
    assert await play(environment) == (9.0, {"length": 9.0})
    session = environment.session()
    session.offer(LLM)
    await session.start({"word": "x"}, 0)
    await session.ended()
    assert dict(session.metrics) == {"words": 1.0}
    await session.close()


async def test_tasks_may_come_from_the_config(agents: str) -> None:
    environment = load(f"{agents}:run", tasks=[{"word": "sixteen"}])
    assert [environment.num_tasks(split) for split in Split] == [1, 0]
    assert await play(environment) == (8.0, {})


async def test_a_class_with_run_is_made_once_and_plays_all_episodes(agents: str) -> None:
    environment = load(f"{agents}:Player", words=["one", "three", "five"], bonus=0.5)
    assert (environment.num_tasks(Split.TRAIN), environment.num_tasks(Split.EVAL)) == (3, 0)
    assert environment.limits == {"max_turns": 2}
    assert await play(environment) == (3.5, {"length": 3.0, "bonus": 0.5})
    assert await play(environment, index=1) == (5.5, {"length": 5.0, "bonus": 0.5})
    assert environment.found.played == ["one", "three"]
    assert await play(load(f"{agents}:player"), index=2) == (3.0, {"length": 3.0, "bonus": 0.0})


@pytest.mark.parametrize(
    ("name", "config", "problem"),
    [
        ("Player", {}, r"the config \[\] does not fit its __init__: missing a required argument: 'words'"),
        ("Player", {"words": ["one"], "colour": 1}, "does not fit its __init__: got an unexpected keyword argument"),
        ("Player", {"words": []}, "cannot be made: ValueError: no words"),
        ("player", {"bonus": 1.0}, "got an unexpected keyword argument 'bonus'"),
    ],
)
def test_a_class_that_does_not_fit_its_config_is_refused(
    agents: str, name: str, config: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidEnvironment, match=problem):
        load(f"{agents}:{name}", **config)


@pytest.mark.parametrize(
    ("name", "phase", "words"),
    [
        ("silent", "score", "the agent gave no reward"),
        ("raises", "agent", r"RuntimeError: no answer with \(key\) \(\w+\.py, line \d+, in raises\)$"),
        ("leaves", "agent", "SystemExit 3"),
        ("text", "score", "the agent's reward is a str, not a number"),
    ],
)
async def test_what_goes_wrong_in_a_function_is_a_failure_and_never_a_reward(
    agents: str, name: str, phase: str, words: str
) -> None:
    with pytest.raises(EnvironmentFailed, match=words) as failed:
        await play(load(f"{agents}:{name}"))
    assert failed.value.phase == phase


async def test_an_agent_that_blocks_blocks_nobody_else_and_is_left_behind_as_stuck(agents: str) -> None:
    environment = load(f"{agents}:blocks")
    gate: threading.Event = environment.home.GATE
    session = environment.session(limits=Timeouts(close_timeout_s=0.05))
    session.offer(LLM)
    await session.start({"word": "x"}, 0)
    try:
        assert await play(load(f"{agents}:run")) == (4.0, {})
        assert not session.is_stuck
        await session.close()
        assert session.is_stuck
        assert session.close_failure == "the agent did not stop within 0.05s"
    finally:
        gate.set()


async def test_an_agent_that_still_runs_is_cancelled_when_its_session_closes(agents: str) -> None:
    environment = load(f"{agents}:waits")
    session = environment.session()
    session.offer(LLM)
    await session.start({"word": "seven"}, 0)
    await asyncio.to_thread(environment.home.STARTED.wait)
    with pytest.raises(EnvironmentFailed, match="no reward"):  # it said that it had finished, and was not judged
        await session.score()
    await session.close()
    assert (environment.home.LEFT, session.close_failure, session.is_stuck) == (["seven"], None, False)


@pytest.mark.parametrize(
    ("name", "start", "config", "words"),
    [
        ("run", AgentStart(), {"depth": 1}, r"cannot be called as run\(task, llm, depth=…\)"),
        ("narrow", AgentStart(), {}, r"cannot be called as run\(task, llm\)"),
        ("number", AgentStart(), {}, r"is a int; an agent is a function run\(task, llm\)"),
        ("World", AgentStart(), {}, r"is a type; an agent is a function run\(task, llm\)"),
        ("run", AgentStart(command=["x"]), {}, "is a function; with agent.url or agent.command"),
        ("Empty", AgentStart(command=["x"]), {}, "needs tasks; give it tasks"),
        ("World", AgentStart(url="https://x/"), {"size": 1}, "its tasks cannot be read: TypeError"),
    ],
)
def test_what_cannot_be_an_agent_is_refused_with_what_to_change(
    agents: str, name: str, start: AgentStart, config: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidEnvironment, match=words):
        load(f"{agents}:{name}", start, **config)


@pytest.mark.parametrize("name", ["run", "sync"])
def test_a_function_without_the_word_agent_says_what_the_job_lacks(agents: str, name: str) -> None:
    with pytest.raises(NeedsAgent, match=r"write `agent: \{\}` beside its ref"):
        load_environment(f"{agents}:{name}")


# --- programs


def command(text: str) -> AgentStart:
    return AgentStart(command=[sys.executable, "-c", text])


async def test_a_program_is_told_all_in_variables_and_judged_by_what_it_left(agents: str) -> None:
    told = """
import json, os
names = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY",
    "GOOGLE_GEMINI_BASE_URL", "GEMINI_API_KEY")
assert [os.environ[name] for name in names] == [
    "http://127.0.0.1:1/v1", "ep_secret", "http://127.0.0.1:1", "ep_secret", "http://127.0.0.1:1", "ep_secret"
], os.environ
open(os.path.join(os.environ["TMPDIR"], "made"), "w").close()
print(json.loads(os.environ["GSPO_TASK"])["word"], os.getcwd())
"""
    environment = load(f"{agents}:World", command(told), bonus=0.5)
    assert await play(environment) == (2.5, {})


async def test_a_program_runs_beside_the_file_of_its_reference(agents: str) -> None:
    (Path(agents).parent / "tool.py").write_text("raise SystemExit('here')")
    with pytest.raises(EnvironmentFailed, match="ended with exit status 1: here"):
        await play(load(f"{agents}:World", AgentStart(command=[sys.executable, "tool.py"])))


@pytest.mark.parametrize(
    ("start", "phase", "words"),
    [
        (command("import sys; sys.exit(7)"), "agent", "ended with exit status 7: no output"),
        (command("import os; os.kill(os.getpid(), 9)"), "agent", "ended with signal 9"),
        (AgentStart(command=["/no/such/program"]), "agent", "cannot be started"),
        (command("pass"), "score", "the agent gave no reward"),
    ],
)
async def test_what_goes_wrong_with_a_program_is_a_failure(
    agents: str, start: AgentStart, phase: str, words: str
) -> None:
    with pytest.raises(EnvironmentFailed, match=words) as failed:
        await play(load(f"{agents}:Unjudged", start))
    assert failed.value.phase == phase


KEY = "ep_" + "".join(chr(ord("A") + 7 * number % 26) + str(number) for number in range(64))


@pytest.mark.parametrize("num_told", [1, 40, 100, len(KEY) - 8, len(KEY)])
async def test_no_part_of_its_key_is_told_where_its_last_words_are_cut(agents: str, num_told: int) -> None:
    """So many characters of the key stand behind the cut."""
    said = f"import os, sys; sys.exit(os.environ['OPENAI_API_KEY'] + 'x' * {MAX_LAST_WORDS_BYTES - num_told - 1})"
    session = load(f"{agents}:Unjudged", command(said)).session()
    session.offer(Llm("http://127.0.0.1:1/v1", KEY))
    await session.start({"word": "x"}, 0)
    with pytest.raises(EnvironmentFailed) as failed:
        await session.ended()
    await session.close()
    told = str(failed.value)
    assert told.count("x") > 1000
    assert not any(KEY[place : place + PART_CHARS] in told for place in range(len(KEY) - PART_CHARS + 1))


async def test_what_a_program_prints_is_kept_and_judged_without_its_key(agents: str) -> None:
    said = "import os; print('the key is', os.environ['OPENAI_API_KEY'])"
    session = load(f"{agents}:Unjudged", command(said)).session()
    session.offer(Llm("http://127.0.0.1:1/v1", KEY))
    session.keep_evidence(1 << 20)
    await session.start({"word": "x"}, 0)
    await session.ended()
    with pytest.raises(EnvironmentFailed, match="gave no reward"):
        await session.score()
    await session.close()
    assert json.loads(session.evidence.told["result"]) == "the key is (key)\n"


PAYING = "rw_" + "".join(chr(ord("a") + 9 * number % 26) + str(number) for number in range(64))
LEAKING = """
tasks = [{"word": "x"}]

def run(task, llm):
    raw = b"\\xff" + llm.api_key.encode()
    return {"log": ["Bearer " + llm.api_key, {llm.reward_key: 1}], "n": (1, raw, chr(13) + llm.reward_key[1:])}

def get_reward(task, result):
    return 1.0
"""


async def test_what_an_agent_returns_is_kept_without_its_keys_wherever_they_stand(tmp_path: Path) -> None:
    (tmp_path / "leaking.py").write_text(LEAKING)
    session = load(f"{tmp_path}/leaking.py:run").session()
    session.offer(Llm("http://127.0.0.1:1/v1", KEY, reward_key=PAYING))
    session.keep_evidence(1 << 20)
    await session.start({"word": "x"}, 0)
    await session.ended()
    assert (await session.score())[0] == 1.0
    await session.close()
    kept = session.evidence.value("result")
    assert kept == {"log": ["Bearer (key)", {"(key)": 1}], "n": (1, b"\xff(key)", "\r(key)")}


def test_beginnings_and_ends_of_a_key_are_not_told_wherever_they_stand():
    for place in range(PART_CHARS, len(KEY) - PART_CHARS + 1):
        text = f"{KEY[place:]} a {KEY} b {KEY}{KEY} c={KEY[:place]}"
        assert without_key(text, KEY) == "(key) a (key) b (key)(key) c=(key)"
    assert without_key("a key", "") == "a key"
    assert without_key("no key: ep_secret!", "ep_secret") == "no key: (key)!"


async def test_a_task_too_long_for_a_variable_is_refused_by_its_size(agents: str) -> None:
    session = load(f"{agents}:World", command("pass")).session()
    session.offer(LLM)
    with pytest.raises(EnvironmentFailed, match="but a variable holds"):
        await session.start({"word": "a" * (128 << 10)}, 0)
    await session.close()


async def test_a_program_that_still_runs_is_ended_with_its_session(agents: str, tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    loop = f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(1000)"
    session = load(f"{agents}:World", command(loop)).session()
    session.offer(LLM)
    await session.start({"word": "x"}, 0)
    async with asyncio.timeout(HANG_S):
        while not (mark.exists() and mark.read_text()):
            await asyncio.sleep(0.01)
    await session.close()
    assert session.close_failure is None
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


# --- services


async def test_a_service_is_sent_the_task_and_answers_with_the_reward(agents: str) -> None:
    with serving((200, b'{"reward": 0.25}')) as service:
        assert await play(load(f"{agents}:Unjudged", AgentStart(url=service.url))) == (0.25, {})
    ((key, body),) = service.heard
    assert key == "job-1/0/0/0"
    assert body == {
        **{"task": {"word": "four"}, "base_url": LLM.base_url, "api_key": "ep_secret"},
        **{"episode": "job-1/0/0/0", "model": "policy"},
    }


async def test_a_start_that_was_not_answered_is_repeated_with_the_same_key(agents: str) -> None:
    with serving((503, b""), (0, b""), (200, b"")) as service, pytest.raises(EnvironmentFailed, match="no reward"):
        await play(load(f"{agents}:Unjudged", AgentStart(url=service.url)))
    assert [key for key, _ in service.heard] == ["job-1/0/0/0"] * 3


async def test_a_connection_to_a_service_is_kept_for_the_next_start(agents: str) -> None:
    with serving((200, b'{"reward": 0.25}'), version="HTTP/1.1") as service:
        environment = load(f"{agents}:Unjudged", AgentStart(url=service.url))
        assert [await play(environment) for _ in range(3)] == [(0.25, {})] * 3
        environment.service.close()
        assert (len(service.connections), len(service.heard)) == (1, 3)


async def test_a_start_that_a_kept_connection_loses_is_sent_on_a_new_one_at_once(agents: str) -> None:
    """The service is there, so nothing is waited for: it may have been restarted meanwhile."""
    with serving((200, b"{}"), (0, b""), (200, b"{}"), version="HTTP/1.1") as service:
        starts = AgentService(service.url)
        answers = [await starts.post(b"{}", key) for key in "ab"]
        starts.close()
    assert [answer.status_code for answer in answers] == [200, 200]
    assert ([key for key, _ in service.heard], len(service.connections)) == (["a", "b", "b"], 2)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((400, b"no such task"), "it answered 400: no such task"),
        ((302, b""), "it answered 302"),
        ((200, b"done"), "its answer is not JSON"),
        ((200, b"[" + b" " * (1 << 20) + b"]"), "its answer has more than"),
    ],
)
async def test_what_a_service_must_not_answer_is_a_failure_at_once(
    agents: str, answer: tuple[int, bytes], words: str
) -> None:
    with serving(answer) as service, pytest.raises(EnvironmentFailed, match=words) as failed:
        await play(load(f"{agents}:Unjudged", AgentStart(url=service.url)))
    assert (failed.value.phase, len(service.heard)) == ("agent", 1)


async def test_a_service_that_accepted_plays_on_until_its_session_closes(agents: str) -> None:
    with serving((202, b"")) as service:
        session = load(f"{agents}:Unjudged", AgentStart(url=service.url)).session()
        session.offer(LLM)
        await session.start({"word": "x"}, 0)
        await asyncio.to_thread(service.asked.wait)
        waiting = asyncio.create_task(session.ended())
        await asyncio.wait({waiting}, timeout=0.05)
        assert not waiting.done()
        waiting.cancel()
        await session.close()
        assert (session.close_failure, session.is_stuck) == (None, False)


async def test_a_service_that_stays_away_is_given_up_after_a_while() -> None:
    now = iter(range(0, 1000, 2))
    away = AgentService("http://127.0.0.1:1/")
    run = UrlRun(away, {}, LLM, patience_s=5, clock=lambda: float(next(now)))
    with pytest.raises(Exception, match=r"could not be reached for 5s: ConnectionRefusedError"):
        await run.run()


def test_a_key_is_not_shown() -> None:
    assert "secret" not in repr(LLM)


# --- what an author is told


def found(report: Any) -> dict[str, str]:
    return {check.id: f"{check.status}: {check.message}" for check in report.checks}


def test_an_agent_is_examined_without_being_started(agents: str) -> None:
    report = validate(f"{agents}:run")
    assert report.ok
    assert found(report) == {
        "start": "pass: a function, which runs in a process apart",
        "tasks": "pass: 2 to train, 1 held out",
        "reward": "skip: there is no get_reward, so the agent has to return its reward",
        "episodes": "skip: an agent is played by no rehearsal: a job's first step shows whether its episodes end",
    }


def test_a_program_is_looked_for_and_its_tasks_must_fit_a_variable(agents: str) -> None:
    started = {"agent": {"command": ["/no/such/program"]}}
    assert found(validate(f"{agents}:World", **started))["start"].startswith("fail: there is no program /no/such")
    started = {"agent": {"command": ["python", "no_such.py"]}}
    start = found(validate(f"{agents}:World", **started))["start"]
    written = {"agent": {"command": ["env", "written_later.py"]}}
    assert found(validate(f"{agents}:World", **written))["start"].startswith("pass: env is there")
    assert start.startswith("fail: python is there, but no file no_such.py in ")
    report = validate(f"{agents}:Unjudged", agent={"command": [sys.executable, Path(agents).name]})
    assert found(report)["reward"] == "warn: there is no get_reward, so the program has to post its reward"
    assert found(report)["tasks"] == "warn: 1 tasks, none held out: nothing can be measured"
    Path(agents).write_text(AGENTS + "\nclass Long:\n    tasks = [{'word': 'a' * 200_000}]\n")
    assert "cannot be handed over" in found(validate(f"{agents}:Long", agent={"url": "https://a.example/"}))["tasks"]


def test_a_judge_is_shown_with_its_prompt_for_the_first_task(agents: str) -> None:
    """Where the episode will stand, its placeholder does."""
    prompt = "Asked: {{task.word}}\n{{conversation}}\nScore {{answer}}"
    judge = {"url": "https://api.example/v1", "model": "a-model", "prompt": prompt}
    said = found(validate(f"{agents}:run", agent={"judge": judge}))["reward"]
    assert said == (
        "pass: by a-model of api.example, which is not asked here; its prompt for the first task:\n"
        "    Asked: one\n    {{conversation}}\n    Score {{answer}}"
    )
    judge["prompt"] = "{{task.no}} {{answer}}"
    assert "the task has no field no" in found(validate(f"{agents}:run", agent={"judge": judge}))["reward"]
    judge["prompt"] = "x" * 60_000 + "{{answer}}"
    long = found(validate(f"{agents}:run", agent={"judge": judge}))["reward"]
    assert len(long) < 5000
    assert long.endswith("x [... 60,010 characters in all]")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ('{"command": ["a"], "acp": {"promt": "x"}}', "acp.promt"),
        ('{"command": ["a"], "acp": {"prompt": "{{answer}}"}}', "there is no {{answer}}"),
        ('{"command": ["a"], "acp": {"permissions": "rejct"}}', "acp.permissions"),
        ('{"acp": {}}', "give command too"),
    ],
)
def test_the_command_refuses_what_a_job_may_not_say(
    agents: str, capsys: pytest.CaptureFixture[str], given: str, words: str
) -> None:
    assert main(["env", "validate", f"{agents}:World", "--agent", given]) == 1
    assert words in capsys.readouterr().err


def test_the_command_examines_an_agent(agents: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "validate", f"{agents}:run"]) == 0
    assert main(["env", "validate", f"{agents}:World", "--agent", '{"command": ["/no/such/program"]}']) == 1
    assert "sound" in capsys.readouterr().out
