"""What a logged step is changed to before it is trained again: other settings, or without a part of its data.

The rule: a change says exactly what is different; everything else is as it was logged. Settings are given by key, as in
``gspo set``, and any key of a job may be named. A setting that was left to its default follows what it depends on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace

from pydantic import BaseModel, ValidationError

from gspo_core.json_value import JSON
from gspo_core.live_settings import is_setting
from gspo_core.log.batches import BatchExtra, LoggedBatch, LoggedSettings
from gspo_core.problems import near, problems
from gspo_core.spec import JobSpec
from gspo_core.strict_json import TextRejected, typed_value
from gspo_core.types import Group, Trajectory

# Keys that stand for others.
_STANDS_FOR: Mapping[str, tuple[str, ...]] = {
    "objective.name": ("loss", "ratio"),
    "objective.clip": ("clip_low", "clip_high"),
    "objective.geometric_gate": ("geometric_gate_low",),
    "objective.importance_sampling_level": ("name", "ratio"),
    # A name stands for them, so another loss or ratio has none.
    "objective.loss": ("name",),
    "objective.ratio": ("name",),
}
# What a step that is trained again reads of a specification. ``rollout`` for its cap, ``steps`` for the schedule.
TRAINED_SECTIONS = frozenset({"objective", "optimizer", "learner", "seed", "steps"})
TRAINED_KEYS = frozenset({"rollout.staleness_cap", "rollout.max_staleness"})
LEFT_OUT = "left_out"
"""Why a group is dropped that a fork is not fed, among the reasons of a log."""


class ImpossibleChange(ValueError):
    """The change names nothing that is there, or gives a job that cannot be."""


def parse_assignments(assignments: Sequence[str]) -> dict[str, JSON]:
    """``KEY=VALUE`` each; values are read as JSON, else taken as text. Raises ImpossibleChange."""
    values: dict[str, JSON] = {}
    for assignment in assignments:
        key, is_assigned, text = assignment.partition("=")
        if not is_assigned:
            raise ImpossibleChange(f"{assignment}: write KEY=VALUE, for example optimizer.lr=5e-7")
        try:
            values[key] = typed_value(text)
        except TextRejected as error:
            raise ImpossibleChange(f"{assignment}: {error}") from error
    return values


def changed_spec(spec: JobSpec, values: Mapping[str, JSON]) -> JobSpec:
    """The job with other settings. Raises ImpossibleChange."""
    if not values:
        return spec
    sections = {key.partition(".")[0] for key in values if "." in key}
    data = _as_written(spec, sections)
    for key, value in values.items():
        if not is_setting(key.split(".")):
            known = [f"{section}.{name}" for section in sections for name in _names(spec, section)]
            raise ImpossibleChange(f"{key} is not a setting of a job{near(key, [*known, *type(spec).model_fields])}")
        _put(data, key, value, values)
    try:
        return JobSpec.model_validate(data)
    except ValidationError as error:
        raise ImpossibleChange("; ".join(one.message for one in problems(error, JobSpec, data))) from error


def without_live(batch: LoggedBatch, values: Mapping[str, JSON]) -> LoggedBatch:
    """The batch without the live settings that ``values`` replace: a change holds for every step."""
    logged = batch.extra.get("settings", {})
    replaced = set(values)
    for key in values:
        section = key.rpartition(".")[0]
        replaced |= {f"{section}.{name}" for name in _STANDS_FOR.get(key, ())}
    rest = {key: value for key, value in logged.get("values", {}).items() if key not in replaced}
    settings: LoggedSettings = {"version": logged.get("version", 0), "values": rest}
    return replace(batch, extra={**batch.extra, "settings": settings})


def idle_settings(values: Mapping[str, JSON]) -> list[str]:
    """Those that training a step again does not read: they act on sampling."""
    return [key for key in values if key.partition(".")[0] not in TRAINED_SECTIONS and key not in TRAINED_KEYS]


def _names(spec: JobSpec, section: str) -> list[str]:
    inner = getattr(spec, section, None)
    return list(type(inner).model_fields) if isinstance(inner, BaseModel) else []


def _put(data: dict[str, JSON], key: str, value: JSON, given: Collection[str]) -> None:
    """What the key stands for goes with it, unless that is ``given``, too: then both act or contradict each other."""
    *sections, name = key.split(".")
    place = data
    for section in sections:
        inner = place.setdefault(section, {})
        if inner is None:
            inner = place[section] = {}
        if not isinstance(inner, dict):
            raise ImpossibleChange(f"{key}: {section} has no settings of its own")
        place = inner
    for other in _STANDS_FOR.get(key, ()):
        if ".".join([*sections, other]) not in given:
            place.pop(other, None)
    place[name] = value


def _as_written(spec: JobSpec, sections: Collection[str]) -> dict[str, JSON]:
    """The job without what follows from the rest of it, in these sections: a stored job spells every default out, and
    another loss would be given the clip of the one before."""
    data: dict[str, JSON] = spec.model_dump(mode="json")
    for section in sorted(sections):
        for name in _names(spec, section):
            without = deepcopy(data)
            inner = without.get(section)
            if not isinstance(inner, dict):
                break
            inner.pop(name, None)
            try:
                follows = getattr(JobSpec.model_validate(without), section) == getattr(spec, section)
            except ValidationError:
                follows = False
            if follows:
                data = without
    return data


@dataclass(frozen=True)
class Without:
    """What is left out of a step."""

    groups: frozenset[int] = frozenset()
    episodes: frozenset[tuple[int, int]] = frozenset()
    """Group and member."""
    parts: frozenset[str] = frozenset()
    """Parts of the reward, by name: what they contributed is subtracted."""
    said: tuple[str, ...] = field(default=(), compare=False)

    def __bool__(self) -> bool:
        return bool(self.groups or self.episodes or self.parts)

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Without:
        """``17`` is a group, ``17/3`` an episode, anything else a part of the reward."""
        groups, episodes, parts = set[int](), set[tuple[int, int]](), set[str]()
        for text in texts:
            group, is_episode, member = text.rpartition("/")
            if text.isdecimal():
                groups.add(int(text))
            elif is_episode and group.rpartition("/")[2].isdecimal() and member.isdecimal():
                episodes.add((int(group.rpartition("/")[2]), int(member)))
            else:
                parts.add(text)
        return cls(frozenset(groups), frozenset(episodes), frozenset(parts), tuple(texts))


def changed_batch(batch: LoggedBatch, without: Without) -> LoggedBatch:
    """The batch of a step without the rest; its numbers of dispatched and dropped groups stay as they were."""
    if not without:
        return batch
    kept = [_changed_group(group, without) for group in batch.groups if group.group not in without.groups]
    return batch if _are_same(kept, batch.groups) else replace(batch, groups=tuple(kept))


def _changed_group(group: Group, without: Without) -> Group:
    kept = [_less(one, without.parts) for one in group if (one.key.group, one.key.member) not in without.episodes]
    return group if _are_same(kept, group.trajectories) else replace(group, trajectories=tuple(kept))


def _are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))


def _less(episode: Trajectory, parts: Collection[str]) -> Trajectory:
    outcome = episode.outcome
    taken = {name: outcome.reward_parts[name] for name in parts if name in outcome.reward_parts}
    if not taken or outcome.reward is None:
        return episode
    rest = {name: value for name, value in outcome.reward_parts.items() if name not in taken}
    return with_reward(episode, outcome.reward - sum(taken.values()), rest)


def with_reward(episode: Trajectory, reward: float | None, parts: Mapping[str, float]) -> Trajectory:
    """The episode as if it had been given this reward."""
    *before, last = episode.segments
    outcome = replace(episode.outcome, reward=reward, reward_parts=dict(parts))
    return Trajectory((*before, replace(last, outcome=outcome)))


def lessened(batch: LoggedBatch, without: Without) -> LoggedBatch:
    """The batch for another job, without what ``without`` names and without groups that become empty. Those count as
    dropped, so that they are not owed and played again. An unchanged batch is returned itself.

    Raises ImpossibleChange.
    """
    kept = tuple(group for group in changed_batch(batch, without).groups if group.trajectories)
    if _are_same(kept, batch.groups):
        return batch
    if not kept:
        raise ImpossibleChange(f"step {batch.step}: nothing of its batch would be left")
    return replace(batch, groups=kept, extra=_extra_of(kept, batch))


def _extra_of(kept: Sequence[Group], batch: LoggedBatch) -> BatchExtra:
    """What is said of the batch where no more than ``kept`` is left of it."""
    extra: BatchExtra = {**batch.extra}
    if gone := sorted({group.group for group in batch.groups} - {group.group for group in kept}):
        dropped = batch.extra.get("dropped", {})
        extra["dropped"] = {**dropped, LEFT_OUT: sorted([*dropped.get(LEFT_OUT, ()), *gone])}
    members = {(one.key.group, one.key.member) for group in kept for one in group}
    if "erased" in extra:
        extra["erased"] = [[group, member] for group, member in extra["erased"] if (group, member) in members]
        if not extra["erased"]:
            del extra["erased"]
    return extra


def missing(without: Without, batches: Sequence[LoggedBatch]) -> Iterator[str]:
    """Parts of ``without`` that are in none of the batches."""
    episodes = [one for batch in batches for one in batch.trajectories]
    groups = {group.group for batch in batches for group in batch.groups}
    members = {(one.key.group, one.key.member) for one in episodes}
    parts = {name for one in episodes for name in one.outcome.reward_parts}
    yield from (f"group {one}" for one in sorted(without.groups - groups))
    yield from (f"episode {group}/{member}" for group, member in sorted(without.episodes - members))
    yield from (f"a reward part {one!r}" for one in sorted(without.parts - parts))
