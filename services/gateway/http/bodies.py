"""Bodies of requests: read within budgets of bytes and of open requests, and made into values away from the event loop
where they are large.

Rule: a request too many, of one key or of all, is refused before its body is read: an agent has a few turns under way
at once, and a loop that does not wait for its answers must not take what other episodes need. A body counts in the
budget of its key from its first byte until a turn was made of it, and in that of all keys with what it has beyond
``FREE_BYTES``; what is too much is refused at once. So keys whose large bodies stand still shut out no small one. Those
first bytes are bounded by how many requests may be open. Keys are held as digests while they ask. What would become too
many values is refused before any of them is made. Large bodies are parsed one after the other, so that whoever waits
for the interpreter waits for one thread at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from starlette.requests import Request

from gspo_core import strict_json
from gspo_core.json_value import JSON
from services.gateway.dialects.turns import Refusal, RefusalKind

T = TypeVar("T")

# Histories hold whole files and outputs of tools: four million tokens.
MAX_BODY_BYTES = 16 << 20
# The largest body of a reward or a receipt.
SMALL_BODY_BYTES = 64 << 10
# For one key; an agent shares it with those that it starts.
MAX_BYTES_OF_ONE = 4 * MAX_BODY_BYTES
MAX_BYTES = 16 * MAX_BODY_BYTES
# The first bytes of a body count for its key alone: 512 MiB for all requests that may be open.
FREE_BYTES = 256 << 10
# Parsing more takes milliseconds, in which nobody else is answered.
IN_THREAD_BYTES = 256 << 10
# A thousand messages with sixty tools have a tenth of it. Made of so many empty lists, a body holds the interpreter for
# some 30 ms.
MAX_NODES = 300_000
# Agents that start agents of their own share the key of their episode.
MAX_OPEN_OF_ONE = 64
# Each holds its history in memory, megabytes at times.
MAX_OPEN = 2048
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_ARGUMENTS = b'"arguments"'
# Counting in more at once holds the interpreter, so that nobody is answered meanwhile.
_PIECE_BYTES = 1 << 20


class BodyTooLarge(Exception):
    """More bytes than a body of its kind may have."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__(f"a body may have at most {most_bytes} bytes")


class Seats:
    """How many requests may be open at once, for one key and for all."""

    def __init__(self, most: int = MAX_OPEN, most_of_one: int = MAX_OPEN_OF_ONE) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._open: Counter[bytes] = Counter()
        self._num_open = 0

    @contextlib.contextmanager
    def taken(self, key: str) -> Iterator[None]:
        """Raises ``Refusal``."""
        name = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()[:16]
        if self._open[name] >= self._most_of_one:
            message = f"{self._most_of_one} requests with this key wait for their answers, as many as may; wait for one"
            raise Refusal(RefusalKind.TOO_MANY, message)
        if self._num_open >= self._most:
            raise Refusal(RefusalKind.AWAY, "too many requests are open at this gateway; ask again")
        self._open[name] += 1
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1
            self._open[name] -= 1
            if not self._open[name]:
                del self._open[name]


class Bodies:
    """Those that are read at this moment."""

    def __init__(self, most: int = MAX_BYTES, most_of_one: int = MAX_BYTES_OF_ONE, free: int = FREE_BYTES) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._free = free
        self._held: Counter[bytes] = Counter()
        self._num_common = 0
        """Bytes that are held, without the free ones."""
        self._parsing = asyncio.Lock()

    @contextlib.contextmanager
    def of(self, key: str) -> Iterator[Body]:
        """Holds its share until the end."""
        body = Body(self, hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()[:16])
        try:
            yield body
        finally:
            body.give_back()

    def check_room(self, key: bytes, num_bytes: int, num_before: int = 0) -> None:
        """For so many more of a body that has ``num_before``. Raises ``Refusal``."""
        if self._held[key] + num_bytes > self._most_of_one:
            message = f"requests with this key that are being read have {self._most_of_one} bytes, as many as may"
            raise Refusal(RefusalKind.TOO_MANY, f"{message}; ask again")
        if self._num_common + self._common(num_bytes, num_before) > self._most:
            raise Refusal(RefusalKind.TOO_MANY, "requests that are being read are too large together; ask again")

    def hold(self, key: bytes, num_bytes: int, num_before: int) -> None:
        """As ``check_room``."""
        self.check_room(key, num_bytes, num_before)
        self._held[key] += num_bytes
        self._num_common += self._common(num_bytes, num_before)

    def give_back(self, key: bytes, num_bytes: int) -> None:
        """All of one body."""
        self._held[key] -= num_bytes
        self._num_common -= self._common(num_bytes, 0)
        if not self._held[key]:
            del self._held[key]

    def _common(self, num_bytes: int, num_before: int) -> int:
        """How many of these count in the budget of all keys."""
        return max(0, num_before + num_bytes - self._free) - max(0, num_before - self._free)

    async def made(self, data: bytes | bytearray, make: Callable[[JSON], T]) -> T:
        if len(data) <= IN_THREAD_BYTES:
            return make(parsed(data))
        async with self._parsing:
            return await asyncio.to_thread(lambda: make(parsed(data)))


class Body:
    """That of one request."""

    def __init__(self, bodies: Bodies, key: bytes) -> None:
        self._bodies = bodies
        self._key = key
        self._num_bytes = 0

    async def read(self, request: Request, make: Callable[[JSON], T], most_bytes: int = MAX_BODY_BYTES) -> T:
        """What ``make`` makes of it, which may run in another thread. Raises ``Refusal`` and ``BodyTooLarge``."""
        told = request.headers.get("content-length", "0")
        size = int(told) if told.isdecimal() else 0
        if size > most_bytes:
            raise BodyTooLarge(most_bytes)
        # What it says is not held: who says much and sends nothing would shut out others.
        self._bodies.check_room(self._key, size)
        data = bytearray()
        async for chunk in request.stream():
            self.hold(len(chunk))
            data += chunk
            if len(data) > most_bytes:
                raise BodyTooLarge(most_bytes)
        return await self._bodies.made(data, make)

    def hold(self, num_bytes: int) -> None:
        """So many more have come. Raises ``Refusal``."""
        self._bodies.hold(self._key, num_bytes, self._num_bytes)
        self._num_bytes += num_bytes

    def give_back(self) -> None:
        self._bodies.give_back(self._key, self._num_bytes)
        self._num_bytes = 0


def parsed(data: bytes | bytearray) -> JSON:
    """Raises ``Refusal``."""
    if has_more_nodes(data, MAX_NODES):
        raise Refusal(RefusalKind.INVALID, f"the body has more than {MAX_NODES} values and names")
    try:
        value = strict_json.parse(data)
    except strict_json.TextRejected as error:
        where = f" (line {error.line}, column {error.column})" if error.line else ""
        raise Refusal(RefusalKind.INVALID, f"the body is not JSON: {error}{where}") from None
    if strict_json.has_half_a_character(data, value):
        raise Refusal(RefusalKind.INVALID, "the body holds half of a surrogate pair, which is no character")
    return value


def has_more_nodes(text: bytes | bytearray, most: int) -> bool:
    """Whether a JSON text would become more values and names, counted without making any of them.

    What stands in a text is no value, except in the texts of calls' arguments, which are JSON again and are read. It
    counts too many rather than too few: an empty list is two. It takes a time that grows with ``most``, and little with
    the length of the text, and does not say whether that is JSON."""
    if _nodes(text, 0, len(text)) <= most:  # so nearly always: it counts what stands in texts, too
        return False
    count, end, name = 0, 0, b""
    for string in _STRING.finditer(text):
        start, before = string.start(), end
        end = string.end()
        is_arguments = name == _ARGUMENTS or b"\\" in name  # the name may be spelled with escapes
        if is_arguments and text[before:start].strip() == b":":
            count += _nodes(text, before, end)
        else:
            count += 1 + _signs(text, before, start)
        if count > most:
            return True
        name = string.group() if end - start <= 6 * len(_ARGUMENTS) else b""
    return count + _signs(text, end, len(text)) > most


def _nodes(text: bytes | bytearray, start: int, end: int) -> int:
    return _signs(text, start, end) + _count(text, (b'"',), start, end) // 2


def _signs(text: bytes | bytearray, start: int, end: int) -> int:
    return _count(text, (b",", b"[", b"{"), start, end)


def _count(text: bytes | bytearray, signs: Iterable[bytes], start: int, end: int) -> int:
    pieces = ((begin, min(begin + _PIECE_BYTES, end)) for begin in range(start, end, _PIECE_BYTES))
    return sum(text.count(sign, *piece) for piece in pieces for sign in signs)
