"""A place is held by one living process, and by none when that is dead."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from services.process import place
from services.process.place import hold_place, place_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells where a process stands")

ADDRESS = "127.0.0.1:1"  # nobody listens here: a place needs no port


def test_one_living_process_holds_a_place_and_its_death_frees_it() -> None:
    program = (
        "import sys\nfrom services.process.place import hold_place\n"
        f"with hold_place('test', '{ADDRESS}') as place:\n"
        "    print(place, file=sys.stderr, flush=True)\n    sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], text=True, **pipes) as holder:
        assert holder.stderr is not None
        assert holder.stderr.readline().strip() == place_of("test", ADDRESS)
        holder.send_signal(signal.SIGSTOP)
        with hold_place("test", ADDRESS) as mine:
            assert mine == ""  # a stopped process lives
        with hold_place("test", "127.0.0.1:2") as another:
            assert another == place_of("test", "127.0.0.1:2") != ""
        holder.kill()
        holder.wait()
    with hold_place("test", ADDRESS) as mine:
        assert mine == place_of("test", ADDRESS)
        with hold_place("test", ADDRESS) as twice:
            assert twice == ""


def test_a_child_does_not_hold_the_place_of_its_parent() -> None:
    with hold_place("test", ADDRESS):
        child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    with child, hold_place("test", ADDRESS) as mine:
        assert mine
        child.kill()


def test_where_it_is_not_known_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert place_of("test", "127.0.0.1:0") == ""
    monkeypatch.setattr(place, "_BOOT", place._BOOT.with_name("not-there"))
    assert place_of("test", ADDRESS) == ""
    with hold_place("test", ADDRESS) as mine:
        assert mine == ""
