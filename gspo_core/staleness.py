"""How old a sampled token is, and how many groups may be started so that it does not get too old.

The rule kept here: age is counted in steps of the lineage that is being trained, and it is never negative. Versions
count publishes; a table maps a version to the epoch and the step that it was published at. When a trainer dies, the
next one claims a new epoch that forks off an older one at some step; what the dead one trained beyond that step is
no part of the lineage any more. A token of such a version is as old as the last step that both histories share.

Everything here is a pure function of its arguments; nothing is remembered, so a recovered trainer that recounts what
it finds cannot admit more than one that never died.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gspo_core.types import InvalidValue


class UnknownVersion(LookupError):
    """A token claims a version, or a version an epoch, that the tables do not know."""


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the history of a job: after ``step`` steps, reached in ``epoch``."""

    epoch: int
    step: int


def shared_step(version: Position, current: Position, forks: Mapping[int, Position]) -> int:
    """The last step that the history of ``version`` has in common with the history of ``current``.

    ``forks`` maps each epoch except the first to the position that it started from.
    """
    # How far the current history follows each of its epochs: its own as far as it came, older ones up to their fork.
    reach = {current.epoch: current.step}
    epoch, step = current.epoch, current.step
    while epoch in forks:
        epoch, step = _origin(epoch, step, forks)
        reach[epoch] = step
    epoch, step = version.epoch, version.step
    while epoch not in reach:
        epoch, step = _origin(epoch, step, forks)
    return min(step, reach[epoch])


def staleness(version: Position, current: Position, forks: Mapping[int, Position]) -> int:
    """Steps between the weights that sampled a token and the trainer, which stands at ``current``."""
    if version.epoch == current.epoch and version.step > current.step:
        raise InvalidValue(f"a version of step {version.step} cannot exist before step {current.step} is over")
    return current.step - shared_step(version, current, forks)


def token_staleness(
    versions_T: NDArray[np.int32],
    table: Mapping[int, Position],
    current: Position,
    forks: Mapping[int, Position],
) -> NDArray[np.int32]:
    """The staleness of each token, given the version of each and the table of published versions."""
    unique, places_T = np.unique(versions_T, return_inverse=True)
    ages = np.empty(len(unique), dtype=np.int32)
    for place, version in enumerate(unique.tolist()):
        if version not in table:
            raise UnknownVersion(f"version {version} was sampled from but is not among the published versions")
        ages[place] = staleness(table[version], current, forks)
    return ages[places_T]


def groups_published(taken: Mapping[int, int], published_step: int) -> int:
    """How many groups went into steps whose weights are published; ``taken`` maps a step to its number of groups."""
    return sum(count for step, count in taken.items() if step <= published_step)


def groups_admissible(
    *, max_staleness: int, groups_per_step: int, num_dispatched: int, num_dropped: int, num_published: int
) -> int:
    """How many more training groups may be started now.

    At most ``(max_staleness + 1) * groups_per_step`` groups are started whose step is not yet published. A slot is
    freed when the weights of the step that took its group are published or when the group is dropped, so with
    ``max_staleness`` 0 every group of a step is sampled by the weights that the step starts from.

    All counts are of the lineage: after a recovery they follow from checkpoint, batch logs and dispatch cursor.
    Groups whose steps were rolled back count as not published again, and nothing is admitted until they are trained.
    """
    occupied = num_dispatched - num_dropped - num_published
    if occupied < 0:
        raise InvalidValue(
            f"{num_dispatched} groups were dispatched, so {num_dropped} dropped and {num_published} published cannot be"
        )
    if max_staleness < 0 or groups_per_step < 1:
        raise InvalidValue(f"max_staleness is {max_staleness} and groups_per_step {groups_per_step}")
    return max(0, (max_staleness + 1) * groups_per_step - occupied)


def _origin(epoch: int, step: int, forks: Mapping[int, Position]) -> tuple[int, int]:
    """The epoch that ``epoch`` forked off, and how far a history that reaches ``step`` shares it."""
    if epoch not in forks:
        raise UnknownVersion(f"there is no record of where epoch {epoch} forked off")
    origin = forks[epoch]
    if origin.epoch >= epoch:
        raise InvalidValue(f"epoch {epoch} cannot fork off the later epoch {origin.epoch}")
    return origin.epoch, min(step, origin.step)
