"""The built-in worlds: an oracle always wins, doing nothing never does, and tasks are the same everywhere."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import random
import signal
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from environments import gsm8k, word_problems
from environments.python_tool import PythonTool
from environments.sandbox.enclosed import enclosed
from environments.search_qa import SearchQA, make_collection
from gspo_core import descendants, landlock
from gspo_core.env import CallStatus, Environment, Observation, ParsedTurn, Session, Start, ToolCall, load_environment
from gspo_core.spec import spec_warnings
from gspo_core.spec_file import load_job_spec
from gspo_core.types import Split, StopReason
from services.hosts.server import HostOrder
from services.hosts.session import HostedEnvironment
from tests.patience import HANG_S

REFS = ("environments.gsm8k:GSM8K", "environments.python_tool:PythonTool", "environments.search_qa:SearchQA")
NUM_SAMPLED = 8


def turn(given: str | tuple[str, dict[str, Any]]) -> ParsedTurn:
    if isinstance(given, str):
        return ParsedTurn(given)
    return ParsedTurn("", (ToolCall(given[0], given[1], CallStatus.OK, "", 0, 1),))


async def begun(environment: Environment, split: Split, index: int) -> tuple[Session, Start]:
    session = environment.session()
    return session, await session.start(await environment.task(split, index), index)


async def play(environment: Environment, split: Split, index: int, *turns: Any) -> tuple[float, list[Observation]]:
    session, _ = await begun(environment, split, index)
    observations = [await session.act(turn(one)) for one in turns]
    reward, _ = await session.score()
    await session.close()
    assert session.close_failure is None
    return reward, observations


@pytest.mark.parametrize("split", list(Split))
@pytest.mark.parametrize("ref", REFS)
async def test_an_oracle_always_wins_and_doing_nothing_never_does(ref: str, split: Split) -> None:
    environment = load_environment(ref)
    cls: Any = environment.cls  # type: ignore[attr-defined]
    for index in random.Random(0).sample(range(environment.num_tasks(split)), NUM_SAMPLED):
        turns = cls.oracle(**await environment.task(split, index))
        reward, observations = await play(environment, split, index, *turns)
        assert reward == 1.0
        assert (observations[-1].done, observations[-1].stop_reason) == (True, StopReason.COMPLETED)
        assert not any("error" in str(message["content"]) for one in observations for message in one.messages)
        assert (await play(environment, split, index))[0] == 0.0
        assert (await play(environment, split, index, "I do not know"))[0] == 0.0


@pytest.mark.parametrize("ref", REFS)
async def test_tasks_are_distinct_and_held_out_ones_are_not_among_the_others(ref: str) -> None:
    environment = load_environment(ref)
    num_tasks = [environment.num_tasks(split) for split in Split]
    questions = {(await environment.task(split, index))["question"] for split in Split
                 for index in range(environment.num_tasks(split))}  # fmt: skip
    assert len(questions) == sum(num_tasks)
    assert min(num_tasks) >= 50
    assert environment.reward_range == (0.0, 1.0)


PRINT_TASKS = """
from gspo_core.env import load_environment
from gspo_core.types import Split
import asyncio, hashlib, json
for ref in {refs!r}:
    environment = load_environment(ref)
    tasks = [asyncio.run(environment.task(split, 7)) for split in Split]
    print(hashlib.sha256(json.dumps(tasks, sort_keys=True).encode()).hexdigest())
"""


def test_tasks_are_the_same_in_every_process() -> None:
    digests = set()
    for hash_seed in ("1", "2"):
        variables = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).parents[2])}
        program = [sys.executable, "-c", PRINT_TASKS.format(refs=REFS)]
        digests.add(subprocess.run(program, env=variables, capture_output=True, text=True, check=True).stdout)
    assert len(digests) == 1
    assert len(digests.pop().split()) == len(REFS)


# gsm8k


def test_the_bundled_file_is_what_its_maker_makes(tmp_path: Path) -> None:
    word_problems.write(tmp_path)
    for name in ("gsm8k_generated_train.jsonl", "gsm8k_generated_test.jsonl"):
        assert (tmp_path / name).read_text() == (word_problems.DATA / name).read_text()


def test_every_annotated_step_of_the_bundled_file_is_right() -> None:
    rows = gsm8k.read_problems(word_problems.DATA / "gsm8k_generated_train.jsonl")
    for row in rows:
        steps = [one.split(">>")[0].split("=") for one in row["answer"].split("<<")[1:]]
        assert all(gsm8k.shown(gsm8k.evaluate(step)) == value for step, value in steps)
        assert steps[-1][1] == row["answer"].rpartition("#### ")[2]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        *(("so it is\n#### 72", 72), ("#### 1,234", 1234), ("#### $18", 18), ("#### -3", -3), ("#### 2.50", 2.5)),
        *(("#### 3 then #### 4", 4), ("The answer is 72.", 72), ("first 3, then 1,000", 1000), ("72 apples", 72)),
        *(("", None), ("none", None), ("####", None)),
    ],
)
def test_the_final_answer_is_found(text: str, answer: float | None) -> None:
    assert gsm8k.final_answer(text) == (None if answer is None else Fraction(str(answer)))


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2 + 3 * 4", "14"), ("10 / 4", "2.5"), ("1 / 3", "0.333333"), ("0.1 + 0.2", "0.3"), ("-(2 - 5)", "3")],
)
def test_the_calculator_is_exact(expression: str, value: str) -> None:
    assert gsm8k.shown(gsm8k.evaluate(expression)) == value


@pytest.mark.parametrize(
    "expression",
    ["", "2 **9", "1/0", "abs(1)", "'a'", "__import__('os')", "9" * 201, "1e400", "*".join(["9" * 20] * 5)],
)
def test_the_calculator_refuses_the_rest_in_words(expression: str) -> None:
    with pytest.raises(ValueError, match=r"expression|known|zero|large"):
        gsm8k.evaluate(expression)


async def test_real_files_are_taken_from_a_path_and_mistakes_are_named(tmp_path: Path) -> None:
    line = '{"question": "How many?", "answer": "It is <<1+1=2>>2.\\n#### 2"}\n'
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(line)
    environment = load_environment(REFS[0], {"path": str(tmp_path)})
    assert [environment.num_tasks(split) for split in Split] == [1, 1]
    assert (await play(environment, Split.EVAL, 0, ("calculate", {"expression": "1+1"}), "#### 2"))[0] == 1.0
    with pytest.raises(Exception, match=r"nowhere/train\.jsonl"):
        load_environment(REFS[0], {"path": str(tmp_path / "nowhere")}).num_tasks(Split.TRAIN)
    (tmp_path / "main").mkdir()
    (tmp_path / "main" / "train-00000-of-00001.parquet").write_bytes(b"PAR1")
    (tmp_path / "train.jsonl").unlink()
    if importlib.util.find_spec("pyarrow") is None:
        with pytest.raises(ValueError, match=r"is Parquet: pip install -c constraints\.txt -e '\.\[parquet\]'"):
            gsm8k.read_problems(tmp_path / "main" / "train-00000-of-00001.parquet")
    (tmp_path / "broken.jsonl").write_text(line + '{"question": "How many?"}\n')
    with pytest.raises(ValueError, match="line 2"):
        gsm8k.read_problems(tmp_path / "broken.jsonl")


def test_a_problem_of_a_file_may_hold_any_separator_of_lines(tmp_path: Path) -> None:
    question = "How\u2028many\u2029are\x85there?"
    (tmp_path / "train.jsonl").write_text(f'{{"question": "{question}", "answer": "#### 2"}}\n\n', encoding="utf-8")
    assert gsm8k.read_problems(tmp_path / "train.jsonl") == [{"question": question, "answer": "#### 2"}]


# python_tool


async def test_the_interpreter_keeps_its_variables_and_forgives_mistakes() -> None:
    session, _ = await begun(load_environment(REFS[1]), Split.TRAIN, 0)

    async def run(code: str) -> str:
        return str((await session.act(turn(("python", {"code": code})))).messages[0]["content"])

    assert await run("x = 20\ndef double(n):\n    return 2 * n") == "(nothing)"
    assert await run("print('now')\ndouble(x) + 2") == "now\n42"
    assert await run("1 / 0") == "error: CodeError: ZeroDivisionError: division by zero"
    assert "CodeError" in await run("x = = 3")
    assert "time limit" in await run("x = 1\nwhile True:\n    pass")
    assert "memory limit" in await run("[0] * 10**9")
    assert "PermissionError" in await run("import os\nos.listdir('/')")
    assert "No module" in await run("import socket")
    assert "too much room" in await run("big = 'a' * 3_000_000")
    assert len(await run("print('a' * 10**6)")) <= 5000
    assert await run("x") == "20"  # as it was before what failed
    await session.close()


async def test_the_interpreter_goes_on_in_another_process() -> None:
    environment = await HostedEnvironment.open(HostOrder(REFS[1]))
    try:
        session, _ = await begun(environment, Split.TRAIN, 3)
        await session.act(turn(("python", {"code": "seen = []\ndef note(n):\n    seen.append(n)\n    return seen"})))
        await session.act(turn(("python", {"code": "note(1)"})))
        os.kill(environment.pool.server_pid, signal.SIGKILL)
        async with asyncio.timeout(HANG_S):
            while environment.pool.num_processes:  # killed in the middle of an action it would be another attempt
                await asyncio.sleep(0.01)
        answer = await session.act(turn(("python", {"code": "note(2)"})))
        assert answer.messages[0]["content"] == "[1, 2]"
        state = await session.snapshot()
        assert state is not None
        other = environment.session()
        await other.restore(await environment.task(Split.TRAIN, 3), 3, state)
        solution = PythonTool.oracle(**PythonTool.tasks[3])
        for one in solution:
            await other.act(turn(one))
        assert await other.score() == (1.0, {})
        for each in (session, other):
            await each.close()
    finally:
        await environment.close()


@pytest.mark.skipif(not landlock.version(), reason="the kernel has no Landlock, and nothing is withheld by it")
def test_what_escapes_the_interpreter_reaches_neither_the_session_nor_a_file(tmp_path: Path) -> None:
    """As its worker would: in its place, with what it is started with."""
    judge = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    (tmp_path / "answer").write_text("42\n")
    try:
        script = enclosed(Path("/bin/bash"))
        for attempt in (
            *([f"kill -0 {judge.pid}"] if landlock.version() >= 6 else []),
            f"cat /proc/{judge.pid}/environ",
            f"read -r < {tmp_path}/answer",
            f"echo 43 > {tmp_path}/answer",
            "echo x > /tmp/left",
            'test -n "$PYTEST_CURRENT_TEST$HOME"',
        ):
            assert subprocess.run(["/bin/bash", "-c", attempt], check=False, stderr=subprocess.DEVNULL).returncode == 0
            done = subprocess.run([script, "-c", f"echo alive; {attempt}"], check=False, capture_output=True, text=True)
            assert done.stdout == "alive\n"
            assert done.returncode != 0, attempt
            (tmp_path / "answer").write_text("42\n")
    finally:
        judge.kill()
        judge.wait()
        Path("/tmp/left").unlink(missing_ok=True)


async def test_the_interpreter_that_is_used_is_enclosed() -> None:
    session, _ = await begun(load_environment(REFS[1]), Split.TRAIN, 0)
    await session.act(turn(("python", {"code": "x = 1"})))
    await session.close()
    workers = [pid for pid, parent in descendants.parents().items() if parent == os.getpid()]
    interpreters = [pid for pid in workers if _told(pid, "comm") == "monty\n"]
    assert interpreters
    for pid in interpreters:
        assert "NoNewPrivs:\t1" in _told(pid, "status")
        assert _told(pid, "environ") == ""


def _told(pid: int, what: str) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{what}").read_text()
    return "it is gone"


async def test_the_time_for_code_is_bounded_and_goes_with_the_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("environments.python_tool.RUN_S", 1.0)
    environment = load_environment(REFS[1])
    session, _ = await begun(environment, Split.TRAIN, 0)
    await session.act(turn(("python", {"code": "while True:\n    pass"})))
    assert session.metrics["python_s"] > 1.0
    state = await session.snapshot()
    assert state is not None
    other = environment.session()
    await other.restore(await environment.task(Split.TRAIN, 0), 0, state)
    for one in (session, other):
        answer = await one.act(turn(("python", {"code": "1"})))
        assert "the time for this task is over" in str(answer.messages[0]["content"])
        await one.close()


def test_a_snapshot_of_another_interpreter_is_refused() -> None:
    tool = PythonTool()
    with pytest.raises(ValueError, match="another version"):
        tool.restore(b"monty 0.0.1\n" + bytes(8))


# search_qa


async def test_search_finds_what_leads_on_and_reading_counts() -> None:
    environment = load_environment(REFS[2])
    task = await environment.task(Split.TRAIN, 0)
    session, _ = await begun(environment, Split.TRAIN, 0)
    found = (await session.act(turn(("search", {"query": task["path"][0], "limit": 3})))).messages[0]["content"]
    assert task["path"][0] in found
    for query, answer in (("", "no words"), ('"quoted" OR NEAR(', "["), ("zzzzqq", "[]")):
        assert answer in str((await session.act(turn(("search", {"query": query})))).messages[0]["content"])
    assert "no document" in str((await session.act(turn(("read", {"title": "Nowhere"})))).messages[0]["content"])
    await session.act(turn(("read", {"title": task["path"][0]})))
    await session.act(turn(f"  {task['answer'].upper()}. "))
    assert await session.score() == (1.0, {})
    assert session.metrics["documents_found"] == pytest.approx(1 / len(task["path"]))
    await session.close()


def test_every_question_is_answered_by_its_documents_and_needs_more_than_one() -> None:
    collection = make_collection()
    assert len(collection.documents) == 350
    for question in collection.questions:
        assert len(question["path"]) >= 2
        assert question["answer"] in collection.documents[question["path"][-1]]
        assert question["answer"] not in collection.documents[question["path"][0]]
    assert len({question["question"] for question in SearchQA.tasks + SearchQA.eval_tasks}) == 660


def test_the_example_job_is_sound() -> None:
    spec = load_job_spec(Path(gsm8k.__file__).with_name("gsm8k_gspo.yaml"))
    assert (spec.objective.ratio, spec.environments[0].ref) == ("sequence", REFS[0])
    assert spec_warnings(spec) == []
