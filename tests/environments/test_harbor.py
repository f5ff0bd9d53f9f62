"""Tasks in the format of Harbor: who earns what, what commands see, the three budgets, snapshots, and refusals."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from environments.harbor.places import Places
from environments.harbor.reward import Judgement, UnreadableReward, read
from environments.harbor.task import read_task
from environments.sandbox import command
from gspo_core import landlock
from gspo_core.env import (
    CallStatus,
    Environment,
    EnvironmentFailed,
    InvalidEnvironment,
    Observation,
    ParsedTurn,
    Session,
    Timeouts,
    ToolCall,
    load_environment,
)
from gspo_core.job_spec import JobSpec
from gspo_core.spec_file import load_job_spec
from gspo_core.types import Split, StopReason
from services.hosts.local import LocalHosts, WallPolicy
from services.hosts.server import HostOrder
from services.hosts.session import HostedEnvironment
from services.hosts.venv import Interpreters
from services.hosts.walls import tiers
from services.hosts.walls.tiers import Tier
from tests.repo.pages import ROOT, blocks
from tests.services.rollout.rollout_kit import until

REF = "environments.adapters.harbor:harbor"
EXAMPLES = ROOT / "examples" / "harbor"
NAMES = ("create-file", "fix-the-test", "sort-csv")
SOLVED = "echo 'Hello, harbour' > /app/greeting.txt"
LONG = Timeouts(reset_timeout_s=60.0, step_timeout_s=60.0, score_timeout_s=60.0, close_timeout_s=10.0)

pytestmark = pytest.mark.skipif(command.refusal() is not None, reason="this machine runs no such commands, and says so")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The examples, to be changed."""
    return Path(shutil.copytree(EXAMPLES, tmp_path / "tasks"))


def loaded(path: Path = EXAMPLES, **config: Any) -> Environment:
    return load_environment(REF, {"path": str(path), "provided": ["FROM"], **config})


def bash(text: str) -> ParsedTurn:
    return ParsedTurn("", (ToolCall("bash", {"command": text}, CallStatus.OK, "", 0, 1),))


def said(observation: Observation) -> str:
    return str(observation.messages[-1]["content"])


async def begun(environment: Environment, name: str = "create-file") -> Session:
    session = environment.session(limits=LONG)
    await session.start({"task": name}, 0)
    return session


async def judged(session: Session) -> float:
    reward, _ = await session.score()
    await session.close()
    assert session.close_failure is None
    return reward


async def play(environment: Environment, name: str, *turns: ParsedTurn) -> tuple[float, list[str]]:
    session = await begun(environment, name)
    answers = [said(one) for one in [await session.act(turn) for turn in turns] if one.messages]
    return await judged(session), answers


# who earns what


@pytest.mark.parametrize("name", NAMES)
async def test_who_has_the_solution_wins_and_who_does_nothing_does_not(name: str) -> None:
    environment = loaded()
    cls: Any = environment.cls  # type: ignore[attr-defined]
    (_, arguments), last = cls.oracle(name)
    assert (await play(environment, name, bash(arguments["command"]), ParsedTurn(last)))[0] == 1.0
    assert (await play(environment, name))[0] == 0.0
    assert (await play(environment, name, ParsedTurn("It is done.")))[0] == 0.0


async def test_tests_may_pay_in_part_and_report_other_numbers() -> None:
    environment = loaded()
    assert (await play(environment, "sort-csv", bash("cp data/ships.csv sorted.csv")))[0] == 0.5
    session = await begun(environment, "fix-the-test")
    assert await judged(session) == 0.0
    assert session.metrics["verifier/num_right"] == 1.0


def test_tasks_are_the_folders_and_those_held_out_are_not_trained() -> None:
    environment = loaded(eval_tasks=["sort-csv"])
    assert [environment.num_tasks(split) for split in Split] == [2, 1]
    assert asyncio.run(environment.task(Split.TRAIN, 1)) == {"task": "fix-the-test"}
    assert loaded(EXAMPLES / "sort-csv").num_tasks(Split.TRAIN) == 1
    assert environment.reward_range == (0.0, 1.0)


# what commands see


async def test_commands_see_harbors_paths_and_everybody_reads_the_same() -> None:
    environment = loaded()
    looking = bash("pwd; echo $HOME; cd; pwd; echo x > /tmp/y; ls /tmp /app; head -n 1 /app/roman.sh; readlink -f .")
    first, second = [(await play(environment, "fix-the-test", looking))[1] for _ in range(2)]
    assert first == second
    assert first == ["/app\n/root\n/root\n/app:\ncheck.sh\nroman.sh\n\n/tmp:\ny\n#!/bin/bash\n/root"]


async def test_tests_and_solutions_cannot_be_read_before_the_episode_is_judged(folder: Path) -> None:
    environment = loaded(folder)
    session = await begun(environment)
    hidden = folder / "create-file"
    # Put together from parts, because a command's text has its paths replaced.
    for name in ("tests/test.sh", "solution/solve.sh", "instruction.md"):
        path = str(hidden / name).removeprefix("/")
        answer = said(await session.act(bash(f"cat $(printf '\\x2f')'{path}'")))
        assert "Permission denied" in answer
    assert "No such file" in said(await session.act(bash("ls /tests")))
    assert said(await session.act(bash("ls -A /solution; find /logs -type f"))) == "(no output)"
    assert await judged(session) == 0.0


async def test_a_reward_that_the_policy_wrote_itself_does_not_count(folder: Path) -> None:
    (folder / "create-file/tests/test.sh").write_text("true\n")  # it overwrites nothing
    environment = loaded(folder)
    for forged in (
        "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt",
        "mkdir -p /logs/verifier; ln -s /app/mine /logs/verifier/reward.txt; echo 1 > /app/mine",
        "ln -s /app /logs/verifier; echo 1 > /app/reward.txt",
        "(setsid bash -c 'while :; do echo 1 > /logs/verifier/reward.txt; done' > /dev/null 2>&1 &)",
    ):
        assert (await play(environment, "create-file", bash(forged)))[0] == 0.0


async def test_a_folder_that_one_command_has_locked_is_open_to_the_next_and_to_the_tests() -> None:
    locking, looking = "chmod 000 /tmp /root /logs /app", "ls /app; ls -A /root && ls /logs"
    turns = bash(f"{SOLVED}; {locking}"), bash(f"{looking}; {locking}")
    reward, (_, second) = await play(loaded(), "create-file", *turns)
    assert (reward, second) == (1.0, "greeting.txt\nagent")


# budgets


async def test_a_command_past_its_deadline_is_an_answer_and_the_episode_goes_on() -> None:
    environment = loaded(command_timeout_s=3.0)
    turns = bash(f"{SOLVED}; sleep 1000"), bash("cat greeting.txt")
    reward, (first, second) = await play(environment, "create-file", *turns)
    assert (reward, first, second) == (1.0, "error: the command was ended after 3s", "Hello, harbour")


async def test_what_stands_there_when_the_time_for_commands_is_over_is_judged() -> None:
    session = await begun(loaded(run_timeout_s=3.0))
    observation = await session.act(bash(f"{SOLVED}; sleep 1000"))
    assert observation.stop_reason is StopReason.ENV_DONE
    assert said(observation).endswith("The time for this task is over.")
    assert await judged(session) == 1.0


async def test_tests_that_do_not_end_are_worth_the_least(folder: Path) -> None:
    (folder / "create-file/tests/test.sh").write_text("sleep 1000\n")
    session = await begun(loaded(folder, score_timeout_s=3.0, reward_range=[-1.0, 1.0]))
    assert await judged(session) == -1.0
    assert (session.metrics["verifier_timed_out"], session.metrics["verifier_wrote_nothing"]) == (1.0, 1.0)


async def test_files_that_cannot_be_laid_out_in_time_are_nobodys_reward() -> None:
    session = loaded(boot_timeout_s=1e-9).session(limits=LONG)
    with pytest.raises(EnvironmentFailed, match=r"reset: .*TimeoutError: the files of task fix-the-test"):
        await session.start({"task": "fix-the-test"}, 0)
    await session.close()


async def test_budgets_are_those_of_the_tasks_unless_the_configuration_says_otherwise() -> None:
    assert {name: loaded().limits[name] for name in ("reset_timeout_s", "step_timeout_s", "score_timeout_s")} == {
        "reset_timeout_s": 75.0,
        "step_timeout_s": 75.0,
        "score_timeout_s": 75.0,
    }
    changed = loaded(boot_timeout_s=1, command_timeout_s=2, score_timeout_s=3).limits
    assert list(changed.values()) == [16.0, 17.0, 18.0]


async def test_tests_that_write_no_number_are_the_tasks_fault(folder: Path) -> None:
    (folder / "create-file/tests/test.sh").write_text("echo well > /logs/verifier/reward.txt\n")
    session = await begun(loaded(folder))
    with pytest.raises(EnvironmentFailed, match=r"reward.txt is 'well', not a number"):
        await session.score()
    await session.close()


# snapshots


async def test_an_episode_goes_on_from_its_snapshot_with_what_it_had_used_up() -> None:
    environment = loaded(run_timeout_s=100.0)
    first = await begun(environment)
    await first.act(bash(f"sleep 0.2; {SOLVED}; echo /app > where; ln -s /app/where link"))
    state = await first.snapshot()
    assert state is not None
    used_s = first.metrics["command_s"]
    await first.close()
    second = environment.session(limits=LONG)
    await second.restore({"task": "create-file"}, 0, state)
    assert said(await second.act(bash("cat link; cd $(cat where) && ls"))) == "/app\ngreeting.txt\nlink\nwhere"
    assert second.metrics["command_s"] > used_s >= 0.2
    assert await judged(second) == 1.0


async def test_a_snapshot_of_another_version_of_the_task_is_refused(folder: Path) -> None:
    first = await begun(loaded(folder))
    state = await first.snapshot()
    assert state is not None
    await first.close()
    (folder / "create-file/tests/test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    second = loaded(folder, most_output_bytes=9_999).session(limits=LONG)  # another configuration reads it anew
    with pytest.raises(EnvironmentFailed, match="another version of task create-file"):
        await second.restore({"task": "create-file"}, 0, state)
    await second.close()


async def test_a_folder_that_is_too_large_has_no_snapshot_and_the_episode_goes_on() -> None:
    session = await begun(loaded())
    await session.act(bash("head -c 5000000 /dev/zero > big"))
    assert await session.snapshot() is None
    await session.act(bash(f"rm big; {SOLVED}"))
    assert await session.snapshot() is not None
    assert await judged(session) == 1.0


# in a host

needs_wall = pytest.mark.skipif(tiers.WALLS[Tier.WALL].refusal() is not None, reason="the kernel offers no wall here")


@pytest.mark.parametrize("tier", [Tier.PROCESS, pytest.param(Tier.WALL, marks=needs_wall)])
async def test_in_a_host_the_world_survives_the_death_of_its_process(tmp_path: Path, tier: Tier) -> None:
    order = HostOrder(REF, {"path": str(EXAMPLES), "provided": ["FROM"]}, readable=(str(EXAMPLES),))
    boot = LocalHosts(Interpreters(tmp_path), WallPolicy(tier)).boot
    environment = await HostedEnvironment.open(order, boot=boot)
    try:
        session = environment.session(limits=LONG)
        await session.start(await environment.task(Split.TRAIN, 0), 0)
        assert said(await session.act(bash(f"{SOLVED}; echo here > /tmp/note"))) == "(no output)"
        process: Any = session._seat.process  # type: ignore[union-attr]
        os.kill(process.pid, signal.SIGKILL)
        await until(lambda: process.death is not None)
        # A path put together from parts is a real one: what the wall shows, this command still may not read.
        hidden = str(EXAMPLES / "create-file/tests/test.sh").removeprefix("/")
        answer = said(await session.act(bash(f"cat /tmp/note; cat $(printf '\\x2f'){hidden}")))
        assert answer.startswith("here\n")
        assert "Permission denied" in answer
        assert (await session.score())[0] == 1.0
        await session.close()
    finally:
        await environment.close()


# the format


def changed(path: str, text: str) -> Callable[[Path], None]:
    def change(task: Path) -> None:
        (task / path).parent.mkdir(parents=True, exist_ok=True)
        (task / path).write_text(text)

    return change


DOCKERFILE = "environment/Dockerfile"
REFUSED: Mapping[str, tuple[Callable[[Path], None], str]] = {
    "steps": (
        changed(DOCKERFILE, "FROM a\nRUN apt \\\n  install\nWORKDIR /app\nUSER me\n"),
        "asks for RUN, USER: no",
    ),
    "memory": (
        changed("task.toml", "[environment]\nmemory_mb = 9\nimage = ''\n"),
        r"asks for environment\.memory_mb:",
    ),
    "unknown": (changed("task.toml", "steps = [1]\n"), "asks for steps: no container"),
    "compose": (changed("environment/docker-compose.yaml", ""), "docker-compose.yaml, which is not followed"),
    "stages": (changed(DOCKERFILE, "FROM a\nFROM b\nWORKDIR /app\n"), "several stages"),
    "copy from": (changed(DOCKERFILE, "WORKDIR /app\nCOPY --from=a /x .\n"), "copies with --from=a"),
    "copy text": (changed(DOCKERFILE, "WORKDIR /app\nCOPY <<EOF a\nx\nEOF\n"), "copies a text"),
    "copy out": (changed(DOCKERFILE, "WORKDIR /app\nCOPY Dockerfile /etc/x\n"), "outside of its WORKDIR"),
    "copy nothing": (changed(DOCKERFILE, "WORKDIR /app\nCOPY nothing .\n"), "copies nothing, which is not there"),
    "copy up": (changed(DOCKERFILE, "WORKDIR /app\nCOPY ../tests .\n"), r"copies \.\./tests, which is outside"),
    "variable": (changed(DOCKERFILE, "WORKDIR $HOME\n"), "WORKDIR has a variable"),
    "no workdir": (changed(DOCKERFILE, "ENV A=b\n"), "works in /;"),
    "system": (changed(DOCKERFILE, "WORKDIR /usr/src\n"), "works in /usr/src;"),
    "seconds": (changed("task.toml", "[agent]\ntimeout_sec = -1\n"), r"agent\.timeout_sec is -1"),
    "secret": (changed("task.toml", "[verifier]\nenv = {K = '${K}'}\n"), r"verifier\.env\.K is '\$\{K\}'"),
    "toml": (changed("task.toml", "["), "cannot be read"),
    "no tests": (lambda task: (task / "tests/test.sh").unlink(), "has no tests/test.sh"),
    "link": (lambda task: (task / "tests/more").symlink_to("/etc"), "has a link, tests/more"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_task_asks_for_and_is_not_done_is_refused_by_its_name(folder: Path, what: str) -> None:
    change, reason = REFUSED[what]
    change(folder / "create-file")
    with pytest.raises(InvalidEnvironment, match=f"task create-file.*{reason}"):
        loaded(folder)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"tasks": ["nothing"]}, "has no task nothing; it has create-file"),
        ({"path": "/nowhere"}, "holds no task"),
        ({"readable": [str(EXAMPLES.parent)]}, "and so the tests and solutions"),
        ({"command_timeout_s": 0}, "are positive"),
        ({"provided": []}, r"provided: \[FROM\]"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(config: Mapping[str, Any], reason: str) -> None:
    with pytest.raises(InvalidEnvironment, match=reason):
        loaded(**{"path": EXAMPLES, **config})


def test_what_is_provided_is_accepted_and_the_rest_is_followed(folder: Path) -> None:
    recipe = (
        'FROM a\n# no\nRUN <<EOF\nWORKDIR /no\nEOF\nENV A=b "C=d e"\nENV F g h\nWORKDIR /srv\nWORKDIR here\n'
        'COPY ["a.txt", "b.txt", "sub/"]\nCOPY data /srv/here/\nCOPY a.txt c.txt\n'
    )
    task = folder / "create-file"
    for name in ("a.txt", "b.txt", "data/deep.txt"):
        changed(f"environment/{name}", "x")(task)
    changed(DOCKERFILE, recipe)(task)
    found = read_task(task, ["FROM", "RUN"])
    assert (found.workdir, found.variables) == ("/srv/here", {"A": "b", "C": "d e", "F": "g h"})
    aims = [(copy.source.name, copy.target) for copy in found.copies]
    assert aims[:2] == [("a.txt", "/srv/here/sub/a.txt"), ("b.txt", "/srv/here/sub/b.txt")]
    assert aims[2:] == [("data", "/srv/here"), ("a.txt", "/srv/here/c.txt")]


@pytest.mark.parametrize(
    ("given", "inward"),
    [
        ("cat /app/x > /logs/y", "cat /e/app/x > /e/logs/y"),
        ("--in=/app '/tests/a' /app.", "--in=/e/app '/e/tests/a' /e/app."),
        ("/app.py /apple /app-2 web/app ../app $X/app ${X}/app ~/app", None),
        ("http://host/app a/tests/b", None),
    ],
)
def test_whole_paths_are_replaced_and_nothing_else(given: str, inward: str | None) -> None:
    places = Places(Path("/e"), "/app")
    assert places.inward(given) == (given if inward is None else inward)
    assert places.outward(places.inward(given)) == given
    own = Places(Path("/"), "/app")
    assert own.inward(given) == own.outward(given) == given


def test_rewards_are_read_as_harbor_reads_them() -> None:
    files: dict[str, bytes] = {}
    assert read(files.get) is None
    files["reward.json"] = b'{"accuracy": 0.25}'
    assert read(files.get) == Judgement(0.25)
    files["reward.json"] = b'{"reward": 1, "seconds": 2.5}'
    assert read(files.get) == Judgement(1.0, {"seconds": 2.5})
    files["reward.txt"] = b" 0.5\n"
    assert read(files.get) == Judgement(0.5)
    files["reward.txt"] = b" \n"
    assert read(files.get) == Judgement(1.0, {"seconds": 2.5})


@pytest.mark.parametrize("text", ['{"a": 1, "b": 2}', "{}", "[1]", '{"reward": "1"}', '{"reward": NaN}', "{"])
def test_rewards_that_are_no_numbers_are_named(text: str) -> None:
    with pytest.raises(UnreadableReward, match=r"reward\.json"):
        read({"reward.json": text.encode()}.get)


def test_a_machine_without_landlock_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landlock, "version", lambda: 0)
    with pytest.raises(InvalidEnvironment, match="the kernel has no Landlock"):
        loaded(most_output_bytes=9_998)


async def test_the_job_of_the_page_plays_the_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = [one.text for one in blocks() if one.page == "docs/worlds.md" and one.text.startswith("# harbor.yaml")]
    (tmp_path / "harbor.yaml").write_text(block)
    spec: JobSpec = load_job_spec(tmp_path / "harbor.yaml")
    (entry,) = spec.environments
    monkeypatch.chdir(ROOT)
    environment = load_environment(entry.ref, entry.config)
    assert [environment.num_tasks(split) for split in Split] == [2, 1]
    assert (await play(environment, "create-file", bash(SOLVED)))[0] == 1.0
