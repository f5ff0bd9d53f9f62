"""What the policy made of each token when it was trained: a file ``trained/ep<E>-step<S>`` for each batch log.

Rule: nothing depends on it. It is there for people who look at an episode, so one that is missing or damaged is as good
as none, and a batch that is trained again after a loss need not have one.

Layout: 8 bytes magic, uint32 length of the index (little-endian), the index as JSON (group, member, number of sampled
tokens, ...), float32 log-probs of the sampled tokens in order (NaN: not trained), and the sha256 of all that.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gspo_core.types import EpisodeKey
from services.durable import make_directory, write_once

_MAGIC = b"GSPOTRND"
_HEADER = struct.Struct("<8sI")
_DIGEST_BYTES = hashlib.sha256().digest_size


class TrainedLog:
    """Of the job whose directory is ``job_dir``."""

    def __init__(self, job_dir: Path) -> None:
        self._root = job_dir / "trained"

    def path(self, epoch: int, step: int) -> Path:
        return self._root / f"ep{epoch:06d}-step{step:06d}"

    def write(self, epoch: int, step: int, logprobs: Mapping[EpisodeKey, NDArray[np.float32]]) -> None:
        """What an earlier write of this epoch and step has left stays."""
        make_directory(self._root)
        index = json.dumps([[key.group, key.member, len(values)] for key, values in logprobs.items()]).encode()
        arrays = b"".join(values.astype("<f4", copy=False).tobytes() for values in logprobs.values())
        content = _HEADER.pack(_MAGIC, len(index)) + index + arrays
        if not self.path(epoch, step).exists():
            write_once(self.path(epoch, step), (content, hashlib.sha256(content).digest()))

    def read(self, epoch: int, step: int) -> dict[tuple[int, int], NDArray[np.float32]]:
        """By group and member; empty where nothing is known."""
        try:
            data = self.path(epoch, step).read_bytes()
        except FileNotFoundError:
            return {}
        content, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
        if not content.startswith(_MAGIC) or hashlib.sha256(content).digest() != digest:
            return {}
        _, length = _HEADER.unpack_from(content)
        values = np.frombuffer(content[_HEADER.size + length :], "<f4")
        found: dict[tuple[int, int], NDArray[np.float32]] = {}
        begin = 0
        for group, member, count in json.loads(content[_HEADER.size : _HEADER.size + length]):
            found[group, member] = values[begin : begin + count]
            begin += count
        return found

    def remove(self, positions: Collection[tuple[int, int]]) -> None:
        for epoch, step in positions:
            self.path(epoch, step).unlink(missing_ok=True)
