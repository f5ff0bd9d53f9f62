"""What stands for the interpreter in tests does what the interpreter does; workers are told files that exist."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.test_time import LONG_S, cpu_s, order
from tests.apparatus.processes import is_running
from tests.apparatus.warm_python import Child, WarmPython, interpreter_for, is_left, program
from tests.heaviest import HEAVIEST
from tests.services.rollout.rollout_kit import until

SCRIPT = """
import os, sys
assert "torch" in sys.modules
print(sys.argv[1:], os.getcwd(), os.environ["WORD"], sys.stdin.read())
os.write(int(sys.argv[2]), b"over a pipe")
print("said", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""
WARNS = """
import warnings
warnings.warn("look out")
"""
WORKS = """
import sys, time
begun = time.process_time()
while time.process_time() < begun + float(sys.argv[1]):
    pass
"""
WAITS = """
import os, signal, sys, time
def told(number, frame):
    print("told", flush=True)
    os._exit(9)
if sys.argv[1:]:
    signal.signal(signal.SIGTERM, told)
print(os.getpid(), flush=True)
while True:  # `signal.pause` would sleep through a signal that came just before it
    time.sleep(0.01)
"""


def test_it_has_what_it_was_given_and_its_end_is_the_programs(tmp_path: Path, warm_python: WarmPython) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    for status in (0, 3):
        reader, writer = os.pipe()
        done = subprocess.run(
            [warm_python.path, "script.py", str(status), str(writer)],
            cwd=tmp_path,
            env={**os.environ, "WORD": "given"},
            input="typed",
            capture_output=True,
            text=True,
            pass_fds=[writer],
            check=False,
        )
        os.close(writer)
        with os.fdopen(reader) as said:
            assert said.read() == "over a pipe"
        assert done.stdout == f"['{status}', '{writer}'] {tmp_path} given typed\n"
        assert done.stderr == "said\n"
        assert done.returncode == status


def test_what_is_no_module_and_no_script_goes_to_the_real_one(warm_python: WarmPython) -> None:
    code = "import sys; print('torch' in sys.modules)"
    assert subprocess.run([warm_python.path, "-c", code], capture_output=True, check=True).stdout == b"False\n"


@pytest.mark.parametrize(("words", "status"), [(["handled"], 9), ([], -signal.SIGTERM)])
def test_signals_reach_it(tmp_path: Path, warm_python: WarmPython, words: list[str], status: int) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    with subprocess.Popen([warm_python.path, tmp_path / "waits.py", *words], stdout=subprocess.PIPE) as waiting:
        assert waiting.stdout is not None
        assert waiting.stdout.readline()
        waiting.terminate()
        assert waiting.stdout.read() == (b"told\n" if words else b"")
        assert waiting.wait() == status


def test_it_does_not_outlive_who_asked_for_it(tmp_path: Path, warm_python: WarmPython) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    with subprocess.Popen([warm_python.path, tmp_path / "waits.py"], stdout=subprocess.PIPE) as waiting:
        assert waiting.stdout is not None
        pid = int(waiting.stdout.readline())
        assert pid != waiting.pid
        waiting.kill()
        assert waiting.stdout.read() == b"", "its end of the pipe is closed when it is gone"


def test_it_does_not_outlive_who_watches_it(tmp_path: Path, warm_python: WarmPython) -> None:
    """As when all of a group are killed: it has a group of its own."""
    (tmp_path / "waits.py").write_text(WAITS)
    reader, writer = os.pipe()
    waiting = warm_python.start([str(tmp_path / "waits.py")], writer, writer, writer)
    os.close(writer)
    with waiting.line, os.fdopen(reader) as said:
        assert int(said.readline()) == waiting.pid
        watching = int(Path(f"/proc/{waiting.pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(watching, signal.SIGKILL)
        asyncio.run(until(lambda: not is_running(waiting.pid)))


def test_what_is_killed_while_it_begins_is_gone(tmp_path: Path, warm_python: WarmPython) -> None:
    (tmp_path / "waits.py").write_text("import sys; sys.stdin.read()")
    assert warm_python.path
    for number in range(60):
        command = [str(warm_python.path), str(tmp_path / "waits.py")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as begun:
            with contextlib.suppress(subprocess.TimeoutExpired):
                begun.wait(number / 1500)
            begun.kill()
            assert begun.stdout is not None
            assert select.select([begun.stdout], [], [], 60.0)[0], "it holds its end of the pipe"


def test_warnings_are_errors_where_that_is_asked(tmp_path: Path, warm_python: WarmPython) -> None:
    (tmp_path / "warns.py").write_text(WARNS)
    said = [
        subprocess.run([warm_python.path, *flags, tmp_path / "warns.py"], capture_output=True, check=False)
        for flags in ((), ("-W", "error"), ("-P", "-W", "error"))
    ]
    assert [one.returncode for one in said] == [0, 1, 1]
    assert all(b"UserWarning: look out" in one.stderr for one in said)


def test_who_asks_for_the_process_itself_gets_it(tmp_path: Path, warm_python: WarmPython) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    for number, words, status in ((signal.SIGTERM, ["handled"], 9), (signal.SIGKILL, [], -signal.SIGKILL)):
        reader, writer = os.pipe()
        waiting = warm_python.start([str(tmp_path / "waits.py"), *words], writer, writer, writer)
        os.close(writer)
        with os.fdopen(reader) as said:
            assert int(said.readline()) == waiting.pid
            os.kill(waiting.pid, number)
            assert waiting.wait() == status


def test_what_is_killed_is_gone(tmp_path: Path, warm_python: WarmPython) -> None:
    """Of the program alone that would not hold: what it stood for might live on for a moment."""
    assert warm_python.path
    (tmp_path / "waits.py").write_text(WAITS)
    for python in (None, sys.executable):
        waiting = Child([str(tmp_path / "waits.py")], python=python, env=os.environ, stdout=subprocess.PIPE)
        with waiting:
            assert waiting.stdout is not None
            pid = int(waiting.stdout.readline())
            assert (pid == waiting.pid) is (python is not None)
            waiting.kill()
            assert waiting.wait() == -signal.SIGKILL
            assert not Path(f"/proc/{pid}").exists()


def test_what_is_forked_is_counted_when_it_ends(tmp_path: Path, warm_python: WarmPython) -> None:
    (tmp_path / "works.py").write_text(WORKS)
    before = cpu_s()
    subprocess.run([program(), tmp_path / "works.py", "0.5"], check=True)
    assert cpu_s() - before >= 0.5


def test_who_has_the_same_folder_shares_it_and_the_last_who_leaves_ends_it(tmp_path: Path) -> None:
    (tmp_path / "whose.py").write_text("import os; print(open(f'/proc/{os.getppid()}/stat').read().split()[3])")

    def server(warm: WarmPython) -> int:
        return int(subprocess.run([warm.path, tmp_path / "whose.py"], check=True, capture_output=True).stdout)

    first, last = WarmPython(tmp_path), WarmPython(tmp_path)
    with ThreadPoolExecutor() as pool, last:
        first.__enter__()
        pids = {server(first), server(last)}
        leaving = pool.submit(first.__exit__, None, None, None)
        pids.add(server(last))
        assert not leaving.done()
    leaving.result()
    (pid,) = pids
    assert not is_running(pid)


def test_one_that_is_joined_while_it_ends_goes_on(tmp_path: Path) -> None:
    (tmp_path / "orders").touch()
    reader, writer = os.pipe2(os.O_NONBLOCK)
    assert not is_left(tmp_path / "orders", reader)
    assert (tmp_path / "orders").exists()
    os.close(writer)
    assert is_left(tmp_path / "orders", reader)
    assert not (tmp_path / "orders").exists(), "who comes now begins another"
    os.close(reader)


def test_one_that_was_killed_or_never_began_is_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_begun = 0

    def begin(_: WarmPython, users: int) -> subprocess.Popen[bytes]:
        nonlocal num_begun
        num_begun += 1
        if num_begun == 1:
            raise ImportError("a module that does not import")
        (tmp_path / "orders").touch()  # and nothing removes it
        return subprocess.Popen([sys.executable, "-c", "import select; select.select([0], [], [])"], stdin=users)

    monkeypatch.setattr(WarmPython, "_begin", begin)
    with WarmPython(tmp_path) as one, pytest.raises(ImportError):
        assert one.path
    for _ in range(2):
        with WarmPython(tmp_path) as one:
            assert one.path
    assert num_begun == 3


def test_hosts_are_real_interpreters() -> None:
    """They have walls, and what is forked elsewhere would stand outside of them."""
    for service in ("api", "gateway", "rollout"):
        assert interpreter_for(["-m", f"services.{service}"], "warm") == sys.executable
    assert interpreter_for(["-m", "services.trainer"], "warm") == "warm", "attempts"
    assert interpreter_for(["script.py"], "warm") == "warm"


def test_long_files_come_first_in_the_order_that_is_written() -> None:
    rows = [
        {"test": "tests/core/test_a.py::test_x", "wall_s": LONG_S},
        {"test": "tests/core/test_b.py::test_x[a::b]", "wall_s": LONG_S / 2},
        {"test": "tests/core/test_c.py::test_x", "wall_s": LONG_S},
        {"test": "tests/core/test_c.py::test_y", "wall_s": 1.0},
        {"test": "(imports and collection)", "wall_s": 0.0},
    ]
    written: dict[str, object] = {}
    exec(order({"rows": rows}), written)
    assert written["HEAVIEST"] == ("core/test_c.py", "core/test_a.py")


def test_the_heaviest_files_exist() -> None:
    tests = Path(__file__).parents[1]
    assert [name for name in HEAVIEST if not (tests / name).is_file()] == []
