"""A phase ends with its command, or at its limit; nothing of it lives on, and nobody waits for its pipe."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.apparatus.processes import is_running
from tests.gate import chaos
from tests.gate.__main__ import TESTS, is_excused
from tests.gate.confirm import Verdict
from tests.gate.ends import Ends, Failure
from tests.gate.phases import TOO_LONG, Done, Phase, run, together
from tests.patience import HANG_S
from tests.services.rollout.rollout_kit import until

LEAVES_A_CHILD = (
    "import subprocess, sys\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'])\n"
    "print(child.pid, flush=True)\n"
)


@pytest.mark.parametrize(
    ("more", "limit_s", "status"), [("child.wait()", 1.0, TOO_LONG), ("", 600.0, 0)], ids=["at its limit", "by itself"]
)
async def test_what_a_phase_has_started_ends_with_it(tmp_path: Path, more: str, limit_s: float, status: int) -> None:
    done = run(Phase("one", [sys.executable, "-c", LEAVES_A_CHILD + more], limit_s), tmp_path)
    assert done.status == status
    (pid,) = done.words(1)
    await until(lambda: not is_running(pid))


MEETS_ANOTHER = """
import sys, time
from pathlib import Path
own, other = map(Path, sys.argv[1:])
print(own.name, flush=True)
own.touch()
while not other.exists():
    time.sleep(0.01)
"""


def test_phases_run_side_by_side_and_their_words_are_not_mixed(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    places = [str(tmp_path / name) for name in ("first", "second")]
    pairs = (places, places[::-1])
    phases = [Phase(Path(own).name, [sys.executable, "-c", MEETS_ANOTHER, own, other], 600.0) for own, other in pairs]
    done = together(phases, tmp_path / "logs")
    assert [(one.phase.name, one.status, one.words(9)) for one in done] == [
        ("first", 0, ["first"]),
        ("second", 0, ["second"]),
    ]
    assert capfdbinary.readouterr().out == b"first\nsecond\n"


NOTES_ITSELF = """
import os, sys, time
from pathlib import Path
Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(3600)  # beyond what anybody here waits
"""
IS_TOLD_TO_END = """
import sys
from pathlib import Path
from tests.gate.phases import Phase, end_with_us, together
end_with_us()
folder, code = Path(sys.argv[1]), sys.argv[2]
phases = [Phase(name, [sys.executable, "-c", code, str(folder / name)], 7200.0) for name in ("a", "b")]
together(phases, folder / "logs")
"""


def test_what_ends_the_gate_ends_every_phase_that_runs(tmp_path: Path) -> None:
    phases = [tmp_path / name for name in ("a", "b")]
    with subprocess.Popen([sys.executable, "-c", IS_TOLD_TO_END, str(tmp_path), NOTES_ITSELF]) as gate:
        try:
            asyncio.run(until(lambda: all(path.exists() and path.read_text() for path in phases)))
            gate.terminate()
            assert gate.wait(HANG_S) == 128 + signal.SIGTERM
            asyncio.run(until(lambda: not any(is_running(path.read_text()) for path in phases)))
        finally:
            gate.kill()
            for path in phases:
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    os.kill(int(path.read_text()), signal.SIGKILL)


def test_a_phase_that_fails_ends_no_other(tmp_path: Path) -> None:
    failing = Phase("failing", [sys.executable, "-c", "raise SystemExit(7)"], 600.0)
    other = Phase("other", [sys.executable, "-c", "import time; time.sleep(0.5); print('over')"], 600.0)
    assert [(one.status, one.words(1)) for one in together([failing, other], tmp_path)] == [(7, []), (0, ["over"])]


def test_no_flake_excuses_tests_that_ran_past_their_limit(tmp_path: Path) -> None:
    flake = Verdict(Failure("tests/a.py::test_a", "once", (), True, False), is_red=False, why="it passed")
    assert is_excused(Done(TESTS, 2, 1.0, tmp_path), Ends([], is_whole=True), [flake])
    assert not is_excused(Done(TESTS, TOO_LONG, 1.0, tmp_path), Ends([], is_whole=True), [flake])


def test_why_chaos_gave_up_comes_before_what_the_oracle_found_and_what_it_always_says_is_none(tmp_path: Path) -> None:
    log = tmp_path / "chaos.log"
    log.write_text(
        "oracle: lengths of what was trained: 7\noracle: a job is lost\nsummary\nchaos: FAILED: it never ran\n"
    )
    done = Done(Phase("chaos", [], 1.0), 1, 1.0, log)
    assert chaos.reasons(done) == ["chaos: FAILED: it never ran", "oracle: a job is lost"]
