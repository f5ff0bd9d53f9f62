"""Ports for servers that start later."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from services import ports
from services.ports import free_port


def test_the_kernel_gives_such_a_port_to_nobody_else():
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found = {free_port() for _ in range(50)}
    assert all(port < lowest for port in found)
    assert len(found) > 40


def test_a_port_in_use_is_passed_over(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        port = taken.getsockname()[1]
        assert not ports._can_bind("127.0.0.1", port)


def test_where_the_kernel_hands_out_all_ports_one_of_its_own_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "range").write_text("1024 65535\n")
    monkeypatch.setattr(ports, "_KERNEL_RANGE", tmp_path / "range")
    with socket.create_server(("127.0.0.1", free_port())):
        pass
