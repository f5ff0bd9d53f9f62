"""The connections of a server: how many there may be, and how long one may keep the server waiting.

Rule: a client uses its connection or loses it. Where there are too many, the one that has been idle longest gives way,
or else the one that has been sending its head longest, and not the newcomer. Below that bound none gives way before its
time, since clients that are sent away come back at once. All connections are looked at together, once a second, so that
a request costs nothing. It writes no answer and knows no protocol.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterable
from enum import Enum
from itertools import chain
from typing import Protocol

from services.process.telemetry import get_logger

# From the first byte of a head, or from the connection if none comes, to its end. Heads are a few hundred bytes.
HEAD_S = 20.0
# A body, or an answer, may stand still for so long; bytes that get through earn more time at this rate, to this much.
STANDSTILL_S = 30.0
LEAST_BYTES_PER_S = 4096
LOOK_S = 1.0
# Each is a file, and some kilobytes.
MAX_CONNECTIONS = 4096
# Files that the process has open besides its connections.
OTHER_FILES = 256


class Part(Enum):
    """The part that a client has to send next."""

    HEAD = "head"
    BODY = "body"
    NOTHING = "nothing"


class ConnectionPatience:
    """How long a connection may go on as it does."""

    __slots__ = ("_left_s", "_num_sent", "_unread_s", "part")

    def __init__(self) -> None:
        self._num_sent = 0
        self._unread_s = STANDSTILL_S
        self.expect(Part.HEAD)

    def expect(self, part: Part) -> None:
        self.part = part
        self._left_s = HEAD_S if part is Part.HEAD else STANDSTILL_S

    def came(self, num_bytes: int) -> None:
        """``num_bytes`` of a body arrived."""
        self._left_s = min(STANDSTILL_S, self._left_s + num_bytes / LEAST_BYTES_PER_S)

    def is_late(self, seconds: float, *, is_reading: bool) -> bool:
        """Whether the client has let us wait too long. ``seconds`` went by; while we do not read, no time does."""
        if self.part is Part.NOTHING or not is_reading:
            return False
        self._left_s -= seconds
        return self._left_s <= 0

    def is_stuck(self, seconds: float, num_sent: int, num_unsent: int) -> bool:
        """Whether the client has not read its answer for too long."""
        earned = (num_sent - self._num_sent) / LEAST_BYTES_PER_S
        self._num_sent = num_sent
        if num_unsent == 0:
            self._unread_s = STANDSTILL_S
            return False
        self._unread_s = min(STANDSTILL_S, self._unread_s + earned) - seconds
        return self._unread_s <= 0


class Connection(Protocol):
    def look(self, seconds: float) -> None:
        """``seconds`` went by since the last look."""
        ...

    def give_way(self) -> None:
        """Close, to make room for another connection."""
        ...


class Crowd:
    """The connections of one server, as far as they wait for their clients."""

    def __init__(self, max_connections: int = MAX_CONNECTIONS) -> None:
        self.max_connections = max_connections
        # In order: the first has been there longest.
        self._heads: dict[Connection, None] = {}
        self._idle: dict[Connection, None] = {}

    def head_begins(self, connection: Connection) -> None:
        self._idle.pop(connection, None)
        self._heads.setdefault(connection)

    def head_is_there(self, connection: Connection) -> None:
        self._heads.pop(connection, None)

    def rests(self, connection: Connection) -> None:
        """It was answered, and asks for nothing."""
        self._idle[connection] = None

    def leaves(self, connection: Connection) -> None:
        self._heads.pop(connection, None)
        self._idle.pop(connection, None)

    def has_room(self, num_connections: int) -> bool:
        """Whether so many connections may exist; if not, the oldest that is idle or sending a head is closed for it."""
        if num_connections <= self.max_connections:
            return True
        oldest = next(chain(self._idle, self._heads), None)
        if oldest is not None:
            self._dismiss(oldest)
        return oldest is not None

    def _dismiss(self, connection: Connection) -> None:
        self.leaves(connection)
        connection.give_way()


async def look_after(connections: Iterable[Connection], look_s: float = LOOK_S) -> None:
    """Until it is cancelled."""
    loop = asyncio.get_running_loop()
    last = loop.time()
    while True:
        await asyncio.sleep(look_s)
        now = loop.time()
        # A process that was held up does not hold it against its clients: they may have sent all the while.
        seconds, last = min(now - last, 2 * look_s), now
        for one in list(connections):
            one.look(seconds)


def allowed_connections(wanted: int = MAX_CONNECTIONS) -> int:
    """As many as this process may have files for; it allows itself more of them where it can."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    allowed = max(soft - OTHER_FILES, soft // 2)
    get_logger().warning("few files may be open, so few connections are taken", connections=allowed, wanted=wanted)
    return allowed
