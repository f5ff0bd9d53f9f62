"""Messages that are whole and wrong: an engine that lies about its weights, a segment with a bit turned.

Each change takes the bytes that pass a line and gives others, or None where they are not what it is meant for. The rule
kept here: everything else of the message stays as it was, so that nothing but the check it is meant for can refuse it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from gspo_core.codec import SegmentRejected, decode

SEGMENT_MARK = b"GSEG"
ANSWER_MARK = b"POST /generate"
_LENGTH = re.compile(rb"(?i)(content-length: )(\d+)")
_LABEL = re.compile(rb'("(?:version|weight_version)":"job_)([0-9a-z]+)(/\d+/)(\d+)"')
_FIRST_LOGPROB = re.compile(rb'("output_token_logprobs":\[\[)(-?[0-9.e+-]+)')
SKEW = 0.5
_BEFORE_CRC_ENDS = 16
"""What the checksum covers begins before this byte of a segment."""


def _replaced(data: bytes, pattern: re.Pattern[bytes], new: bytes) -> bytes | None:
    """In the body of a whole answer over HTTP."""
    head, _, body = data.partition(b"\r\n\r\n")
    length = _LENGTH.search(head)
    if length is None or int(length[2]) != len(body) or b'"output_ids":[' not in body or b'"output_ids":[]' in body:
        return None
    changed, count = pattern.subn(new, body)
    if not count:
        return None
    return _LENGTH.sub(rb"\g<1>%d" % len(changed), head) + b"\r\n\r\n" + changed


def of_another_job(data: bytes) -> bytes | None:
    return _replaced(data, _LABEL, rb'\g<1>00000000000000000000000000\g<3>\g<4>"')


def of_no_version(data: bytes) -> bytes | None:
    """A number that nobody has published."""
    return _replaced(data, _LABEL, rb'\g<1>\g<2>\g<3>\g<4>00000"')


def improbable(data: bytes) -> bytes | None:
    """A log-prob that no token has."""
    return _replaced(data, _FIRST_LOGPROB, rb"\g<1>0.5")


def less_probable(data: bytes) -> bytes | None:
    """Every log-prob by ``SKEW``: possible, and not what the weights say. Only a learner can tell."""
    head, _, body = data.partition(b"\r\n\r\n")
    length = _LENGTH.search(head)
    if length is None or int(length[2]) != len(body) or b'"output_token_logprobs":[[' not in body:
        return None
    answer = json.loads(body)
    for entry in answer["meta_info"]["output_token_logprobs"]:
        entry[0] -= SKEW
    changed = json.dumps(answer).encode()
    return _LENGTH.sub(rb"\g<1>%d" % len(changed), head) + b"\r\n\r\n" + changed


LIES = {"another job": of_another_job, "no version": of_no_version, "improbable": improbable}


def bit_turned(place: float, tell: Callable[[str, int], None]) -> Callable[[bytes], bytes | None]:
    """In a segment on its way into the queue, at ``place`` (0 to 1) of it; ``tell`` is given its job and group."""

    def change(data: bytes) -> bytes | None:
        begin = data.find(SEGMENT_MARK)
        length = data[:begin].rpartition(b"$")[2].removesuffix(b"\r\n")
        if begin < 0 or not length.isdigit() or len(data) < begin + int(length):
            return None
        segment = data[begin : begin + int(length)]
        try:
            key = decode(segment).key
        except SegmentRejected:
            return None
        at = begin + _BEFORE_CRC_ENDS + int(place * (len(segment) - _BEFORE_CRC_ENDS))
        tell(key.job, key.group)
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    return change
