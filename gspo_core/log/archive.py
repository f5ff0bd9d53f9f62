"""An archived batch log: the bytes of the log as they were, compressed.

The rule: unpacking gives back the same bytes; the log's own sha256 is checked when it is decoded. Bytes that are no
archive are taken for a plain log, so readers need not know which of the two a file holds.

Layout: 8 bytes magic, uint32 number, uint64 length of the log (little-endian), the log as a zlib stream.
"""

from __future__ import annotations

import struct
from typing import BinaryIO, cast

from zlib_ng import zlib_ng

from gspo_core.log.batches import DamagedBatch, UnknownBatchSchema

SCHEMA = 1
_MAGIC = b"GSPOARCH"
_HEADER = struct.Struct("<8sIQ")
HEADER_BYTES = _HEADER.size
# On logs of three runs zlib's level 9 took five times as long for 3 to 4 % less.
_LEVEL = 6

# More than it takes to unpack the header of a log.
_BEGINNING = 1024
# Its type is told wrongly by the package.
_Broken = cast(type[Exception], zlib_ng.error)
# No zlib stream holds more than 1,032 times its own length.
_MOST_TIMES = 1032


def pack(log: bytes) -> bytes:
    return _HEADER.pack(_MAGIC, SCHEMA, len(log)) + zlib_ng.compress(log, _LEVEL)


def plain(data: bytes) -> bytes:
    """The log in ``data``, which may be archived. Raises DamagedBatch, UnknownBatchSchema."""
    if not data.startswith(_MAGIC):
        return data
    length = plain_size(data)
    if length > _MOST_TIMES * len(data):
        raise DamagedBatch(f"the archived log cannot have {length} bytes")
    stream = zlib_ng.decompressobj()
    try:
        # A length that was changed costs no memory.
        log = stream.decompress(data[HEADER_BYTES:], length + 1)
    except _Broken as error:
        raise DamagedBatch(f"the archived log cannot be unpacked: {error}") from error
    if len(log) != length or not stream.eof or stream.unused_data:
        raise DamagedBatch(f"the archived log has not the {length} bytes that it was packed with")
    return bytes(log)


def plain_beginning(file: BinaryIO, length: int) -> bytes:
    """The first bytes of the log in ``file``, which may be archived. Raises DamagedBatch, UnknownBatchSchema."""
    data = file.read(max(length, HEADER_BYTES + _BEGINNING))
    if not plain_size(data):
        return data[:length]
    try:
        return bytes(zlib_ng.decompressobj().decompress(data[HEADER_BYTES:], length))
    except _Broken as error:
        raise DamagedBatch(f"the archived log cannot be unpacked: {error}") from error


def plain_size(data: bytes) -> int:
    """Unpacked size of the log that ``data`` begins; 0 if not archived. Raises DamagedBatch, UnknownBatchSchema."""
    if not data.startswith(_MAGIC):
        return 0
    try:
        _, number, length = _HEADER.unpack_from(data)
    except struct.error as error:
        raise DamagedBatch(f"the archived log is cut off after {len(data)} bytes") from error
    if number != SCHEMA:
        raise UnknownBatchSchema(f"is archived with the number {number}; this release reads {SCHEMA}")
    return int(length)
