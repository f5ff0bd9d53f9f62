"""Computes the age of tokens from a table that maps each version to its position in the run.

Rule: a version enters the table before any engine can sample from it, so every token has an age.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from gspo_core.log.lineage import Lineage
from gspo_core.position import Position
from gspo_core.staleness import token_staleness
from gspo_core.types import Group
from gspo_core.versions import WeightsManifest


class StalenessTable:
    """Measures ages for one epoch of a job, relative to the current step of its lineage."""

    def __init__(self, epoch: int, lineage: Lineage) -> None:
        self._epoch = epoch
        self._lineage = lineage
        self._positions: dict[int, Position] = {}
        """Position of every version that may have sampled a token."""
        self.forks: Mapping[int, Position] = {}
        """The position at which each epoch forked off."""

    def recall(self, manifests: Iterable[WeightsManifest]) -> None:
        """Load the versions published before this attempt."""
        self._positions = {one.version: Position(one.epoch, one.step) for one in manifests}

    def add(self, version: int, step: int) -> None:
        self._positions[version] = Position(self._epoch, step)

    def newest(self, count: int) -> list[int]:
        return sorted(self._positions)[-count:]

    def of(self, versions: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the staleness of ``versions`` in steps."""
        return token_staleness(versions, self._positions, Position(self._epoch, self._lineage.step), self.forks)

    def table(self, groups: Iterable[Group]) -> dict[str, int]:
        """Map the versions in a batch to their ages, so that its log can be read without this table."""
        versions = sorted({one.version for group in groups for episode in group for one in episode.segments})
        ages = self.of(np.array(versions, dtype=np.int32))
        return {str(version): int(age) for version, age in zip(versions, ages, strict=True)}
