"""How old a sampled token is, how many groups may be started so that it does not get too old, which are trained next.

The rule kept here: age is counted in steps of the lineage that is being trained, and it is never negative. Versions
count publishes; a table maps a version to the epoch and the step that it was published at. When a trainer dies, the
next one claims a new epoch that forks off an older one at some step; what the dead one trained beyond that step is
no part of the lineage any more. A token of such a version is as old as the last step that both histories share.

Everything here is a pure function of its arguments; nothing is remembered, so a recovered trainer that recounts what
it finds cannot admit more than one that never died.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gspo_core.invariants import InvalidValue
from gspo_core.position import Position

_NO_END = 2**62

OnStale = Literal["mask", "drop", "wait"]


class UnknownVersion(LookupError):
    """A token claims a version, or a version an epoch, that the tables do not know."""


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
    begins_anew = step == 0
    epoch, step = version.epoch, version.step
    while epoch not in reach:
        # An epoch that resumed from nothing shares step 0 with every other; the epoch before it may have died before it
        # left a record.
        if step == 0 or (begins_anew and epoch not in forks):
            return 0
        epoch, step = _origin(epoch, step, forks)
    return min(step, reach[epoch])


def in_history(position: Position, newest_epoch: int, forks: Mapping[int, Position]) -> bool:
    """Whether a run that ``newest_epoch`` was the last to continue has passed ``position``.

    What an epoch did beyond the place where its successor forked off is void, however late it was written.
    """
    if position.epoch > newest_epoch:
        return False
    return shared_step(position, Position(newest_epoch, max(position.step, _NO_END)), forks) == position.step


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


def groups_admissible(
    *,
    max_staleness: int,
    groups_per_step: int,
    num_dispatched: int,
    num_dropped: int,
    num_published: int,
    num_excused: int = 0,
) -> int:
    """How many more training groups may be started now.

    At most ``(max_staleness + 1) * groups_per_step`` groups are started whose step is not yet published. A slot is
    freed when the weights of the step that took its group are published or when the group is dropped, so with
    ``max_staleness`` 0 every group of a step is sampled by the weights that the step starts from.

    All counts are of the lineage: after a recovery they follow from checkpoint, batch logs and dispatch cursor.
    Groups whose steps were rolled back count as not published again, and nothing is admitted until they are trained.
    ``num_excused`` of them are open and wait for nothing but rewards: they take no place until these are there.
    """
    occupied = num_dispatched - num_dropped - num_published - num_excused
    if occupied < 0 or num_excused < 0:
        raise InvalidValue(
            f"{num_dispatched} groups were dispatched, so {num_dropped} dropped, {num_published} published and "
            f"{num_excused} that wait cannot be"
        )
    if max_staleness < 0 or groups_per_step < 1:
        raise InvalidValue(f"max_staleness is {max_staleness} and groups_per_step {groups_per_step}")
    return max(0, (max_staleness + 1) * groups_per_step - occupied)


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """A group that was dispatched and is not settled, as the trainer sees it now."""

    group: int
    is_ready: bool
    """Whether all of its episodes have ended."""
    oldest_step: int | None
    """The step in the trainer's history whose weights sampled its oldest token; None while no token has arrived."""
    dispatched_step: int
    """The step that was published when it was dispatched: no token of it is older."""
    may_be_old: bool = False
    """It waited for rewards, and its old tokens are judged elsewhere."""

    @property
    def _birth(self) -> int:
        return self.dispatched_step if self.oldest_step is None else self.oldest_step


@dataclass(frozen=True, slots=True)
class Choice:
    """What to do with the open groups now. ``train`` is a whole batch or empty."""

    train: tuple[int, ...] = ()
    drop: tuple[int, ...] = ()
    """Holds a token that is too old already: it will never be trained, ready or not."""
    wait_for: tuple[int, ...] = ()
    """A batch is there, but taking it now would make these, which are not ready, too old."""


def choose_groups(
    open_groups: Collection[OpenGroup],
    *,
    step: int,
    groups_per_step: int,
    staleness_cap: int,
    on_stale: OnStale,
    may_wait: bool = True,
) -> Choice:
    """The batch to train after ``step`` steps: the ready groups with the oldest tokens first.

    ``mask`` and ``drop`` take a batch as soon as there is one. ``wait`` takes it only if every other open group can
    still be trained before its oldest token is beyond the cap, in the order of these deadlines, ``groups_per_step`` at
    a time. When waiting cannot change the batch, or ``may_wait`` is over, it is taken all the same: the cap holds
    because the caller masks what is beyond it in every mode.

    Admission alone makes the deadlines feasible: until ``s`` steps are published at most
    ``(s + 1 + max_staleness) * groups_per_step`` groups are started that are not dropped, and so many can be trained
    up to the step ``s + staleness_cap`` if the cap is at least ``max_staleness``. Only a rollback may leave more.
    """
    drop: tuple[int, ...] = ()
    if on_stale == "drop":
        drop = tuple(one.group for one in open_groups if _is_too_old(one, step, staleness_cap))
        open_groups = [one for one in open_groups if one.group not in drop]
    ready = sorted((one for one in open_groups if one.is_ready), key=_age_order)
    train = ready[:groups_per_step]
    if len(train) < groups_per_step:
        return Choice(drop=drop)
    if on_stale == "wait" and may_wait:
        rest = [one for one in open_groups if one not in train]
        if wait_for := _endangered(train, rest, step=step, staleness_cap=staleness_cap):
            return Choice(wait_for=wait_for)
    return Choice(train=tuple(one.group for one in train), drop=drop)


def _endangered(
    train: Sequence[OpenGroup], rest: Collection[OpenGroup], *, step: int, staleness_cap: int
) -> tuple[int, ...]:
    """Unfinished groups whose place ``train`` takes, although then not all of ``rest`` can be trained in time."""
    in_time = sorted((one for one in rest if one._birth + staleness_cap >= step), key=_age_order)
    for place, one in enumerate(in_time):
        if one._birth + staleness_cap < step + 1 + place // len(train):
            rushed = in_time[: place + 1]
            # Who would come after the whole batch even if it were ready changes nothing by becoming ready.
            return tuple(
                each.group for each in rushed if not each.is_ready and _age_order(each) < _age_order(train[-1])
            )
    return ()


def _is_too_old(one: OpenGroup, step: int, staleness_cap: int) -> bool:
    return not one.may_be_old and one.oldest_step is not None and step - one.oldest_step > staleness_cap


def _age_order(one: OpenGroup) -> tuple[int, int]:
    return one._birth, one.group


def _origin(epoch: int, step: int, forks: Mapping[int, Position]) -> tuple[int, int]:
    """The epoch that ``epoch`` forked off, and how far a history that reaches ``step`` shares it."""
    if epoch not in forks:
        raise UnknownVersion(f"there is no record of where epoch {epoch} forked off")
    origin = forks[epoch]
    if origin.epoch >= epoch:
        raise InvalidValue(f"epoch {epoch} cannot fork off the later epoch {origin.epoch}")
    return origin.epoch, min(step, origin.step)
