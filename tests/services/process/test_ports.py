"""Ports for servers that start later."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from services.process import ports
from services.process.ports import free_port, kept_port


def kernel_hands_out(first: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "range").write_text(f"{first}\t65535\n")
    monkeypatch.setattr(ports, "_KERNEL_RANGE", tmp_path / "range")


def test_the_kernel_gives_such_a_port_to_nobody_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    kernel_hands_out(32768, monkeypatch, tmp_path)
    found = {free_port() for _ in range(50)}
    assert all(10_000 <= port < 32768 for port in found)
    assert len(found) > 40


def test_a_port_in_use_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    kernel_hands_out(32768, monkeypatch, tmp_path)
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        port, other = taken.getsockname()[1], free_port()
        os.close(ports._held.pop())
        drawn = iter([port, port, other])

        class Drawing:
            def randrange(self, *_: int) -> int:
                return next(drawn)

        monkeypatch.setattr("random.SystemRandom", Drawing)
        assert free_port() == other


ANOTHER = """
import random, sys
from services.process.ports import free_port

taken, other = map(int, sys.argv[1:])
drawn = iter([taken, other])
random.SystemRandom = lambda: type("Drawing", (), {"randrange": lambda *_: next(drawn)})()
print(free_port())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a server could not bind it either")
def test_nobody_else_finds_a_port_that_waits_for_its_server_and_the_server_gets_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kernel_hands_out(32768, monkeypatch, tmp_path)
    port, other = free_port(), free_port()
    os.close(ports._held.pop())
    another = [sys.executable, "-c", ANOTHER, str(port), str(other)]
    assert int(subprocess.run(another, capture_output=True, check=True).stdout) == other
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    for _ in range(2):  # it may be started again
        with (
            socket.create_server(("127.0.0.1", port)) as server,
            socket.create_connection(("127.0.0.1", port)) as client,
        ):
            server.accept()[0].close()
            assert client.recv(1) == b""


def test_only_so_many_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_MOST_HELD", 3)
    found = [free_port() for _ in range(5)]
    assert len(set(found)) == 5
    assert len(ports._held) <= 3


def test_where_the_kernel_hands_out_all_ports_one_of_its_own_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    kernel_hands_out(1024, monkeypatch, tmp_path)
    with socket.create_server(("127.0.0.1", free_port())):
        pass


def test_a_kept_port_is_had_again_unless_somebody_listens_there(tmp_path: Path) -> None:
    file = tmp_path / "port"
    port = kept_port(file)
    with socket.create_server(("127.0.0.1", port)) as server, socket.create_connection(("127.0.0.1", port)) as client:
        other = kept_port(file)
        assert other != port
        # Who hangs up first is remembered by the kernel for a while.
        server.accept()[0].close()
        assert client.recv(1) == b""
    assert kept_port(file) == other
    file.write_text(f"{port}\n")
    assert kept_port(file) == port
    for damaged in ("", "x", "-1", "70000"):
        file.write_text(damaged)
        assert kept_port(file) == int(file.read_text())
