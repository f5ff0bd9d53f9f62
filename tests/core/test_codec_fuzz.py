"""Damaged bytes in great number: never a crash, never a segment that is not what the bytes say.

Half of the cases have a wrong crc, as damage on the way has; the other half is sealed again with a right one, so that
everything behind the crc is reached. For those the oracle is a second reader, written literally from the layout.
"""

from __future__ import annotations

import math
import random
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from zlib import crc32

import msgspec
import numpy as np

from gspo_core.codec import EVIDENCE_SCHEMA, SegmentRejected, decode, encode
from gspo_core.types import Asked, CacheMode, EpisodeKey, Outcome, Segment, StopReason, TimeSplit
from tests.core.segments import segment

NUM_CASES = 160_000
SEED = 20_261_120
INTERESTING = (0, 1, 7, 8, 9, 31, 32, 127, 128, 255, 256, 2**16, 2**31 - 1, 2**31, 2**32 - 1)
FLOATS = (float("nan"), float("inf"), float("-inf"), -0.0, 1e-5, 1.0, -1e-45, -3.4e38, -0.5)


def corpus(rng: random.Random) -> list[bytes]:
    """Encoded segments of many shapes."""
    numbers = np.random.default_rng(rng.getrandbits(32))
    found = []
    for number in range(60):
        n = rng.choice((0, 1, 2, 3, 8, 17, 64, 200))
        mask = numbers.random(n) < rng.random()
        final = n == 0 or rng.random() < 0.5
        asked = rng.choice((None, Asked(None, "", "messages", "policy", 1, 0)))
        found.append(
            segment(
                key=EpisodeKey(f"job-{number}", rng.randrange(2**40), rng.randrange(64)),
                index=rng.randrange(50),
                version=rng.randrange(1000),
                temperature=rng.choice((0.6, 1.0)),
                engine_id="e" * rng.randrange(12),
                token_ids=numbers.integers(0, 150_000, n),
                action_mask=mask,
                behavior_logprobs=np.where(mask, -numbers.exponential(size=n), 0),
                cache_mode=rng.choice(list(CacheMode)),
                turn_reward=rng.choice((None, 0.5)),
                outcome=Outcome(StopReason.COMPLETED, rng.random(), {"exact": 1.0}) if final else None,
                spent=rng.choice((None, TimeSplit(rng.random(), 0.25, 0.0))),
                untrained_turns=rng.choice(((), (0, 7))) if final else (),
                turn_rewards=rng.choice(((), ((0, 0.5), (3, -1.0)))) if final else (),
                repeated=rng.choice(((), ((0, 2), (3, 1)))) if final else (),
                asked=asked,
                user=rng.choice(("", "somebody")) if asked else "",
            )
        )
    return [encode(one) for one in found]


# --- damage on the way: the crc is wrong afterwards -----------------------------------------------------------------


def flip_bits(rng: random.Random, data: bytearray, other: bytes) -> bytes:
    for _ in range(rng.choice((1, 1, 2, 5, 40))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def truncate(rng: random.Random, data: bytearray, other: bytes) -> bytes:
    return bytes(data[: rng.randrange(len(data))])


def insert(rng: random.Random, data: bytearray, other: bytes) -> bytes:
    place = rng.randrange(len(data) + 1)
    data[place:place] = rng.randbytes(rng.choice((1, 2, 4, 9, 72)))
    return bytes(data)


def remove(rng: random.Random, data: bytearray, other: bytes) -> bytes:
    place = rng.randrange(len(data))
    del data[place : place + rng.choice((1, 2, 4, 9, 72))]
    return bytes(data)


def splice(rng: random.Random, data: bytearray, other: bytes) -> bytes:
    return bytes(data[: rng.randrange(len(data))]) + other[rng.randrange(len(other)) :]


def splice_in_place(rng: random.Random, data: bytearray, other: bytes) -> bytes:
    place = rng.randrange(len(data))
    return bytes(data[:place]) + other[place : len(data)]


def overwrite(rng: random.Random, data: bytearray, other: bytes) -> bytes:
    place, length = rng.randrange(len(data)), rng.choice((1, 2, 4, 8, 64))
    filling = rng.choice((bytes(length), b"\xff" * length, rng.randbytes(length)))
    data[place : place + length] = filling
    return bytes(data)


def swap(rng: random.Random, data: bytearray, other: bytes) -> bytes:
    a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return bytes(data[:a] + data[b:] + data[a:b])


def garbage(rng: random.Random, data: bytearray, other: bytes) -> bytes:
    start = rng.choice((b"", b"GSEG", b"GSEG\1\0\0\0", bytes(data[:12]), bytes(data[:32])))
    return start + rng.randbytes(rng.choice((0, 4, 20, 24, 100, 1000)))


DAMAGES: tuple[Callable[[random.Random, bytearray, bytes], bytes], ...] = (
    *(flip_bits, truncate, insert, remove, splice, splice_in_place, overwrite, swap, garbage),
)


# --- a faulty writer: whatever was changed, the crc is right --------------------------------------------------------


SCHEMAS = [struct.pack("<I", number) for number in range(1, EVIDENCE_SCHEMA + 1)]


def seal(data: bytes) -> bytes:
    schema = data[4:8] if data[4:8] in SCHEMAS else SCHEMAS[0]
    return b"GSEG" + schema + struct.pack("<I", crc32(data[12:])) + data[12:]


def change_counts(rng: random.Random, data: bytearray, other: bytes) -> bytes:
    place = rng.choice((12, 16, 20))
    (value,) = struct.unpack_from("<I", data, place)
    near = (value + rng.choice((-9, -8, -1, 1, 8, 9))) % 2**32
    struct.pack_into("<I", data, place, rng.choice((*INTERESTING, near)))
    return bytes(data)


def change_sum(rng: random.Random, data: bytearray, other: bytes) -> bytes:
    (value,) = struct.unpack_from("<d", data, 24)
    struct.pack_into("<d", data, 24, rng.choice((*FLOATS, value * (1 + 1e-6), value - 1e-5, value * (1 + 1e-15))))
    return bytes(data)


def change_meta(rng: random.Random, data: bytearray, other: bytes) -> bytes:
    """Another value in one place of the meta block, or an element more or less."""
    (length,) = struct.unpack_from("<I", data, 12)
    start = (32 + length + 7) // 8 * 8
    values: Any = msgspec.msgpack.decode(data[32 : 32 + length])
    target = values
    if isinstance(values[12], list) and rng.random() < 0.4:
        target = values[12]
    strange = (None, True, -1, 0, 2**31, 2**63, 2**64 - 1, "", "a/b", "x" * 50, b"raw", [], {}, {"a": 1.0}, *FLOATS)
    action = rng.random()
    if action < 0.8:
        target[rng.randrange(len(target))] = rng.choice((*strange, "stale", "env_error", "cancelled", 0.5))
    elif action < 0.9:
        target.append(rng.choice(strange))
    else:
        del target[rng.randrange(len(target))]
    meta = msgspec.msgpack.encode(values)
    struct.pack_into("<I", data, 12, len(meta))
    return bytes(data[:32]) + meta + bytes(-len(meta) % 8) + bytes(data[start:])


def change_arrays(rng: random.Random, data: bytearray, other: bytes) -> bytes:
    length, n = struct.unpack_from("<II", data, 12)
    start = (32 + length + 7) // 8 * 8
    if not n:
        return flip_bits(rng, data, other)
    place = rng.randrange(n)
    kind = rng.randrange(3)
    if kind == 0:
        struct.pack_into("<I", data, start + 4 * place, rng.choice(INTERESTING))
    elif kind == 1:
        bits = rng.choice((0x7F800001, 0xFF800001, struct.unpack("<I", struct.pack("<f", rng.choice(FLOATS)))[0]))
        struct.pack_into("<I", data, start + 4 * (n + place), bits)
    else:
        data[start + 8 * n + place] = rng.choice((0, 1, 2, 255))
    return bytes(data)


def random_header(rng: random.Random, data: bytearray, other: bytes) -> bytes:
    return bytes(data[:12]) + rng.randbytes(20) + bytes(data[32:])


def consistent_header(rng: random.Random, data: bytearray, other: bytes) -> bytes:
    """Lengths that fit the size, over random content: only parsing can tell."""
    n, length = rng.randrange(4), rng.randrange(60)
    body = rng.randbytes(length) + bytes(-(32 + length) % 8) + rng.randbytes(9 * n)
    return bytes(12) + struct.pack("<IIId", length, n, rng.randrange(n + 1), 0.0) + body


WRITERS = (change_counts, change_sum, change_meta, change_arrays, random_header, consistent_header, *DAMAGES)


# --- the second reader ----------------------------------------------------------------------------------------------


def says(data: bytes) -> dict[str, Any]:
    """What sealed bytes say, read literally; the asserts are the promises that the codec makes for a segment."""
    length, n, num_actions = struct.unpack_from("<III", data, 12)
    (logprob_sum,) = struct.unpack_from("<d", data, 24)
    start = (32 + length + 7) // 8 * 8
    assert len(data) == start + 9 * n
    assert crc32(data[12:]) == struct.unpack_from("<I", data, 8)[0]
    tokens = struct.unpack_from(f"<{n}i", data, start)
    logprobs = struct.unpack_from(f"<{n}f", data, start + 4 * n)
    mask = list(data[start + 8 * n :])
    assert all(token >= 0 for token in tokens)
    assert set(mask) <= {0, 1}
    assert all(math.isfinite(value) and value <= 1e-4 for value in logprobs)
    assert not any(value for value, acted in zip(logprobs, mask, strict=True) if not acted)
    assert sum(mask) == num_actions
    assert math.isclose(math.fsum(logprobs), logprob_sum, rel_tol=1e-9, abs_tol=1e-9)
    return {
        "meta": msgspec.msgpack.decode(data[32 : 32 + length]),
        "tokens": tokens,
        "logprobs": logprobs,
        "mask": mask,
    }


def holds(read: Segment) -> dict[str, Any]:
    """The same of a decoded segment."""
    end = read.outcome
    outcome = end and [end.stop_reason.value, end.reward, dict(end.reward_parts), dict(end.metrics)]
    key, spent = read.key, read.spent and list(read.spent)
    is_asked = bool(read.repeated) or read.asked is not None
    has_no_reward = end is not None and end.stop_reason is StopReason.NO_REWARD
    is_newest = bool(read.turn_rewards) or has_no_reward or is_asked
    return {
        "meta": [
            *(key.job, key.group, key.member, read.attempt, read.branch, read.index, read.turn, read.version),
            *(read.temperature, read.engine_id, read.cache_mode.value, read.turn_reward, outcome),
            *([] if read.spent is None and not read.untrained_turns and not is_newest else [spent]),
            *([list(read.untrained_turns)] if read.untrained_turns or is_newest else []),
            *([[list(one) for one in read.turn_rewards]] if is_newest else []),
            *([[list(one) for one in read.repeated], read.asked and list(read.asked)] if is_asked else []),
            *([read.user] if read.user else []),
        ],
        "tokens": tuple(read.token_ids.tolist()),
        "logprobs": tuple(read.behavior_logprobs.tolist()),
        "mask": [int(acted) for acted in read.action_mask],
    }


def test_damage_on_the_way_is_always_noticed() -> None:
    rng = random.Random(SEED)
    originals = corpus(rng)
    whole = set(originals)
    errors: Counter[str] = Counter()
    for _ in range(NUM_CASES // 2):
        damaged = rng.choice(DAMAGES)(rng, bytearray(rng.choice(originals)), rng.choice(originals))
        if damaged in whole:
            continue
        try:
            decode(damaged)
        except SegmentRejected as error:
            errors[type(error).__name__] += 1
        else:
            raise AssertionError(f"damage went unnoticed: {damaged.hex()}")
    assert errors.total() > 50_000
    shallow = ("BadMagic", "UnknownSchema", "TruncatedSegment", "MismatchedLengths", "CorruptSegment")
    assert min(errors[name] for name in shallow) > 1000, errors


def test_a_faulty_writer_is_refused_or_read_literally() -> None:
    rng = random.Random(SEED + 1)
    originals = corpus(rng)
    seen: Counter[str] = Counter()
    for _ in range(NUM_CASES // 2):
        data = seal(rng.choice(WRITERS)(rng, bytearray(rng.choice(originals)), rng.choice(originals)))
        try:
            read = decode(data)
        except SegmentRejected as error:
            seen[type(error).__name__] += 1
        else:
            assert holds(read) == says(data), data.hex()
            assert seal(encode(replace(read))[:24] + data[24:]) == data, data.hex()
            seen["read"] += 1
    # Every deep check must have been reached, else the cases above prove nothing about it.
    deep = ("MalformedMeta", "NonFiniteSegment", "InvalidSegment", "IntegrityMismatch", "MismatchedLengths", "read")
    assert min(seen[name] for name in deep) > 1000, seen
    assert seen["CorruptSegment"] == seen["BadMagic"] == seen["UnknownSchema"] == 0


def test_bits_of_a_long_segment() -> None:
    n = 8192
    rng = random.Random(SEED)
    numbers = np.random.default_rng(SEED)
    mask = np.arange(n) >= 1000
    one = segment(
        token_ids=numbers.integers(0, 150_000, n),
        action_mask=mask,
        behavior_logprobs=np.where(mask, -numbers.exponential(size=n), 0),
    )
    data = bytearray(encode(one))
    for _ in range(2000):
        place, bit = rng.randrange(len(data)), 1 << rng.randrange(8)
        data[place] ^= bit
        try:
            decode(bytes(data))
        except SegmentRejected:
            data[place] ^= bit
            continue
        raise AssertionError(f"bit {bit} of byte {place} was flipped unnoticed")
    assert decode(bytes(data)) == one
