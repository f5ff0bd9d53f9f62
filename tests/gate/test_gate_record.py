"""What a real run of pytest notes of its tests, and whose name stands beside what was left open."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gate.ends import Ends

ROOT = Path(__file__).parents[2]
CONFTEST = """
from tests.conftest import pytest_runtest_teardown
"""
LEAKY = """
import subprocess, sys

def test_leaves_a_process():
    kept = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)]
    kept.append(kept)  # a cycle, so that only the collector finds it

def test_is_innocent(): ...
"""
INNOCENT = """
import gc

def test_collects():
    gc.collect()
"""
INI = """
[pytest]
filterwarnings = error
asyncio_default_fixture_loop_scope = function
"""
MANY = """
import pytest

def test_passes(): ...

def test_fails():
    assert 1 == 2

@pytest.mark.skip(reason="not today")
def test_skipped(): ...

@pytest.fixture
def broken():
    raise LookupError("no such thing")

def test_broken(broken): ...
"""


def run(folder: Path, *flags: str, files: dict[str, str], leaks: str = "file") -> Ends:
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "pytest.ini").write_text(INI)
    record = folder / "record.jsonl"
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "tests.gate.record", "--record", str(record), *flags]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, "GSPO_TEST_LEAKS": leaks}
    done = subprocess.run([*argv, *sorted(files)], cwd=folder, env=environment, capture_output=True, check=False)
    with record.open("a") as file:  # as `make suite` does
        file.write(json.dumps({"exit": done.returncode}) + "\n")
    return Ends.read(record)


@pytest.mark.parametrize("flags", [(), ("-n", "1")], ids=["one process", "a worker"])
def test_how_tests_ended_with_one_line_of_their_errors(flags: tuple[str, ...], tmp_path: Path) -> None:
    ends = run(tmp_path, *flags, files={"test_a.py": "def test_first(): ...\n", "test_b.py": MANY})
    assert ends.is_whole
    assert ends.num_passed == 2
    assert ends.skips() == {"not today": 1}
    fails, broken = ends.failures()
    assert (fails.test, fails.error) == ("test_b.py::test_fails", "assert 1 == 2")
    assert (broken.test, broken.error) == ("test_b.py::test_broken", "LookupError: no such thing")
    assert fails.behind == broken.behind == ("test_a.py",)
    assert fails.can_be_repeated


def test_a_file_that_cannot_be_read_and_an_interpreter_that_ends_are_noted_too(tmp_path: Path) -> None:
    unreadable = run(tmp_path, files={"test_a.py": "import nowhere\n"})
    ((failure,),) = [unreadable.failures()]
    assert "nowhere" in failure.error
    assert not failure.can_be_repeated
    ends = run(tmp_path, "-n", "1", files={"test_a.py": "import os\n\ndef test_ends():\n    os._exit(1)\n"})
    assert ["crashed" in one.error for one in ends.failures()] == [True]


def test_what_is_left_open_is_told_of_its_own_file_and_not_of_the_next(tmp_path: Path) -> None:
    files = {"conftest.py": CONFTEST, "test_a.py": LEAKY, "test_b.py": INNOCENT}
    (failure,) = run(tmp_path, files=files).failures()
    assert failure.file == "test_a.py"
    assert "left open in test_a.py: ResourceWarning: subprocess" in failure.error


def test_when_it_is_repeated_the_test_that_left_it_is_named(tmp_path: Path) -> None:
    files = {"conftest.py": CONFTEST, "test_a.py": LEAKY}
    (failure,) = run(tmp_path, files=files, leaks="each").failures()
    assert failure.test == "test_a.py::test_leaves_a_process"
