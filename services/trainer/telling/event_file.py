"""Scalars in TensorBoard's format: one append-only file of framed records per trainer that had the job.

Rule: records are only appended; readers check each record and skip one cut off by a crash. The format takes a few dozen
bytes per value; a library for it would bring a protocol compiler along.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from services.files.durable import append

# Reflected polynomial of CRC-32C, used by the framing.
_POLYNOMIAL = 0x82F63B78
_MASK_DELTA = 0xA282EAD8
_FILE_VERSION = b"brain.Event:2"


def _table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return tuple(table)


_TABLE = _table()


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


class EventFile:
    """``name`` distinguishes the files of a directory; the first write creates the file."""

    def __init__(self, directory: Path, name: str, now: Callable[[], float] = time.time) -> None:
        self._path = directory / f"events.out.tfevents.{name}"
        self._now = now

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        is_new = not self._path.exists() or not self._path.stat().st_size
        self._path.parent.mkdir(parents=True, exist_ok=True)
        records = [_event(self._now(), 0, _text(3, _FILE_VERSION))] if is_new else []
        values = b"".join(_text(1, _text(1, name.encode()) + _float(2, value)) for name, value in scalars.items())
        records.append(_event(self._now(), step, _text(5, values)))
        append(self._path, b"".join(map(_framed, records)))


def _framed(record: bytes) -> bytes:
    length = struct.pack("<Q", len(record))
    return length + _masked(length) + record + _masked(record)


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF)


# Protocol buffers: a field is its number and kind, followed by its value.


def _event(wall_time: float, step: int, what: bytes) -> bytes:
    return b"\x09" + struct.pack("<d", wall_time) + b"\x10" + _varint(step) + what


def _text(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)


def _varint(value: int) -> bytes:
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])
