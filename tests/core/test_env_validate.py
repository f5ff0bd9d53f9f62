"""What an author is told before an environment trains anything: sound ones pass, and each defect has its reason."""

from __future__ import annotations

import gc
import io
import json
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

import gspo_core.testing.prompts
import gspo_core.testing.rehearsal
import gspo_core.testing.watch
from gspo_core.cli import main
from gspo_core.env import from_trl
from gspo_core.testing import Check, EnvironmentRefused, EnvironmentReport, Status, check_environment, validate
from gspo_core.testing.watch import _author_frame, _where
from tests.apparatus.processes import is_running
from tests.core.chat_kit import write_tokenizer


class Counter:
    """Raise the counter to the target, then say done."""

    tasks: ClassVar = [{"target": number} for number in range(3, 12)]
    eval_tasks: ClassVar = [{"target": 20}]
    reward_range = (0.0, 1.0)
    replayable = True

    def reset(self, target: int) -> str:
        self.value, self.target = 0, target
        return f"Reach exactly {target}."

    def add(self, amount: int) -> str:
        """Add to the counter.

        Args:
            amount: how much (1..5)
        """
        if not 1 <= amount <= 5:
            raise ValueError("amount must be 1..5")
        self.value += amount
        return str(self.value)

    def get_reward(self) -> Any:
        return float(self.value == self.target)


def oracle_of_counter(target: int) -> list[Any]:
    steps = [5] * (target // 5) + [target % 5] * bool(target % 5)
    return [("add", {"amount": step}) for step in steps]


def status(report: EnvironmentReport) -> dict[str, str]:
    return {check.id: str(check.status) for check in report.checks}


def test_a_small_class_is_sound() -> None:
    report = check_environment(Counter, oracle=oracle_of_counter)
    assert status(report) | {"prompt": "skip"} == dict.fromkeys(status(report), "pass") | {"prompt": "skip"}
    assert set(status(report)) >= {"tools", "tasks", "reset", "timeouts", "isolation", "together", "reward", "errors"}
    (reward,) = (check for check in report.checks if check.id == "reward")
    assert reward.data["oracle"] == 1.0
    assert json.loads(json.dumps(report.to_json()))["ok"]


# --- what is refused ------------------------------------------------------------------------------------------------

_SEEN: list[int] = []


class LeakingThroughItsClass(Counter):
    log: ClassVar[list[int]] = []

    def add(self, amount: int) -> str:
        """Add.

        Args:
            amount: how much
        """
        self.log.append(amount)
        return f"{len(self.log)} additions"


class LeakingThroughItsModule(LeakingThroughItsClass):
    log: ClassVar[list[int]] = _SEEN


class OneForAll(Counter):
    """Nothing is left behind, but sessions that run at the same time share a counter."""

    shared: ClassVar[dict[str, int]] = {}

    def reset(self, target: int) -> str:
        type(self).shared = {"value": 0}
        return super().reset(target)

    def add(self, amount: int) -> str:
        """Add.

        Args:
            amount: how much
        """
        self.shared["value"] += amount
        return str(self.shared["value"])


class Hanging(Counter):
    def add(self, amount: int) -> str:
        """Add.

        Args:
            amount: how much
        """
        time.sleep(30)
        return "late"


class HangingInReset(Counter):
    def reset(self, target: int) -> str:
        time.sleep(30)
        return "late"


class BlockingTheLoop(Counter):
    async def add(self, amount: int) -> str:  # type: ignore[override]
        """Add.

        Args:
            amount: how much
        """
        time.sleep(5)  # noqa: ASYNC251 - the mistake that is to be found
        return "late"


class NotANumber(Counter):
    def get_reward(self) -> float:
        return float("nan")


class NoReward(Counter):
    def get_reward(self) -> None:
        return None


class OutOfRange(Counter):
    def get_reward(self) -> float:
        return -0.5


class Undescribed(Counter):
    def add(self, amount, by: object = None) -> str:  # type: ignore[no-untyped-def, override]
        return "x"


class Broken(Counter):
    def reset(self, target: int) -> str:
        raise KeyError("the database")


class CloseFails(Counter):
    def close(self) -> None:
        raise OSError("still busy")


class Dice(Counter):
    """Random, and declared replayable."""

    def reset(self, target: int) -> str:
        super().reset(target)
        return f"You rolled {random.random()}."


class OracleAsTool(Counter):
    def oracle(self, target: int) -> str:
        """Tell the answer.

        Args:
            target: what for
        """
        return f"add {target}"


class ForgetfulSnapshot(Counter):
    replayable = False

    def snapshot(self) -> bytes:
        return b"{}"

    def restore(self, state: bytes) -> None:
        self.value, self.target = 0, 3


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


class ShowsAnImage(Counter):
    def reset(self, **task: object) -> Any:
        super().reset(**task)
        return [{"type": "text", "text": "Look."}, IMAGE]


class AnswersWithAnImage(Counter):
    def add(self, amount: int) -> Any:
        """Add.

        Args:
            amount: how much
        """
        self.value += amount
        return [IMAGE]


@pytest.mark.parametrize(
    ("cls", "check", "reason"),
    [
        (LeakingThroughItsClass, "isolation", "others were played before.*additions.*LeakingThroughItsClass.log"),
        (LeakingThroughItsModule, "isolation", "what changed between episodes: .*_SEEN"),
        (OneForAll, "together", "at the same time affect each other"),
        (Hanging, "timeouts", r"\('add', \{'amount': \d\}\) timed out after 1s: it hangs"),
        (HangingInReset, "reset", "timed out after 1s"),
        (BlockingTheLoop, "responsive", r"blocks the event loop.*test_env_validate.py, line \d+, in add"),
        (NotANumber, "reward", "nan, not a finite number"),
        (NoReward, "reward", "NoneType, not a number"),
        (OutOfRange, "reward", r"-0.5 is outside the declared reward_range \(0.0, 1.0\)"),
        (Undescribed, "tools", "add.amount. has no type hint that becomes a JSON type.*add.by. is not described"),
        (Broken, "reset", "KeyError: 'the database'"),
        (CloseFails, "close", "OSError: still busy"),
        (Dice, "isolation", "declared replayable, but randomness does not come from `seed`: first messages: .*rolled"),
        (OracleAsTool, "tools", "oracle is offered to the policy as a tool: make it a static method"),
        (ForgetfulSnapshot, "resume", "restored from its snapshot continues differently: answer"),
        (ShowsAnImage, "content", "the first messages: image_url"),
        (AnswersWithAnImage, "content", "an answer: image_url"),
    ],
)
def test_a_defect_is_refused_with_its_reason(
    cls: type, check: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    does_hang = cls in (Hanging, HangingInReset, BlockingTheLoop)
    patience = 1.0 if does_hang else 60.0  # a loaded machine must not make a sound call late
    if does_hang:
        monkeypatch.setattr(gspo_core.testing.watch, "_GRACE_S", 0.5)
    with pytest.raises(EnvironmentRefused, match=rf"{check} +.*{reason}") as refusal:
        check_environment(cls, timeout_s=patience)
    assert [failure.id for failure in refusal.value.report.failures] == [check]


# --- calls that do nothing ------------------------------------------------------------------------------------------


class NetworkDown(Counter):
    def add(self, amount: int) -> str:
        """Add.

        Args:
            amount: how much
        """
        raise ConnectionError("no route to host")


class HandsOutAGenerator(Counter):
    def add(self, amount: int) -> Any:
        """Add.

        Args:
            amount: how much
        """
        return (number for number in range(amount))


class NeedsTheMainThread(Counter):
    def add(self, amount: int) -> Any:
        """Add.

        Args:
            amount: how much
        """
        import signal

        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return "x"


class KeywordsAlone(Counter):
    def add(self, **arguments: Any) -> str:  # type: ignore[override]
        """Add."""
        return "1"


class Lookup(Counter):
    """Random arguments find nothing, which is no fault of its own."""

    def add(self, amount: int) -> str:
        """Look a number up.

        Args:
            amount: which
        """
        raise KeyError(f"there is no {amount}")


class Locked(Counter):
    """Like Lookup, but not even its oracle finds anything."""

    def add(self, amount: int) -> str:
        """Look a number up.

        Args:
            amount: which
        """
        raise KeyError(f"there is no {amount}")

    oracle = staticmethod(oracle_of_counter)


@pytest.mark.parametrize(
    ("cls", "check", "reason"),
    [
        (NetworkDown, "calls", "none of 15 random calls succeeded, for example: ConnectionError: no route to host"),
        (HandsOutAGenerator, "calls", "the result contains a value of type generator, which is not JSON"),
        (NeedsTheMainThread, "calls", "signal only works in main thread"),
        (Locked, "calls", "none of 1 of the oracle's calls succeeded.*there is no 3"),
        (KeywordsAlone, "tools", r"add takes only \*\*kwargs, so the policy is told of no arguments"),
    ],
)
def test_a_world_in_which_no_call_can_succeed_is_refused(cls: type, check: str, reason: str) -> None:
    report = validate(cls, timeout_s=60.0)
    failures = {failure.id: failure.message for failure in report.failures}
    assert check in failures
    assert re.search(reason, failures[check]), failures
    assert set(failures) <= {check, "reward"}  # an oracle that can do nothing is not worth more than nothing


def test_trl_worlds_in_which_no_call_can_succeed_are_refused_in_their_words() -> None:
    report = validate(from_trl(NetworkDown, dataset=Counter.tasks), timeout_s=60.0)
    assert "none of 15 random calls succeeded" in {one.id: one.message for one in report.failures}["calls"]


def test_where_random_arguments_may_be_to_blame_an_oracle_is_asked_for() -> None:
    report = check_environment(Lookup, timeout_s=60.0)
    (calls,) = (check for check in report.checks if check.id == "calls")
    assert calls.status is Status.WARN
    assert "define an oracle" in calls.message
    assert calls.data == {"calls": 15, "errors": 15}


class HalfDown(Counter):
    def look(self, page: str) -> str:
        """Look a page up.

        Args:
            page: which
        """
        raise ConnectionError("no route to host")


def test_a_tool_that_fails_whatever_it_is_given_is_named_though_others_work() -> None:
    """The world would teach that this tool is useless."""
    (calls,) = (check for check in validate(HalfDown, timeout_s=60.0).checks if check.id == "calls")
    assert calls.status is Status.WARN
    assert re.search(r"no call of look succeeded \(\d+ of \d+\), for example: ConnectionError: no route", calls.message)


LEAVES_DAEMONS = """
import os, time

class Guess:
    tasks = [{{"number": 3}}, {{"number": 5}}]

    def reset(self, number: int):
        if (child := os.fork()) == 0:
            os.setsid()
            if os.fork() == 0:
                with open({pids!r}, "a") as file:
                    file.write(f"{{os.getpid()}}\\n")
                time.sleep(600)
            os._exit(0)
        os.waitpid(child, 0)
        return "Guess."

    def get_reward(self):
        return 0.0
"""


@pytest.mark.skipif(sys.platform != "linux", reason="orphans can be adopted on Linux only")
def test_no_daemon_of_a_world_outlives_the_command_that_examined_it(tmp_path: Path) -> None:
    pids, world = tmp_path / "pids", tmp_path / "guess.py"
    world.write_text(LEAVES_DAEMONS.format(pids=str(pids)))
    asked = json.dumps({"ref": f"{world}:Guess", "config": {}, "model": None, "timeout_s": 60.0, "descriptor": 1})
    examined = subprocess.run(
        [sys.executable, "-m", "gspo_core.keeper", "gspo_core.testing", asked], capture_output=True, check=False
    )
    assert (examined.returncode, b"Traceback" in examined.stderr) == (0, False)
    examined_before = len(pids.read_text().split())
    main(["env", "validate", f"{world}:Guess", "--timeout", "60"])
    started = pids.read_text().split()
    assert len(started) > examined_before > 0
    assert [pid for pid in started if is_running(pid)] == []


class Penalising(Counter):
    reward_range = (-10.0, 1.0)

    def add(self, amount: int) -> str:
        """Add.

        Args:
            amount: how much
        """
        self.cost = getattr(self, "cost", 0) - 1
        return "nothing there"

    def get_reward(self) -> float:
        return float(getattr(self, "cost", 0))


def test_where_doing_nothing_beats_acting_it_is_said() -> None:
    report = check_environment(Penalising, timeout_s=60.0)
    (reward,) = (check for check in report.checks if check.id == "reward")
    assert reward.status is Status.WARN
    assert "no random episode is worth as much as doing nothing" in reward.message
    (reward,) = (check for check in check_environment(Counter, timeout_s=60.0).checks if check.id == "reward")
    assert reward.status is Status.PASS


# --- prompts and the model ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("context", "is_sound"), [(4096, True), (64, False)])
def test_a_prompt_that_fills_the_models_context_is_refused_with_both_numbers(
    tmp_path: Path, context: int, is_sound: bool
) -> None:
    model = write_tokenizer(tmp_path)
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": context}))
    report = validate(Counter, model=model, timeout_s=60.0)
    (prompt,) = (check for check in report.checks if check.id == "prompt")
    assert report.ok == is_sound
    assert prompt.data["bound"] == context
    if not is_sound:
        assert re.search(r"\d+ at most, but the model's context is 64 tokens: 9 of 9 tasks", prompt.message)


class Small(Counter):
    limits: ClassVar = {"max_context_tokens": 64}


def test_an_authors_own_limit_counts_too(tmp_path: Path) -> None:
    report = validate(Small, model=write_tokenizer(tmp_path), timeout_s=60.0)
    (prompt,) = report.failures
    assert "but limits.max_context_tokens is 64 tokens" in prompt.message


def test_a_tokenizer_that_takes_long_to_load_is_not_the_authors_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading a large vocabulary holds up every thread of the process."""
    load = gspo_core.testing.prompts.PromptMeter.load

    def slow(model_dir: Path) -> Any:
        time.sleep(2.0)
        return load(model_dir)

    monkeypatch.setattr(gspo_core.testing.watch, "_GRACE_S", 0.5)
    monkeypatch.setattr(gspo_core.testing.watch, "_LOADING_S", 0.5)
    monkeypatch.setattr(gspo_core.testing.prompts.PromptMeter, "load", slow)
    report = validate(Counter, model=write_tokenizer(tmp_path), timeout_s=0.5)
    assert "responsive" not in status(report), str(report)
    monkeypatch.setattr(gspo_core.testing.watch, "_TOKENIZER_S", 0.1)
    (failure,) = validate(Counter, model=tmp_path, timeout_s=0.1).failures
    assert "loading the model's tokenizer does not return" in failure.message


def test_time_in_which_the_whole_process_stands_still_counts_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop of all threads, as by a busy machine: the clock jumps, and nobody could have answered."""
    monkeypatch.setattr(gspo_core.testing.watch, "_GRACE_S", 0.5)
    jumps = iter([0.0, 100.0, 200.0])
    offset = [0.0]

    def clock() -> float:
        offset[0] += next(jumps, 0.0)
        return real() + offset[0]

    real = time.monotonic
    monkeypatch.setattr(gspo_core.testing.watch.time, "monotonic", clock)
    assert "responsive" not in status(validate(Counter, timeout_s=5.0))


def test_an_oracle_that_is_no_better_than_nothing_is_refused() -> None:
    with pytest.raises(EnvironmentRefused, match=r"the oracle gets 0.0, doing nothing gets 0.0"):
        check_environment(Counter, oracle=lambda target: ["done"])


def test_what_cannot_even_be_loaded_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert status(validate("nowhere.at_all:World")) == {"load": "fail"}
    assert status(validate(Counter, {"size": 3})) == {"load": "fail"}
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(5)\n")
    monkeypatch.setattr(gspo_core.testing.watch, "_LOADING_S", 0.2)
    monkeypatch.setattr(gspo_core.testing.watch, "_GRACE_S", 0.2)
    report = validate(f"{tmp_path}/slow.py:World", timeout_s=0.1)
    assert "loading does not return: slow.py, line 2" in report.failures[0].message


# --- what is only unusual -------------------------------------------------------------------------------------------


class Plain:
    def reset(self, **_: Any) -> None:
        self.words = ""

    def on_message(self, text: str) -> str:
        self.words += text
        return "?"

    def get_reward(self) -> float:
        return float(len(self.words))


def test_what_is_only_unusual_is_a_warning() -> None:
    report = check_environment(Plain)
    warned = {check.id: check.message for check in report.checks if check.status is Status.WARN}
    assert set(warned) == {"tools", "tasks", "reset", "reward", "resume"}
    assert "none held out" in warned["tasks"]
    assert "no reward_range" in warned["reward"]


def test_a_thread_that_is_only_ending_is_no_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine those of the sessions outlive the last call by a moment."""
    asked = 0

    def count() -> int:  # not those of this process, in which threads of earlier tests end, too
        nonlocal asked
        asked += 1
        return 110 if 1 < asked < 4 else 10

    # The checks' own name alone: other threads of this process ask the module itself.
    monkeypatch.setattr("gspo_core.testing.checks.threading", SimpleNamespace(active_count=count))
    report = check_environment(Plain)
    assert {check.id: check.status for check in report.checks}["close"] is Status.PASS
    assert asked >= 4


class Starting(Plain):
    may_end = threading.Event()

    def reset(self, **_: Any) -> None:
        super().reset()
        for _ in range(3):
            threading.Thread(target=self.may_end.wait, daemon=True).start()


def test_threads_that_stay_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gspo_core.testing.checks._ENDING_S", 0.05)
    try:
        report = check_environment(Starting)
    finally:
        Starting.may_end.set()
    (told,) = [check.message for check in report.checks if check.id == "close"]
    assert re.fullmatch(r"\d+ threads are still there 0.05 s after every episode was closed", told)


class Call:
    """Notes whether garbage was collected while somebody went on to its caller."""

    f_code = SimpleNamespace(co_filename="author.py", co_name="step")
    f_lineno = 7

    def __init__(self, collecting: list[bool], depth: int) -> None:
        self._collecting = collecting
        self._depth = depth

    @property
    def f_back(self) -> Call | None:
        self._collecting.append(gc.isenabled())
        return Call(self._collecting, self._depth - 1) if self._depth else None


def test_calls_of_another_thread_are_looked_at_while_no_garbage_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    thread, collecting = threading.current_thread(), list[bool]()
    monkeypatch.setattr(sys, "_current_frames", lambda: {thread.ident: Call(collecting, 2)})
    assert isinstance(_author_frame(thread), Call)
    assert _where(thread) == "author.py, line 7, in step"
    assert collecting == [False] * 6
    assert gc.isenabled()


def test_garbage_is_collected_again_when_a_look_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def frames() -> dict[int, Any]:
        raise RuntimeError("no frames")

    monkeypatch.setattr(sys, "_current_frames", frames)
    for look in (_author_frame, _where):
        with pytest.raises(RuntimeError, match="no frames"):
            look(threading.current_thread())
        assert gc.isenabled()


def test_other_forms_than_a_class_are_checked_too() -> None:
    assert check_environment(from_trl(Counter, dataset=Counter.tasks)).ok
    assert check_environment("environments.calculator:Calculator").ok


class Knowing(Counter):
    oracle = staticmethod(oracle_of_counter)


def test_the_oracle_may_be_a_static_method_of_the_class() -> None:
    report = check_environment(Knowing)
    assert any(check.data.get("oracle") == 1.0 for check in report.checks)


# --- the commands ---------------------------------------------------------------------------------------------------


def test_the_command_says_what_is_wrong_and_its_status_tells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ref = "tests.core.test_env_validate:Counter"
    assert main(["env", "validate", ref, "--model", str(write_tokenizer(tmp_path))]) == 0
    shown = capsys.readouterr().out
    assert f"{ref}: sound" in shown
    assert "tokens in the middle" in shown
    assert main(["env", "validate", "tests.core.test_env_validate:NotANumber", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [check["id"] for check in report["checks"] if check["status"] == "fail"] == ["reward"]
    assert main(["env", "validate", ref, "--config", "{"]) == 1
    assert "--config is not JSON" in capsys.readouterr().err


RUDE = '''
import os

class Rude:
    """Be kind."""
    tasks = [{}]
    def reset(self): return "go"
    def tool(self) -> str:
        """Do it."""
        {deed}
        return "done"
    def get_reward(self): return 0.0
'''


def test_an_environment_that_ends_the_process_is_refused_and_one_that_prints_spoils_no_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rude.py").write_text(RUDE.replace("{deed}", "os._exit(0)"))
    assert main(["env", "validate", f"{tmp_path / 'rude.py'}:Rude"]) == 1
    assert "it ended the process that it ran in (exit status 0)" in capsys.readouterr().out
    (tmp_path / "loud.py").write_text(RUDE.replace("{deed}", "print('hello', flush=True)"))
    assert main(["env", "validate", f"{tmp_path / 'loud.py'}:Rude", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]


@pytest.mark.parametrize(
    ("deed", "said"),
    [
        ("import signal; os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL: killed by itself, or for lack of memory"),
        ("import signal; signal.setitimer(signal.ITIMER_REAL, 600)", "leaves a timer running"),
        ("import signal; os.kill(os.getpid(), signal.SIGALRM)", "SIGALRM"),
    ],
)
def test_a_world_that_may_end_its_process_is_refused_in_words(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], deed: str, said: str
) -> None:
    (tmp_path / "rude.py").write_text(RUDE.replace("{deed}", deed))
    assert main(["env", "validate", f"{tmp_path / 'rude.py'}:Rude"]) == 1
    shown = capfd.readouterr()
    assert said in shown.out
    assert "Traceback" not in shown.out + shown.err


def test_what_a_world_prints_does_not_flood_the_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loud.py").write_text(RUDE.replace("{deed}", "print('x' * 1_000_000, flush=True)"))
    assert main(["env", "validate", f"{tmp_path / 'loud.py'}:Rude"]) == 0
    shown = capfd.readouterr()
    assert 64 << 10 <= len(shown.err) < 70_000
    assert re.search(r"it printed \d+\.\d MiB, of which 64 KiB are shown", shown.err)
    assert shown.out.splitlines()[-1].endswith("sound")


class Slow(Counter):
    def add(self, amount: int) -> str:
        """Add.

        Args:
            amount: how much
        """
        time.sleep(0.05)
        return "added"


class BlockingForAWhile(Counter):
    async def add(self, amount: int) -> str:  # type: ignore[override]
        """Add.

        Args:
            amount: how much
        """
        time.sleep(0.3)  # noqa: ASYNC251
        return "added"


class Listening(gspo_core.testing.watch.ExaminationWatcher):
    def __init__(self) -> None:
        self.told: list[str] = []

    def found(self, check: Check) -> None:
        self.told.append(check.id)

    def still(self, act: str, seconds: float) -> None:
        self.told.append(act)


def test_an_examination_says_each_finding_at_once_and_what_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gspo_core.testing.watch, "_TELLING_S", 0.1)
    witness = Listening()
    report = validate(Slow, witness=witness)
    assert [one for one in witness.told if one in status(report)] == list(status(report))
    assert "playing episode 1 of 3 with random calls" in witness.told[: witness.told.index("reset")]
    assert "playing the 3 episodes again" in witness.told


def test_an_async_member_that_blocks_for_a_while_is_not_said_to_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four at the same time block for longer than one may take, but each of them returns."""
    monkeypatch.setattr(gspo_core.testing.watch, "_GRACE_S", 0.1)
    monkeypatch.setattr(gspo_core.testing.rehearsal, "BLOCKING_S", 0.2)
    report = validate(BlockingForAWhile, timeout_s=0.9)
    assert "responsive" not in status(report)
    assert status(report)["blocking"] == "warn"
    (found,) = [one for one in report.checks if one.id == "blocking"]
    assert re.match(r"an async member holds the event loop for \d\.\d s \(step\)", found.message)


def test_a_person_can_be_the_policy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    typed = ':tools\nadd amount=9\nadd amount=3\n{"name": "sub"}\n{"name"\ndone\n'
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    assert main(["env", "play", "tests.core.test_env_validate:Counter", "--task", "0"]) == 0
    shown = capsys.readouterr().out
    said = [
        *("[user] Reach exactly 3.", "add(amount: integer)", "error: ValueError: amount must be 1..5", "[tool] 3"),
        *("unknown tool 'sub'", "error: invalid_json", "ended: completed", "reward 1"),
    ]
    positions = [shown.index(text) for text in said]
    assert positions == sorted(positions)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["env", "play", "tests.core.test_env_validate:Broken"]) == 1
    assert "failed in reset: error: KeyError: 'the database'" in capsys.readouterr().err
