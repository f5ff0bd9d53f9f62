"""A Redis-compatible server as a child process: durable, on a unix socket only, gone when its parent is gone.

Duty: one server process with its directory, lock and socket. The rule: one server at a time per directory, and none
outlives the process that started it, however that process ends. It does not restart a dead server.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import IO

import redis
from redis.exceptions import RedisError

from services.process.children import die_with_parent

# sun_path holds 104 bytes on some systems, 108 on Linux.
MAX_SOCKET_PATH_BYTES = 100
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
POLL_S = 0.01


class RedisUnsuitable(RuntimeError):
    """No server can keep our promises; the message lists the attempts and the remedy."""


class RedisChild:
    """The server process, its directory and its socket."""

    def __init__(self, binary: Path, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._log_path = directory / "server.log"
        self._socket = _socket_path(directory)
        self._lock = _lock(directory / "lock")
        self._socket.unlink(missing_ok=True)
        self.url = f"unix://{self._socket}"
        self._argv = [str(binary), *_configuration(directory, self._socket)]
        self._process: subprocess.Popen[bytes] | None = None
        self._failure: OSError | None = None
        started = threading.Event()
        # The kernel ties the child to the thread that starts it, so that thread must live as long as the child.
        self._thread = threading.Thread(target=self._run, args=(started,), name="redis-server", daemon=True)
        self._thread.start()
        started.wait()
        if self._failure is not None:
            self._lock.close()
            raise RedisUnsuitable(f"{binary} cannot be started: {self._failure}")

    def _run(self, started: threading.Event) -> None:
        try:
            with self._log_path.open("ab") as log:
                self._process = subprocess.Popen(
                    self._argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    # A terminal's signal is meant for us; we stop the server last.
                    start_new_session=True,
                    # The child holds the lock too: a server still shutting down keeps its successor out.
                    pass_fds=[self._lock.fileno()],
                    preexec_fn=die_with_parent(),
                )
        except OSError as error:
            self._failure = error
        finally:
            started.set()
        if self._process is not None:
            self._process.wait()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def wait_until_ready(self) -> None:
        """Wait until the server answers and has loaded its data."""
        deadline = time.monotonic() + START_TIMEOUT_S
        client = redis.Redis.from_url(self.url, protocol=2, socket_timeout=5.0, retry=None)
        last: Exception | None = None
        try:
            while time.monotonic() < deadline:
                if not self._thread.is_alive():
                    raise RedisUnsuitable(f"the Redis server exited at once:\n{self._last_words()}")
                try:
                    client.ping()
                    return
                except (RedisError, OSError) as error:
                    last = error
                    time.sleep(POLL_S)
        finally:
            client.close()
        raise RedisUnsuitable(f"the Redis server is not ready after {START_TIMEOUT_S:.0f} s: {last}")

    def _last_words(self) -> str:
        return "\n".join(self._log_path.read_text(errors="replace").splitlines()[-8:])

    def close(self) -> None:
        if self._process is not None and self._thread.is_alive():
            self._process.terminate()
            self._thread.join(STOP_TIMEOUT_S)
            if self._thread.is_alive():
                self._process.kill()
        self._thread.join()
        self._socket.unlink(missing_ok=True)
        self._lock.close()


def _configuration(directory: Path, socket: Path) -> list[str]:
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(directory),
        "appendonly": "yes",
        "appendfsync": "always",
        "save": "",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
        "logfile": "",
    }
    return [part for name, value in options.items() for part in (f"--{name}", value)]


def _lock(path: Path) -> IO[str]:
    """Acquire the lock file, waiting briefly for a server that is shutting down because its parent was killed."""
    lock = path.open("a+")
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(POLL_S)
                continue
            lock.seek(0)
            owner = lock.read().strip() or "unknown"
            lock.close()
            raise RedisUnsuitable(
                f"a Redis server of process {owner} uses {path.parent}: stop it, or choose another GSPO_DATA_DIR"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        return lock


def _socket_path(directory: Path) -> Path:
    """Next to the data; if that path is too long for a socket, in a short directory that only we can enter.

    The name depends only on the data directory, so clients find a restarted server again.
    """
    beside = directory / "redis.sock"
    if len(os.fsencode(beside)) <= MAX_SOCKET_PATH_BYTES:
        return beside
    name = hashlib.sha256(os.fsencode(directory.resolve())).hexdigest()[:16]
    directory = Path(tempfile.gettempdir()) / f"gspo-{os.getuid()}-{name}"
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) != 0o700:
        raise RedisUnsuitable(f"{directory} is open to other users: remove it, or choose a shorter GSPO_DATA_DIR")
    return directory / "redis.sock"
