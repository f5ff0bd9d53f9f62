"""A segment survives the wire exactly, and each way in which bytes can be wrong has its own error."""

from __future__ import annotations

import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from zlib import crc32  # not the library that the codec uses

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from gspo_core import codec
from gspo_core.codec import decode, encode
from gspo_core.types import (
    MAX_ASKED_CHARS,
    MAX_USER_CHARS,
    Asked,
    CacheMode,
    EpisodeKey,
    Outcome,
    Repeated,
    Segment,
    StopReason,
    TimeSplit,
    TurnReward,
)
from tests.core.segments import segment, segments

HEADER = struct.Struct("<4sIIIIId")


def sealed(
    meta: bytes | None = None,
    *,
    of: Segment | None = None,
    num_tokens: int | None = None,
    num_actions: int | None = None,
    logprob_sum: float | None = None,
    token_ids: bytes | None = None,
    logprobs: bytes | None = None,
    mask: bytes | None = None,
    padding: bytes | None = None,
    meta_length: int | None = None,
) -> bytes:
    """What another, faulty writer could send: any part replaced, and the crc right all the same."""
    one = of or segment()
    if meta is None:
        meta = meta_of(encode(one))
    counts = struct.pack(
        "<IIId",
        len(meta) if meta_length is None else meta_length,
        one.num_tokens if num_tokens is None else num_tokens,
        one.num_actions if num_actions is None else num_actions,
        one.logprob_sum if logprob_sum is None else logprob_sum,
    )
    parts = (
        meta,
        bytes(-len(meta) % 8) if padding is None else padding,
        one.token_ids.tobytes() if token_ids is None else token_ids,
        one.behavior_logprobs.tobytes() if logprobs is None else logprobs,
        one.action_mask.tobytes() if mask is None else mask,
    )
    body = counts + b"".join(parts)
    return struct.pack("<4sII", b"GSEG", 1, crc32(body)) + body


def meta_of(data: bytes) -> bytes:
    return data[32 : 32 + HEADER.unpack_from(data)[3]]


def meta_with(place: int, value: object) -> bytes:
    """The meta block of a small segment with the value at ``place`` replaced."""
    values = msgspec.msgpack.decode(meta_of(encode(segment())))
    values[place] = value
    return msgspec.msgpack.encode(values)


def floats(*values: float) -> bytes:
    return np.array(values, np.float32).tobytes()


class TestRoundTrip:
    @given(segments())
    @settings(max_examples=150)
    def test_decode_gives_back_the_segment(self, one: Segment) -> None:
        data = encode(one)
        read = decode(data)
        assert read == one
        assert (read.num_actions, read.logprob_sum) == (one.num_actions, one.logprob_sum)
        assert encode(read) is data  # made once
        assert encode(replace(read)) == data

    def test_layout_is_what_the_docstring_says(self) -> None:
        """Read with nothing but struct, so that an accidental change of the wire format shows."""
        data = encode(segment(turn_reward=0.5, cache_mode=CacheMode.STALE))
        magic, schema, crc, meta_length, num_tokens, num_actions, logprob_sum = HEADER.unpack_from(data)
        assert (magic, schema, num_tokens, num_actions, logprob_sum) == (b"GSEG", 1, 4, 3, -1.75)
        assert crc == crc32(data[12:])
        outcome = ["completed", 1.0, {}, {}]
        assert msgspec.msgpack.decode(data[32 : 32 + meta_length]) == [
            *("job-1", 3, 1, 0, 0, 0, 0, 7, 1.0, "engine-0", "stale", 0.5, outcome)
        ]
        start = (32 + meta_length + 7) // 8 * 8
        assert struct.unpack_from("<4i", data, start) == (11, 12, 13, 14)
        assert struct.unpack_from("<4f", data, start + 16) == (0.0, -0.5, -0.25, -1.0)
        assert data[start + 32 :] == bytes([0, 1, 1, 1])

    def test_decoded_arrays_are_read_only_views_of_the_bytes(self) -> None:
        data = encode(segment())
        read = decode(data)
        whole = np.frombuffer(data, np.uint8)
        for array in (read.token_ids, read.action_mask, read.behavior_logprobs):
            assert np.shares_memory(array, whole)
            assert not array.flags.writeable
            assert array.flags.aligned
            with pytest.raises(ValueError, match="WRITEABLE"):
                array.flags.writeable = True

    def test_a_mutable_buffer_is_copied_so_that_the_segment_stays_what_it_was(self) -> None:
        data = bytearray(encode(segment()))
        read = decode(data)  # type: ignore[arg-type]
        data[-20:] = bytes(20)
        assert read == segment()

    def test_log_probs_travel_bit_by_bit(self) -> None:
        smallest, largest = np.float32(-1e-45), -np.finfo(np.float32).max
        one = segment(behavior_logprobs=[-0.0, smallest, -1.0, 0.0])
        assert decode(encode(one)).behavior_logprobs.tobytes() == one.behavior_logprobs.tobytes()
        one = segment(behavior_logprobs=[0.0, largest, largest, largest])
        assert decode(encode(one)).logprob_sum == 3 * float(largest)

    def test_a_long_segment_takes_nine_bytes_a_token(self) -> None:
        n = 8192
        one = segment(
            token_ids=np.arange(n), action_mask=np.ones(n, bool), behavior_logprobs=np.full(n, -0.5), outcome=None
        )
        assert len(encode(one)) < 9 * n + 200

    def test_equal_segments_have_equal_bytes(self) -> None:
        """Resending is told from conflicting by comparing bytes, so they may not depend on how a value was spelled."""
        assert encode(segment(temperature=np.float64(1), action_mask=[0, 1, 1, 1])) == encode(segment(temperature=1))

    def test_a_sum_that_was_added_in_another_order_is_accepted(self) -> None:
        assert decode(sealed(logprob_sum=-1.75 * (1 + 1e-14))) == segment()

    def test_needs_neither_torch_nor_a_service(self) -> None:
        code = (
            "import sys, gspo_core.codec, gspo_core.assemble, gspo_core.staleness\n"
            "sys.exit(bool({'torch', 'redis', 'pydantic', 'fastapi'} & set(sys.modules)))"
        )
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class TestRefusals:
    """One error each. Where only a deep check can notice, the crc is right: the writer itself was wrong."""

    def refuses(self, data: bytes, error: type[codec.SegmentRejected]) -> None:
        with pytest.raises(codec.SegmentRejected) as caught:
            decode(data)
        assert type(caught.value) is error, caught.value

    def test_other_bytes(self) -> None:
        for data in (b"\x80\x04\x95pickle", b"x", b"{}", bytes(100), encode(segment())[1:]):
            self.refuses(data, codec.BadMagic)

    def test_another_schema(self) -> None:
        data = encode(segment())
        for schema in (0, 8, 2**32 - 1):
            self.refuses(data[:4] + struct.pack("<I", schema) + data[8:], codec.UnknownSchema)
            self.refuses(data[:4] + struct.pack("<I", schema) + data[8:20], codec.UnknownSchema)

    def test_times_that_are_missing_or_too_many_for_its_schema(self) -> None:
        plain, timed = encode(segment()), encode(segment(spent=TimeSplit(1.5, 0.25, 0.0)))
        assert (plain[4], timed[4]) == (codec.SCHEMA, codec.TIMED_SCHEMA)
        assert msgspec.msgpack.decode(meta_of(timed))[13:] == [[1.5, 0.25, 0.0]]
        for data, schema in ((plain, codec.TIMED_SCHEMA), (timed, codec.SCHEMA)):
            self.refuses(data[:4] + struct.pack("<I", schema) + data[8:], codec.MalformedMeta)

    def test_untrained_turns_have_a_schema_of_their_own(self) -> None:
        for spent in (None, TimeSplit(1.5, 0.25, 0.0)):
            data = encode(segment(spent=spent, untrained_turns=(2, 5)))
            assert data[4] == codec.UNTRAINED_SCHEMA
            assert decode(data) == segment(spent=spent, untrained_turns=(2, 5))
            assert msgspec.msgpack.decode(meta_of(data))[13:] == [spent and list(spent), [2, 5]]
            self.refuses(data[:4] + struct.pack("<I", codec.TIMED_SCHEMA) + data[8:], codec.MalformedMeta)
        for schema in (codec.SCHEMA, codec.TIMED_SCHEMA):
            written = encode(segment(spent=TimeSplit(1.5, 0.25, 0.0) if schema == codec.TIMED_SCHEMA else None))
            self.refuses(written[:4] + struct.pack("<I", codec.UNTRAINED_SCHEMA) + written[8:], codec.MalformedMeta)

    def test_rewards_of_turns_have_a_schema_of_their_own(self) -> None:
        for spent, untrained in ((None, ()), (TimeSplit(1.5, 0.25, 0.0), (2, 5))):
            one = segment(spent=spent, untrained_turns=untrained, turn_rewards=((0, 0.5), (7, -1)))
            data = encode(one)
            assert data[4] == codec.REWARDED_SCHEMA
            assert decode(data) == one
            assert decode(data).turn_rewards == (TurnReward(0, 0.5), TurnReward(7, -1.0))
            ends = [spent and list(spent), list(untrained), [[0, 0.5], [7, -1.0]]]
            assert msgspec.msgpack.decode(meta_of(data))[13:] == ends
            self.refuses(data[:4] + struct.pack("<I", codec.UNTRAINED_SCHEMA) + data[8:], codec.MalformedMeta)

    def test_a_stop_reason_that_older_releases_do_not_know_says_so(self) -> None:
        data = encode(segment(outcome=Outcome(StopReason.NO_REWARD)))
        assert data[4] == codec.REWARDED_SCHEMA
        assert decode(data).outcome == Outcome(StopReason.NO_REWARD)

    def test_requests_of_agents_have_a_schema_of_their_own(self) -> None:
        asked = Asked(2, "resampled", "messages", "claude", 5, 4)
        for changes in ({"asked": asked, "turn": 3}, {"repeated": (Repeated(0, 2), Repeated(4, 1))}):
            one = segment(**changes)
            data = encode(one)
            assert data[4] == codec.ASKED_SCHEMA
            assert decode(data) == one
            assert (decode(data).asked, decode(data).repeated) == (one.asked, one.repeated)
            ends = [None, [], [], [list(again) for again in one.repeated], one.asked and list(one.asked)]
            assert msgspec.msgpack.decode(meta_of(data))[13:] == ends
            self.refuses(data[:4] + struct.pack("<I", codec.REWARDED_SCHEMA) + data[8:], codec.MalformedMeta)

    def test_the_user_of_a_request_has_a_schema_of_its_own(self) -> None:
        one = segment(asked=Asked(None, "", "messages", "claude", 1, 0), user="näme")
        data = encode(one)
        assert data[4] == codec.USER_SCHEMA
        assert decode(data) == one
        assert decode(data).user == "näme"
        assert msgspec.msgpack.decode(meta_of(data))[13:] == [None, [], [], [], list(one.asked or ()), "näme"]
        assert encode(segment(asked=one.asked))[4] == codec.ASKED_SCHEMA
        self.refuses(data[:4] + struct.pack("<I", codec.ASKED_SCHEMA) + data[8:], codec.MalformedMeta)

    def test_cut_off_anywhere(self) -> None:
        data = encode(segment())
        for length in range(len(data)):
            self.refuses(data[:length], codec.TruncatedSegment)

    def test_too_much_at_the_end(self) -> None:
        self.refuses(encode(segment()) + b"\0", codec.MismatchedLengths)
        self.refuses(encode(segment()) * 2, codec.MismatchedLengths)

    def test_every_byte_changed_to_every_other_value(self) -> None:
        data = encode(segment())
        for place in range(len(data)):
            damaged = bytearray(data)
            for value in range(256):
                damaged[place] = value
                try:
                    decode(bytes(damaged))
                except codec.SegmentRejected:
                    continue
                assert value == data[place], f"byte {place} became {value} unnoticed"

    def test_a_flipped_bit_behind_the_header_is_found_by_the_crc(self) -> None:
        data = encode(segment())
        for place in range(32, len(data)):
            self.refuses(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :], codec.CorruptSegment)

    def test_oversized(self) -> None:
        self.refuses(encode(segment()) + bytes(codec.MAX_SEGMENT_BYTES), codec.OversizedSegment)
        self.refuses(bytes(codec.MAX_SEGMENT_BYTES + 1), codec.OversizedSegment)

    def test_oversized_is_refused_when_written_too(self) -> None:
        def of_length(n: int) -> Segment:
            zeros = np.zeros(n, np.int32)
            return segment(token_ids=zeros, action_mask=zeros, behavior_logprobs=zeros)

        overhead = len(encode(of_length(0)))
        longest = (codec.MAX_SEGMENT_BYTES - overhead) // 9
        assert decode(encode(of_length(longest))).num_tokens == longest
        with pytest.raises(codec.OversizedSegment):
            encode(of_length(longest + 1))

    def test_so_many_tokens_fit_whatever_else_is_said_before_the_end(self) -> None:
        longest = {name: chr(0x1F600) * MAX_ASKED_CHARS for name in ("reason", "dialect", "model")}
        says_most = Asked(parent=None, num_messages=2**31 - 1, num_old=2**31 - 1, **longest)
        zeros = np.zeros(codec.MAX_SEGMENT_TOKENS, np.int32)
        one = segment(
            token_ids=zeros,
            action_mask=zeros,
            behavior_logprobs=zeros,
            asked=says_most,
            user=chr(0x1F600) * MAX_USER_CHARS,
            engine_id="e" * 2000,
        )
        assert decode(encode(one)).num_tokens == codec.MAX_SEGMENT_TOKENS

    @pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001])
    def test_log_probs_that_are_not_finite(self, bits: int) -> None:
        self.refuses(sealed(logprobs=floats(0, -0.5, -0.25) + struct.pack("<I", bits)), codec.NonFiniteSegment)

    @pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
    def test_other_numbers_that_are_not_finite(self, number: float) -> None:
        self.refuses(sealed(meta_with(8, number)), codec.NonFiniteSegment)
        self.refuses(sealed(meta_with(11, number)), codec.NonFiniteSegment)
        self.refuses(sealed(meta_with(12, ["completed", number, {}, {}])), codec.NonFiniteSegment)
        self.refuses(sealed(meta_with(12, ["completed", 1.0, {"a": number}, {}])), codec.NonFiniteSegment)
        self.refuses(sealed(meta_with(12, ["completed", 1.0, {}, {"a": number}])), codec.NonFiniteSegment)
        self.refuses(sealed(logprob_sum=number), codec.IntegrityMismatch)

    def test_lengths_that_contradict_each_other(self) -> None:
        self.refuses(sealed(num_actions=5), codec.MismatchedLengths)
        self.refuses(sealed(num_tokens=3), codec.MismatchedLengths)
        self.refuses(sealed(num_tokens=5), codec.TruncatedSegment)
        self.refuses(sealed(token_ids=b""), codec.TruncatedSegment)
        self.refuses(sealed(mask=bytes([0, 1, 1, 1, 0])), codec.MismatchedLengths)

    @pytest.mark.parametrize(
        "meta",
        [
            b"",
            b"\xc1",
            b"\x80",
            msgspec.msgpack.encode([]),
            msgspec.msgpack.encode({"job": "j"}),
            meta_with(0, "job-1") + b"\0",
            meta_with(0, "job-1")[:-1],
            meta_with(0, ""),
            meta_with(0, "a/b"),
            meta_with(0, 5),
            meta_with(0, b"job"),
            meta_with(0, "job-1").replace(b"job-1", b"job-\xff"),
            meta_with(1, -1),
            meta_with(1, 1.0),
            meta_with(1, True),
            meta_with(1, 2**64 - 1),
            meta_with(2, None),
            meta_with(9, 7),
            meta_with(10, "warm"),
            meta_with(10, None),
            meta_with(8, 1),
            meta_with(8, 2**64 - 1),
            meta_with(1, 3).replace(b"\xa5job-1\x03", b"\xd9\x05job-1\x03"),
            meta_with(12, ["completed", 1.0, {"a": 1.0, "b": 1.0}, {}]).replace(b"\xa1b", b"\xa1a"),
            meta_with(12, []),
            meta_with(12, ["bored", 1.0, {}, {}]),
            meta_with(12, ["completed", None, {}, {}]),
            meta_with(12, ["env_error", 1.0, {}, {}]),
            meta_with(12, ["completed", 1.0, {"a": "b"}, {}]),
            meta_with(12, ["completed", 1.0, {1: 1.0}, {}]),
            meta_with(12, ["completed", 1.0, {}, {}, {}]),
            b"\x91" * 100_000,
        ],
    )
    def test_malformed_meta(self, meta: bytes) -> None:
        self.refuses(sealed(meta), codec.MalformedMeta)

    def test_padding_that_is_not_zero(self) -> None:
        padding = bytes(-len(meta_of(encode(segment()))) % 8)
        assert padding
        self.refuses(sealed(padding=padding[:-1] + b"\1"), codec.MalformedMeta)

    @pytest.mark.parametrize(
        "changes",
        [
            {"token_ids": struct.pack("<4i", 11, 12, 13, -14)},
            {"mask": bytes([0, 1, 1, 2])},
            {"mask": bytes([0, 1, 1, 255])},
            {"logprobs": floats(0, -0.5, -0.25, 0.5)},
            {"logprobs": floats(-1, -0.5, -0.25, 0)},
            {"mask": bytes([1, 0, 1, 1])},
            {"meta": meta_with(3, -1)},
            {"meta": meta_with(7, 2**31)},
            {"meta": meta_with(8, 0.0)},
        ],
    )
    def test_invariants(self, changes: dict[str, Any]) -> None:
        self.refuses(sealed(**changes), codec.InvalidSegment)

    def test_no_tokens_and_no_outcome(self) -> None:
        empty = segment(token_ids=[], action_mask=[], behavior_logprobs=[])
        assert decode(sealed(of=empty)) == empty
        self.refuses(sealed(meta_with(12, None), of=empty), codec.InvalidSegment)

    @pytest.mark.parametrize(
        "changes",
        [
            {"num_actions": 2},
            {"num_actions": 0},
            {"mask": bytes([1, 1, 1, 1])},
            {"logprob_sum": -1.75 - 1e-8},
            {"logprob_sum": 0.0},
            {"logprobs": floats(0, -0.5, -0.25, -1.0000001)},
        ],
    )
    def test_sums_that_are_not_those_of_the_arrays(self, changes: dict[str, Any]) -> None:
        self.refuses(sealed(**changes), codec.IntegrityMismatch)

    def test_each_error_is_one_of_ours(self) -> None:
        for name in ("BadMagic", "UnknownSchema", "TruncatedSegment", "OversizedSegment", "MismatchedLengths"):
            assert issubclass(getattr(codec, name), codec.SegmentRejected)
        for name in ("CorruptSegment", "MalformedMeta", "NonFiniteSegment", "InvalidSegment", "IntegrityMismatch"):
            assert issubclass(getattr(codec, name), codec.SegmentRejected)

    def test_a_name_that_no_utf8_can_hold_is_refused_when_written(self) -> None:
        with pytest.raises(codec.MalformedMeta):
            encode(segment(engine_id="\ud800"))


def hostile_metas() -> list[bytes]:
    """msgpack that promises four thousand million elements of each kind."""
    huge = b"\xff\xff\xff\xff"
    array, map_, text, binary, extension = (kind + huge for kind in (b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"))
    good = meta_with(0, "job-1")
    outcome = good.index(b"\x94\xa9completed")
    parts = good[: outcome + 11 + 9]
    return [
        *(array, map_, text, binary, extension),
        b"\x9d" + text,
        good[:outcome] + array,
        good[:outcome] + b"\x94" + text,
        parts + map_,
        parts + b"\x80" + map_,
    ]


@pytest.mark.parametrize(
    "make",
    [
        *(lambda meta=meta: sealed(meta) for meta in hostile_metas()),
        lambda: sealed(num_tokens=2**32 - 1),
        lambda: sealed(num_tokens=2**31, num_actions=2**32 - 1),
        lambda: sealed(meta_length=2**32 - 1),
        lambda: sealed(meta_length=2**31 - 32, num_tokens=0),
        lambda: struct.pack("<4sIIIIId", b"GSEG", 1, 0, *[2**32 - 1] * 3, 0.0),
    ],
)
def test_hostile_lengths_allocate_nothing(make: Callable[[], bytes]) -> None:
    data = make()
    with pytest.raises(codec.SegmentRejected):
        decode(data)
    tracemalloc.start()
    try:
        with pytest.raises(codec.SegmentRejected):
            decode(data)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_keys_and_outcomes_of_every_kind_survive() -> None:
    for reason in StopReason:
        outcome = Outcome(reason, 0.25 if reason.has_reward else None, {"exact": 1.0}, {"turns": 3})
        one = segment(key=EpisodeKey("日本/".strip("/"), 2**63 - 1, 2**31 - 1), outcome=outcome)
        assert decode(encode(one)).outcome == outcome


def test_what_is_changed_has_bytes_of_its_own() -> None:
    read = decode(encode(segment()))
    other = replace(read, turn=read.turn + 1)
    assert other.encoded is None
    assert decode(encode(other)).turn == read.turn + 1
