"""A job's past as rows for tables: steps, episodes, tokens and metrics, as the log holds them.

The rule: a column is what was recorded or follows from the log alone; nothing is estimated, and what a log does not say
is None. It knows no format of tables, and one step is in memory at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gspo_core.log import layout
from gspo_core.log.advantages import logged_advantages
from gspo_core.log.batches import LoggedBatch
from gspo_core.log.records import decode_metrics
from gspo_core.log.tokens import BranchTokens, tokens_of
from gspo_core.log.trained import MemberLogprobs, decode_trained
from gspo_core.replay.past import Past


@dataclass(frozen=True, slots=True)
class StepRow:
    step: int
    epoch: int
    version: int | None
    """That the step began from."""
    groups: int
    episodes: int
    sampled_tokens: int
    dropped_groups: int
    """Since the step before."""
    max_staleness: int | None
    settings: str
    """Live settings, as JSON."""


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    step: int
    epoch: int
    group: int
    member: int
    task_index: int
    attempt: int
    stop_reason: str
    reward: float | None
    advantage: float | None
    """None: it was not in the batch."""
    turns: int
    branches: int
    tokens: int
    """In all branches."""
    sampled_tokens: int
    first_version: int | None
    last_version: int | None
    max_staleness: int | None
    reward_parts: dict[str, float]
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class MetricRow:
    step: int
    epoch: int | None
    name: str
    value: float


@dataclass(frozen=True, eq=False)
class BranchColumns(BranchTokens):
    """The tokens of one branch, and where it stands."""

    step: int
    group: int
    member: int
    branch: int


def step_row(batch: LoggedBatch) -> StepRow:
    ages = batch.extra.get("staleness", {})
    return StepRow(
        step=batch.step,
        epoch=batch.epoch,
        version=batch.extra.get("version"),
        groups=len(batch.groups),
        episodes=len(batch.trajectories),
        sampled_tokens=sum(one.num_actions for one in batch.trajectories),
        dropped_groups=sum(len(groups) for groups in batch.extra.get("dropped", {}).values()),
        max_staleness=max(ages.values(), default=None),
        settings=json.dumps(batch.extra.get("settings", {}).get("values", {}), sort_keys=True),
    )


def episode_rows(past: Past, batch: LoggedBatch) -> Iterator[EpisodeRow]:
    advantages = logged_advantages(batch, past.spec)
    ages = batch.extra.get("staleness", {})
    for group in batch.groups:
        for one in group:
            yield EpisodeRow(
                step=batch.step,
                epoch=batch.epoch,
                group=group.group,
                member=one.key.member,
                task_index=group.task_index,
                attempt=one.attempt,
                stop_reason=str(one.outcome.stop_reason),
                reward=one.reward,
                advantage=advantages[one.key],
                turns=one.num_turns,
                branches=len(one.branches),
                tokens=sum(branch.num_tokens for branch in one.branches),
                sampled_tokens=one.num_actions,
                first_version=min(one.versions, default=None),
                last_version=max(one.versions, default=None),
                max_staleness=max((ages[name] for name in map(str, one.versions) if name in ages), default=None),
                reward_parts=dict(one.outcome.reward_parts),
                metrics=dict(one.outcome.metrics),
            )


def token_columns(past: Past, batch: LoggedBatch) -> Iterator[BranchColumns]:
    ages: Mapping[str, int] = batch.extra.get("staleness", {})
    trained = trained_logprobs(past, batch)
    for episode in batch.trajectories:
        place = (episode.key.group, episode.key.member)
        for number, one in enumerate(tokens_of(episode, ages, trained.get(place))):
            yield BranchColumns(**vars(one), step=batch.step, group=place[0], member=place[1], branch=number)


def trained_logprobs(past: Past, batch: LoggedBatch) -> MemberLogprobs:
    """Empty where they are no longer kept."""
    try:
        return decode_trained((past.folder / layout.TRAINED / layout.step_name(batch.position)).read_bytes())
    except FileNotFoundError:
        return {}


def metric_rows(past: Past) -> Iterator[MetricRow]:
    """Every number of every line, in the order written: a step that was taken again has several."""
    path = past.folder / layout.METRICS
    if not path.is_file():
        return
    with path.open("rb") as lines:
        for record in decode_metrics(lines):
            step, epoch = record.pop("step"), record.pop("epoch", None)
            for name, value in record.items():
                if isinstance(step, int) and isinstance(value, int | float):
                    yield MetricRow(step, epoch if isinstance(epoch, int) else None, name, float(value))
