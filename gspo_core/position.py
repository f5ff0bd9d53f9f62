"""A place in the history of a job. It knows nothing of versions, nor of what was trained there."""

from __future__ import annotations

from typing import NamedTuple


class Position(NamedTuple):
    """A place in the history of a job: after ``step`` steps, reached in ``epoch``; sorts by epoch, then step."""

    epoch: int
    step: int
