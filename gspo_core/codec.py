"""Segments as bytes: what travels through the queue and lies in the batch log.

The rule kept here: ``decode`` returns exactly the segment that ``encode`` was given, or raises one ``SegmentRejected``
that says why. Nothing in the bytes is believed before it is checked, no length in them allocates memory, and no
object is ever unpickled. It does not compress (a kilobyte of random-looking log-probs does not shrink) and does not
know where the bytes come from.

Layout, little-endian::

    offset  size
         0     4  magic
         4     4  schema number
         8     4  crc32 of everything that follows
        12     4  length of the meta block in bytes
        16     4  number of tokens n
        20     4  number of actions
        24     8  float64 sum of the behaviour log-probs
        32        meta block: a msgpack array (``_SegmentMeta``), then zeros up to a multiple of 8
                  n x int32 token ids, n x float32 behaviour log-probs, n x uint8 action mask

The decoded arrays are read-only views of the given bytes; the order keeps them aligned.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Annotated, Final

import msgspec
import numpy as np
from numpy.typing import NDArray
from zlib_ng.zlib_ng import crc32

from gspo_core.invariants import InvalidValue, NonFiniteValue
from gspo_core.types import (
    NOTHING,
    Asked,
    CacheMode,
    EpisodeKey,
    Evidence,
    Outcome,
    Repeated,
    Segment,
    StopReason,
    TimeSplit,
    TurnReward,
)

SCHEMA: Final = 1
# As above, with ``spent`` at the end of the meta block; written where a segment has it.
TIMED_SCHEMA: Final = 2
# As above, with ``untrained_turns`` behind ``spent``, which may be nil; written where a segment names any.
UNTRAINED_SCHEMA: Final = 3
# As above, with ``turn_rewards`` behind ``untrained_turns``, which may be empty; written where a segment names any, or
# where its stop reason is newer than the schemas before.
REWARDED_SCHEMA: Final = 4
# As above, with ``repeated`` and ``asked`` behind ``turn_rewards``; written where a segment has either.
ASKED_SCHEMA: Final = 5
# As above, with ``user`` behind ``asked``; written where a segment has one.
USER_SCHEMA: Final = 6
# As above, with ``evidence`` behind ``user``, which may be empty; written where the outcome has some.
EVIDENCE_SCHEMA: Final = 7
# 4 MiB are 466,000 tokens: more than the longest context that the models have, so nothing honest is refused, and
# one hostile or broken entry costs the queue and the trainer no more than this.
MAX_SEGMENT_BYTES: Final = 4 * 2**20

_MAGIC = b"GSEG"
_PREFIX = struct.Struct("<4sII")
_COUNTS = struct.Struct("<IIId")
_HEADER = struct.Struct("<4sIIIIId")
_HEADER_BYTES = _HEADER.size
_CHECKED_FROM = _PREFIX.size
_BYTES_PER_TOKEN = 4 + 4 + 1
_ALIGNMENT = 8
# Room for a meta block without an outcome: numbers and names, of which a model's and a user's are the longest.
_META_ROOM_BYTES = 16 << 10
MAX_SEGMENT_TOKENS: Final = (MAX_SEGMENT_BYTES - _HEADER_BYTES - _META_ROOM_BYTES) // _BYTES_PER_TOKEN
"""A segment without an outcome may have so many, whatever else it says."""
_I4, _F4, _U1, _BOOL = np.dtype("<i4"), np.dtype("<f4"), np.dtype("u1"), np.dtype("?")
# Two machines may add the same float64 numbers in another order; 2**17 roundings are far below this.
_SUM_TOLERANCE = 1e-10


class SegmentRejected(ValueError):
    """These bytes, or this segment, are not taken. The subclass says why."""


class BadMagic(SegmentRejected):
    """The bytes are no segment at all."""


class UnknownSchema(SegmentRejected):
    """Written by another release; this one reads those from ``SCHEMA`` to ``EVIDENCE_SCHEMA``."""


class TruncatedSegment(SegmentRejected):
    """Shorter than its own header says."""


class OversizedSegment(SegmentRejected):
    """Longer than ``MAX_SEGMENT_BYTES``."""


class MismatchedLengths(SegmentRejected):
    """Longer than its own header says, or counts that contradict each other."""


class CorruptSegment(SegmentRejected):
    """The crc does not match: bytes were damaged on the way."""


class MalformedMeta(SegmentRejected):
    """The meta block is not what a segment needs."""


class NonFiniteSegment(SegmentRejected):
    """A number that must be finite is NaN or infinite."""


class InvalidSegment(SegmentRejected):
    """The arrays break an invariant of ``Segment``: a negative token id, a log-prob without an action."""


class IntegrityMismatch(SegmentRejected):
    """The recorded sum of log-probs or number of actions is not that of the arrays."""


class _OutcomeMeta(msgspec.Struct, array_like=True, gc=False):
    stop_reason: StopReason
    reward: float | None
    reward_parts: dict[str, float]
    metrics: dict[str, float]


class _SegmentMeta(msgspec.Struct, array_like=True, gc=False):
    job: str
    group: int
    member: int
    attempt: int
    branch: int
    index: int
    turn: int
    version: int
    temperature: float
    engine_id: str
    cache_mode: CacheMode
    turn_reward: float | None
    outcome: _OutcomeMeta | None


class _TimedMeta(_SegmentMeta, array_like=True, gc=False):
    spent: TimeSplit


class _UntrainedMeta(_SegmentMeta, array_like=True, gc=False):
    spent: TimeSplit | None
    untrained_turns: Annotated[tuple[int, ...], msgspec.Meta(min_length=1)]


class _RewardedMeta(_SegmentMeta, array_like=True, gc=False):
    spent: TimeSplit | None
    untrained_turns: tuple[int, ...]
    turn_rewards: tuple[TurnReward, ...]


class _AskedMeta(_RewardedMeta, array_like=True, gc=False):
    repeated: tuple[Repeated, ...]
    asked: Asked | None


class _UserMeta(_AskedMeta, array_like=True, gc=False):
    user: str


class _EvidenceMeta(msgspec.Struct, array_like=True, gc=False):
    told: dict[str, str]
    left_out: dict[str, str]


class _JudgedMeta(_UserMeta, array_like=True, gc=False):
    evidence: _EvidenceMeta


# Those that readers of the older schemas do not know.
_NEWER_STOPS = frozenset({StopReason.NO_REWARD})
_encode_meta = msgspec.msgpack.Encoder().encode
_META: Final[dict[int, type[_SegmentMeta]]] = {
    SCHEMA: _SegmentMeta,
    TIMED_SCHEMA: _TimedMeta,
    UNTRAINED_SCHEMA: _UntrainedMeta,
    REWARDED_SCHEMA: _RewardedMeta,
    ASKED_SCHEMA: _AskedMeta,
    USER_SCHEMA: _UserMeta,
    EVIDENCE_SCHEMA: _JudgedMeta,
}
# How many of the fields that came later each schema has.
_NUM_ENDS: Final = {
    SCHEMA: 0,
    TIMED_SCHEMA: 1,
    UNTRAINED_SCHEMA: 2,
    REWARDED_SCHEMA: 3,
    ASKED_SCHEMA: 5,
    USER_SCHEMA: 6,
    EVIDENCE_SCHEMA: 7,
}
# What a trainer of this release reads.
NEWEST_SCHEMA: Final = max(_META)
_decode_meta = {schema: msgspec.msgpack.Decoder(meta).decode for schema, meta in _META.items()}


def encode(segment: Segment) -> bytes:
    """The bytes of ``segment``: those that it was read from, if it was."""
    if segment.encoded is not None:
        return segment.encoded
    schema = _schema(segment)
    meta = _meta_bytes(segment, schema)
    counts = _COUNTS.pack(len(meta), segment.num_tokens, segment.num_actions, segment.logprob_sum)
    front = counts + meta + bytes(-len(meta) % _ALIGNMENT)
    token_ids = segment.token_ids.astype(_I4, copy=False).data
    logprobs = segment.behavior_logprobs.astype(_F4, copy=False).data
    mask = segment.action_mask.data
    size = _CHECKED_FROM + len(front) + _BYTES_PER_TOKEN * segment.num_tokens
    if size > MAX_SEGMENT_BYTES:
        raise OversizedSegment(f"{segment.key} index {segment.index}: {size} bytes, at most {MAX_SEGMENT_BYTES}")
    crc = crc32(mask, crc32(logprobs, crc32(token_ids, crc32(front))))
    return b"".join((_PREFIX.pack(_MAGIC, schema, crc), front, token_ids, logprobs, mask))


def _schema(segment: Segment) -> int:
    """The oldest one that can say it."""
    if segment.outcome is not None and segment.outcome.evidence:
        return EVIDENCE_SCHEMA
    if segment.user:
        return USER_SCHEMA
    if segment.repeated or segment.asked is not None:
        return ASKED_SCHEMA
    outcome = segment.outcome
    if segment.turn_rewards or (outcome is not None and outcome.stop_reason in _NEWER_STOPS):
        return REWARDED_SCHEMA
    if segment.untrained_turns:
        return UNTRAINED_SCHEMA
    return SCHEMA if segment.spent is None else TIMED_SCHEMA


def decode(data: bytes) -> Segment:
    """The segment in ``data``; raises a ``SegmentRejected`` for anything but the unchanged output of ``encode``."""
    if type(data) is not bytes:
        # The arrays are views: what they show must not change afterwards.
        data = memoryview(data).tobytes()
    schema, meta_length, num_tokens, num_actions, logprob_sum = _checked_header(data)
    meta_end = _HEADER_BYTES + meta_length
    meta = _checked_meta(data, meta_end, schema)
    start = meta_end + -meta_end % _ALIGNMENT
    token_ids = np.frombuffer(data, _I4, num_tokens, start)
    logprobs = np.frombuffer(data, _F4, num_tokens, start + 4 * num_tokens)
    mask_bytes = np.frombuffer(data, _U1, num_tokens, start + 8 * num_tokens)
    if num_tokens and np.maximum.reduce(mask_bytes) > 1:
        raise InvalidSegment("the action mask holds something else than 0 and 1")
    segment = _build(meta, token_ids, mask_bytes.view(_BOOL), logprobs)
    if _schema(segment) != schema:
        raise MalformedMeta(f"{segment.key}: schema {schema}, though an older one says all of it")
    if segment.num_actions != num_actions:
        raise IntegrityMismatch(f"{segment.key}: {segment.num_actions} actions, the header says {num_actions}")
    # Written so that a NaN in the header fails too.
    if not abs(segment.logprob_sum - logprob_sum) <= _SUM_TOLERANCE * (1.0 + abs(segment.logprob_sum)):
        raise IntegrityMismatch(f"{segment.key}: log-probs sum to {segment.logprob_sum}, the header says {logprob_sum}")
    vars(segment)["encoded"] = data
    return segment


def _meta_bytes(segment: Segment, schema: int) -> bytes:
    key, outcome = segment.key, segment.outcome
    fields = (
        *(key.job, key.group, key.member, segment.attempt, segment.branch, segment.index, segment.turn),
        *(segment.version, segment.temperature, segment.engine_id, segment.cache_mode, segment.turn_reward),
        None
        if outcome is None
        else _OutcomeMeta(outcome.stop_reason, outcome.reward, dict(outcome.reward_parts), dict(outcome.metrics)),
    )
    evidence = _EvidenceMeta({}, {}) if outcome is None else _evidence_meta(outcome.evidence)
    ends = (
        *(segment.spent, segment.untrained_turns, segment.turn_rewards, segment.repeated, segment.asked, segment.user),
        evidence,
    )
    meta = _META[schema](*fields, *ends[: _NUM_ENDS[schema]])
    try:
        return _encode_meta(meta)
    except UnicodeEncodeError as error:
        raise MalformedMeta(f"{key} index {segment.index}: {error}") from error


def _evidence_meta(evidence: Evidence) -> _EvidenceMeta:
    return _EvidenceMeta(dict(evidence.told), dict(evidence.left_out))


def _checked_header(data: bytes) -> tuple[int, int, int, int, float]:
    """Schema, length of meta, number of tokens, number of actions and sum, after everything that needs no parsing."""
    size = len(data)
    if size < _HEADER_BYTES or data[:4] != _MAGIC or size > MAX_SEGMENT_BYTES:
        raise _refuse_start(data)
    _, schema, crc, meta_length, num_tokens, num_actions, logprob_sum = _HEADER.unpack_from(data)
    if schema not in _decode_meta:
        raise _unknown(schema)
    meta_end = _HEADER_BYTES + meta_length
    promised = meta_end + -meta_end % _ALIGNMENT + _BYTES_PER_TOKEN * num_tokens
    if size < promised:
        raise TruncatedSegment(f"{size} bytes, its header promises {promised}")
    if size > promised:
        raise MismatchedLengths(f"{size} bytes, its header promises {promised}")
    if crc32(memoryview(data)[_CHECKED_FROM:]) != crc:
        raise CorruptSegment("the crc does not match: the bytes were damaged after they were written")
    if num_actions > num_tokens:
        raise MismatchedLengths(f"{num_actions} actions among {num_tokens} tokens")
    return schema, meta_length, num_tokens, num_actions, logprob_sum


def _unknown(schema: int) -> UnknownSchema:
    return UnknownSchema(f"schema {schema}; this release reads {SCHEMA} to {EVIDENCE_SCHEMA}")


def _refuse_start(data: bytes) -> SegmentRejected:
    """Why bytes are no candidate: far too many, not ours, of another release, or not even a header."""
    size = len(data)
    if size > MAX_SEGMENT_BYTES:
        return OversizedSegment(f"{size} bytes, at most {MAX_SEGMENT_BYTES}")
    if data[:4] != _MAGIC[:size]:
        return BadMagic(f"a segment starts with {_MAGIC!r}, not {data[:4]!r}")
    if size >= _PREFIX.size and (schema := _PREFIX.unpack_from(data)[1]) not in _decode_meta:
        return _unknown(schema)
    return TruncatedSegment(f"{size} bytes, a header has {_HEADER_BYTES}")


def _checked_meta(data: bytes, end: int, schema: int) -> _SegmentMeta:
    padding = -end % _ALIGNMENT
    if data[end : end + padding] != bytes(padding):
        raise MalformedMeta("the bytes between the meta block and the arrays are not zero")
    encoded = data[_HEADER_BYTES:end]
    try:
        meta: _SegmentMeta = _decode_meta[schema](encoded)
    # UnicodeDecodeError is a ValueError; nesting beyond the interpreter's limit is a RecursionError.
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise MalformedMeta(f"the meta block cannot be read: {error}") from error
    # msgpack can spell a value in many ways, and an integer where a float belongs would be rounded in silence.
    if _encode_meta(meta) != encoded:
        raise MalformedMeta("the meta block is not in the one spelling that is written")
    return meta


# An episode sends many segments, interleaved with those of others.
_key = lru_cache(maxsize=16_384)(EpisodeKey)


def _outcome(meta: _SegmentMeta, ended: _OutcomeMeta) -> Outcome:
    found = meta.evidence if isinstance(meta, _JudgedMeta) else None
    evidence = NOTHING if found is None else Evidence(found.told, found.left_out)
    return Outcome(ended.stop_reason, ended.reward, ended.reward_parts, ended.metrics, evidence)


def _build(
    meta: _SegmentMeta,
    token_ids: NDArray[np.int32],
    action_mask: NDArray[np.bool_],
    behavior_logprobs: NDArray[np.float32],
) -> Segment:
    try:
        key = _key(meta.job, meta.group, meta.member)
        outcome = None if meta.outcome is None else _outcome(meta, meta.outcome)
    except NonFiniteValue as error:
        raise NonFiniteSegment(str(error)) from error
    except InvalidValue as error:
        raise MalformedMeta(str(error)) from error
    try:
        return Segment.of_exact(
            {
                "key": key,
                "attempt": meta.attempt,
                "branch": meta.branch,
                "index": meta.index,
                "turn": meta.turn,
                "version": meta.version,
                "temperature": meta.temperature,
                "engine_id": meta.engine_id,
                "token_ids": token_ids,
                "action_mask": action_mask,
                "behavior_logprobs": behavior_logprobs,
                "cache_mode": meta.cache_mode,
                "turn_reward": meta.turn_reward,
                "outcome": outcome,
                "spent": meta.spent if isinstance(meta, _TimedMeta | _UntrainedMeta | _RewardedMeta) else None,
                "untrained_turns": meta.untrained_turns if isinstance(meta, _UntrainedMeta | _RewardedMeta) else (),
                "turn_rewards": meta.turn_rewards if isinstance(meta, _RewardedMeta) else (),
                "repeated": meta.repeated if isinstance(meta, _AskedMeta) else (),
                "asked": meta.asked if isinstance(meta, _AskedMeta) else None,
                "user": meta.user if isinstance(meta, _UserMeta) else "",
            }
        )
    except NonFiniteValue as error:
        raise NonFiniteSegment(f"{key}: {error}") from error
    except InvalidValue as error:
        raise InvalidSegment(f"{key}: {error}") from error
