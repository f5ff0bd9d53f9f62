"""The log-prob that the policy gave each sampled token when the token was trained, as bytes beside the batch log.

The rule: nothing depends on these bytes. They are for people who look at an episode, so damaged ones read as none.

Layout: 8 bytes magic, uint32 length of the index (little-endian), the index as JSON (group, member, number of sampled
tokens, ...), float32 log-probs of the sampled tokens in order (NaN: not trained), and the sha256 of all that.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from gspo_core.types import EpisodeKey

SCHEMA = 1
# The magic is the number of the schema: the bytes of another one begin otherwise.
_MAGIC = {1: b"GSPOTRND"}[SCHEMA]
_HEADER = struct.Struct("<8sI")
_DIGEST_BYTES = hashlib.sha256().digest_size

MemberLogprobs = dict[tuple[int, int], NDArray[np.float32]]
"""By group and member."""


def encode_trained(logprobs: Mapping[EpisodeKey, NDArray[np.float32]]) -> bytes:
    index = json.dumps([[key.group, key.member, len(values)] for key, values in logprobs.items()]).encode()
    arrays = b"".join(values.astype("<f4", copy=False).tobytes() for values in logprobs.values())
    content = _HEADER.pack(_MAGIC, len(index)) + index + arrays
    return content + hashlib.sha256(content).digest()


def decode_trained(data: bytes) -> MemberLogprobs:
    """Empty if ``data`` was changed since it was written."""
    content, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if not content.startswith(_MAGIC) or hashlib.sha256(content).digest() != digest:
        return {}
    _, length = _HEADER.unpack_from(content)
    values = np.frombuffer(content[_HEADER.size + length :], "<f4")
    found: MemberLogprobs = {}
    begin = 0
    for group, member, count in json.loads(content[_HEADER.size : _HEADER.size + length]):
        found[group, member] = values[begin : begin + count]
        begin += count
    return found
