"""Log-probs of each token when it was trained: a file ``trained/ep<E>-step<S>`` for each batch log.

The rule: nothing depends on it. It serves people who look at an episode, so a damaged file counts as none, and a batch
that is trained again after a loss need not have one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gspo_core.log.trained import MemberLogprobs, decode_trained, encode_trained
from gspo_core.position import Position
from gspo_core.types import EpisodeKey
from services.files.durable import make_directory, remove_unfinished, write_once
from services.files.job_dir import JobDir


class TrainedLog:
    """The files of one job."""

    def __init__(self, job: JobDir) -> None:
        self._job = job

    def path(self, epoch: int, step: int) -> Path:
        return self._job.trained_at(Position(epoch, step))

    def write(self, epoch: int, step: int, logprobs: Mapping[EpisodeKey, NDArray[np.float32]]) -> None:
        """An existing file of this epoch and step stays."""
        path = self.path(epoch, step)
        make_directory(path.parent)
        if not path.exists():
            write_once(path, (encode_trained(logprobs),), epoch=epoch)

    def read(self, epoch: int, step: int) -> MemberLogprobs:
        """Empty if unknown."""
        try:
            data = self.path(epoch, step).read_bytes()
        except FileNotFoundError:
            return {}
        return decode_trained(data)

    def remove_unfinished(self, epoch: int) -> None:
        """Remove half-written files of trainers before ``epoch``: they have lost the job."""
        remove_unfinished(self._job.trained, epoch)

    def remove(self, positions: Collection[tuple[int, int]]) -> None:
        for epoch, step in positions:
            self.path(epoch, step).unlink(missing_ok=True)
