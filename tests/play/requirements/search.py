"""Looks for marked texts and for keys in whatever bytes there are: as text, and as the ids of tokens.

Rule: a mark is a word and sixteen digits. Each digit is a token of its own in Qwen's vocabulary wherever it stands, so
a mark that was read by a policy is found among the ids that are stored of it, too.
"""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NUM_DIGITS = 16
SECRET, OPEN, USER = WORDS = ("secret", "open", "user")
TEXT = re.compile(rb"(?:secret|open|user)-(\d{16})(?!\d)")
KEY = re.compile(rb"(?:(?:ep|rw)_[A-Za-z0-9_-]{60,}|tk_job_[A-Za-z0-9]+\.[A-Za-z0-9]+\.[A-Za-z0-9_-]{30,})")
WEIGHTS = frozenset({".safetensors", ".pt", ".bin"})
"""Of files that hold numbers alone; they are left out."""

Digits = bytes
"""Of a mark, as text."""


def mark(rng: random.Random, word: str) -> str:
    return f"{word}-{rng.randrange(10 ** (NUM_DIGITS - 1), 10**NUM_DIGITS)}"


def digits_of(marked: str) -> Digits:
    return marked.rpartition("-")[2].encode()


@dataclass
class Found:
    """What stands in some bytes: the digits of marks, and keys."""

    marks: set[Digits] = field(default_factory=set)
    keys: set[bytes] = field(default_factory=set)

    def __ior__(self, other: Found) -> Found:
        self.marks |= other.marks
        self.keys |= other.keys
        return self


class Search:
    """``digit_ids``: the id of the token of each digit."""

    def __init__(self, digit_ids: Sequence[int]) -> None:
        self._digits = {one.to_bytes(4, "little"): str(digit).encode() for digit, one in enumerate(digit_ids)}
        one = b"|".join(map(re.escape, self._digits))
        # A run of ids of digits, as int32.
        self._ids = re.compile(b"(?:" + one + b"){%d,}" % NUM_DIGITS)

    def of(self, data: bytes) -> Found:
        return Found(set(TEXT.findall(data)) | set(self._in_ids(data)), set(KEY.findall(data)))

    def _in_ids(self, data: bytes) -> Iterator[Digits]:
        for run in self._ids.findall(data):
            digits = b"".join(self._digits[run[at : at + 4]] for at in range(0, len(run), 4))
            yield from (digits[at : at + NUM_DIGITS] for at in range(len(digits) - NUM_DIGITS + 1))

    def of_all(self, several: Iterable[bytes]) -> Found:
        found = Found()
        for data in several:
            found |= self.of(data)
        return found


LOGS, FILES, REDIS, REDIS_FILES = PLACES = ("logs", "files", "Redis", "Redis' own files")


def kind_of(path: Path, data: Path) -> str:
    """What a file below the data directory is to a search; empty where it is left out."""
    folder = path.relative_to(data).parts[0]
    if path.suffix == ".log" or folder == "logs" or path.name == "audit.jsonl":
        return LOGS
    if folder == "redis":
        return REDIS_FILES
    return "" if path.suffix in WEIGHTS else FILES


def in_files(search: Search, data: Path) -> dict[str, Found]:
    found: dict[str, Found] = defaultdict(Found, {place: Found() for place in (LOGS, FILES, REDIS_FILES)})
    for path in sorted(data.rglob("*")):
        if path.is_file() and not path.is_symlink() and (kind := kind_of(path, data)):
            try:
                found[kind] |= search.of(path.read_bytes())
            except FileNotFoundError:  # it was removed meanwhile
                continue
    return dict(found)


Command = Callable[..., Any]
"""Asks a Redis: its name and arguments, and the reply as it comes."""
READING: Mapping[str, tuple[Any, ...]] = {
    "string": ("GET",),
    "hash": ("HGETALL",),
    "list": ("LRANGE", 0, -1),
    "set": ("SMEMBERS",),
    "zset": ("ZRANGE", 0, -1, "WITHSCORES"),
    "stream": ("XRANGE", "-", "+"),
}


def in_redis(search: Search, command: Command) -> tuple[Found, Counter[str]]:
    """Every key by its type, its name too; and how many there are of each type."""
    found, types = Found(), Counter[str]()
    for key in keys_in(command):
        found |= search.of(key)
        (kind,) = flat(command("TYPE", key))
        if kind == b"none":  # it is gone
            continue
        name, *more = READING[kind.decode()]
        found |= search.of_all(flat(command(name, key, *more)))
        types[kind.decode()] += 1
    return found, types


def keys_in(command: Command) -> Iterator[bytes]:
    cursor: Any = 0
    seen = set[bytes]()
    while True:
        cursor, keys = command("SCAN", cursor, "COUNT", 1000)
        yield from (key for key in keys if key not in seen)
        seen.update(keys)
        if int(cursor) == 0:
            return


def flat(reply: Any) -> Iterator[bytes]:
    """All strings of a reply."""
    if isinstance(reply, bytes):
        yield reply
    elif isinstance(reply, str):
        yield reply.encode()
    elif isinstance(reply, Mapping):
        for name, value in reply.items():
            yield from (*flat(name), *flat(value))
    elif isinstance(reply, Iterable):
        for one in reply:
            yield from flat(one)
