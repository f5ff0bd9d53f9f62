"""A phase ends with its command, or at its limit; nothing of it lives on, and nobody waits for its pipe."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.apparatus.processes import is_running
from tests.gate.__main__ import TESTS, is_excused
from tests.gate.confirm import Verdict
from tests.gate.ends import Ends, Failure
from tests.gate.phases import TOO_LONG, Done, Phase, run, together
from tests.patience import HANG_S
from tests.services.rollout.rollout_kit import until

LEAVES_A_CHILD = (
    "import subprocess, sys\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
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


IS_TOLD_TO_END = """
import sys
from pathlib import Path
from tests.gate.phases import Phase, end_with_us, together
end_with_us()
code = "import os, sys, time; from pathlib import Path; Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(600)"
folder = Path(sys.argv[1])
together([Phase(name, [sys.executable, "-c", code, str(folder / name)], 600.0) for name in ("a", "b")], folder / "logs")
"""


def test_what_ends_the_gate_ends_every_phase_that_runs(tmp_path: Path) -> None:
    phases = [tmp_path / name for name in ("a", "b")]
    with subprocess.Popen([sys.executable, "-c", IS_TOLD_TO_END, str(tmp_path)]) as gate:
        asyncio.run(until(lambda: all(path.exists() and path.read_text() for path in phases)))
        gate.terminate()
        assert gate.wait(HANG_S) == 128 + signal.SIGTERM
    assert not any(is_running(path.read_text()) for path in phases)


def test_a_phase_that_fails_ends_no_other(tmp_path: Path) -> None:
    failing = Phase("failing", [sys.executable, "-c", "raise SystemExit(7)"], 600.0)
    other = Phase("other", [sys.executable, "-c", "import time; time.sleep(0.5); print('over')"], 600.0)
    assert [(one.status, one.words(1)) for one in together([failing, other], tmp_path)] == [(7, []), (0, ["over"])]


def test_no_flake_excuses_tests_that_ran_past_their_limit(tmp_path: Path) -> None:
    flake = Verdict(Failure("tests/a.py::test_a", "once", (), True, False), is_red=False, why="it passed")
    assert is_excused(Done(TESTS, 2, 1.0, tmp_path), Ends([], is_whole=True), [flake])
    assert not is_excused(Done(TESTS, TOO_LONG, 1.0, tmp_path), Ends([], is_whole=True), [flake])
