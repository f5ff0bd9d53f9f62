"""A growing list of token ids with its JSON for engines: a request costs only the ids added since the last one.

Rule: an id is checked once, when it is added, and never changes. It takes four bytes and its digits, where a list of
numbers takes forty: a worker holds millions of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import overload

import msgspec
import numpy as np
from zlib_ng.zlib_ng import crc32


class TokenIds(Sequence[int]):
    """Equal to every sequence of the same ids."""

    __slots__ = ("_digits", "_ids", "largest")

    def __init__(self, ids: Sequence[int] = ()) -> None:
        self._ids = array("i")
        self._digits = bytearray()
        self.largest = -1
        self.extend(ids)

    def extend(self, ids: Sequence[int]) -> None:
        """Raises ValueError for values that cannot be token ids."""
        if not len(ids):
            return
        try:
            added = array("i", ids)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"token ids must be a flat list of ints: {error}") from error
        digits = msgspec.json.encode(added.tolist())[1:-1]
        if b"-" in digits:
            raise ValueError(f"token ids must not be negative, as {min(added)} is")
        if self._digits:
            self._digits += b","
        self._digits += digits
        self._ids += added
        self.largest = max(self.largest, int(np.maximum.reduce(np.frombuffer(added, dtype=np.int32))))

    def to_json(self) -> bytes:
        return b"[" + self._digits + b"]"

    def digest(self, length: int) -> int:
        """Checksum of the first ``length`` ids."""
        return int(crc32(memoryview(self._ids)[:length]))

    def since(self, place: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """The ids from ``place`` on, as a read-only array."""
        array_of_its_own = np.frombuffer(self._ids[place:], dtype=np.int32)
        array_of_its_own.flags.writeable = False
        return array_of_its_own

    def head(self, length: int) -> Sequence[int]:
        """The first ``length`` ids, packed."""
        return self._ids[:length]

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> list[int]: ...
    def __getitem__(self, place: int | slice) -> int | list[int]:
        return self._ids[place].tolist() if isinstance(place, slice) else self._ids[place]

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self[:] == list(other)

    __hash__ = None  # type: ignore[assignment]  # it grows

    def __repr__(self) -> str:
        return f"TokenIds({self[:]})"
