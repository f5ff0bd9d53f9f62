"""What has happened to the groups of a job on the way to the trainer's present weights.

The rule: weights and lineage travel together. A checkpoint holds both, so a trainer that takes over knows of every
group whether it is inside the weights, dropped, or still owed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass
class Lineage:
    step: int = 0
    num_dispatched: int = 0
    """Training groups are dispatched in order of their number: these are 0 .. num_dispatched - 1."""
    num_published: int = 0
    """Groups inside steps whose weights are published."""
    num_dropped: int = 0
    settled: set[int] = field(default_factory=set)
    """Groups that are trained or dropped, except those below ``low_watermark``, which all are."""
    low_watermark: int = 0

    def become(self, other: Lineage) -> None:
        """Take the values of ``other``; everyone who holds this lineage sees them."""
        vars(self).update(vars(other))

    def settle(self, groups: Iterable[int]) -> None:
        self.settled.update(groups)
        while self.low_watermark in self.settled:
            self.settled.remove(self.low_watermark)
            self.low_watermark += 1

    def is_settled(self, group: int) -> bool:
        return group < self.low_watermark or group in self.settled

    def owed(self) -> Iterator[int]:
        """Dispatched, and neither trained nor dropped."""
        return (group for group in range(self.low_watermark, self.num_dispatched) if group not in self.settled)

    def to_dict(self) -> dict[str, int | list[int]]:
        return {**vars(self), "settled": sorted(self.settled)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        return cls(**{**data, "settled": set(data["settled"])})
