"""One launched installation at a time on a data directory: a second one would write the same Redis file."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.launch.only_one import RunsAlready, only_one

HOLDS = """
import sys
from pathlib import Path
from services.launch.only_one import only_one
with only_one(Path(sys.argv[1]), print):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def said() -> list[str]:
    return []


def test_a_second_one_is_told_where_the_first_runs_and_waits_for_its_end(tmp_path: Path, said: list[str]) -> None:
    argv = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"held\n"
        is_told = pytest.raises(RunsAlready, match=rf"in use: process {first.pid} on .*name another --data-dir")
        with is_told, only_one(tmp_path, said.append, within_s=0):
            pytest.fail("two have it")
        first.kill()
        first.wait()
        with only_one(tmp_path, said.append):
            assert (tmp_path / "launched.lock").read_text().startswith(f"process {os.getpid()} on ")
    assert said == []


def test_it_takes_what_is_given_up_while_it_waits(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "launched.lock").open("w+") as held:
        print("process 7 on elsewhere", file=held, flush=True)
        fcntl.flock(held, fcntl.LOCK_EX)
        monkeypatch.setattr("time.sleep", lambda _: fcntl.flock(held, fcntl.LOCK_UN))
        with only_one(tmp_path, said.append):
            assert (tmp_path / "launched.lock").read_text().startswith(f"process {os.getpid()} on ")
    assert said == [
        "the data directory is in use: process 7 on elsewhere launched on it; waiting for its end for 120 s"
    ]


@pytest.mark.parametrize("holder", ["7", "77"])
def test_a_batch_job_goes_on_where_a_node_that_was_lost_keeps_its_lock(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch, holder: str
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with (tmp_path / "launched.lock").open("w+") as held:
        print(f"process 1 on n1, Slurm job {holder}", file=held, flush=True)
        fcntl.flock(held, fcntl.LOCK_EX)
        is_refused = pytest.raises(RunsAlready) if holder == "77" else contextlib.nullcontext()
        with is_refused, only_one(tmp_path, said.append, within_s=0):
            pass
    assert ["that was this job on a node that was lost" in one for one in said] == [True] * (holder == "7")


def test_where_files_cannot_be_locked_that_is_told_and_nothing_refused(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with only_one(tmp_path, said.append):
        pass
    assert said == [
        f"{tmp_path}/launched.lock cannot be locked (No locks available): launch nothing else on this data directory"
    ]


def test_a_file_system_may_say_of_a_held_lock_that_it_is_not_permitted(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(RunsAlready, match="another installation"), only_one(tmp_path, said.append, within_s=0):
        pass
