"""Views of groups and episodes, whether they are in the queue or in a batch log.

One rule: both look alike, so that a reader need not know where an episode is; fields that only one of the two places
knows are null in the other. It reads nothing.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from pydantic import ConfigDict, JsonValue

from gspo_core.log.transcript import ShownTurn, TokenColumns
from gspo_core.spec import JobSpec
from gspo_core.types import EpisodeKey, Evidence, Group, Segment, Trajectory
from services.api.views.store_views import View
from services.files.batch_log import LoggedBatch
from services.state.queue import EpisodeView, GroupView, Stage


class EpisodeSummary(View):
    """One episode, without its turns."""

    object: Literal["episode"] = "episode"
    id: str
    """`JOB/GROUP/MEMBER`, the same in logs and in Redis; `/v1/episodes/` + id shows it."""
    member: int
    status: str
    """`queued`, `running`, `waiting` (for its reward), `done` (waits for its group or for the trainer), `given_up`,
    `trained`."""
    attempt: int
    """Counts from 0; a new attempt starts the episode again."""
    worker: str | None
    """The rollout worker that plays it now."""
    num_failures: int | None
    stop_reason: str | None
    reward: float | None
    reward_parts: dict[str, float]
    metrics: dict[str, float]
    advantage: float | None
    """Its reward relative to its group, as the trainer computed it."""
    num_turns: int | None
    num_segments: int
    num_tokens: int | None
    num_actions: int | None
    """Tokens that the policy sampled."""
    versions: list[int]
    """The versions that sampled its tokens."""
    users: list[str]
    """In whose names its turns were asked for, as far as the requests of its agent said."""
    is_erased: bool
    """What was read and said in it is gone; its lengths, versions and rewards are not."""
    timings: dict[str, float]
    """Seconds until the newest segment, over all workers that had it: `engine_s`, `env_s`, `queue_s` (no engine could
    take a request, or the environment had no place), `store_s`."""


class GroupSummary(View):
    """The episodes of one task."""

    object: Literal["group"] = "group"
    id: str
    """`JOB/GROUP`."""
    job_id: str
    group: int
    status: Literal["open", "ready", "trained"]
    """`ready` groups wait for the trainer."""
    split: str
    task_index: int
    environment: int | None
    """Index in the list of the job's environments, where known."""
    size: int
    """How many episodes were dispatched."""
    step: int | None
    """The step that trained it."""
    epoch: int | None
    reward_mean: float | None
    reward_std: float | None
    episodes: list[EpisodeSummary]


class EpisodeDetail(EpisodeSummary):
    """One episode with its turns."""

    # The parts of a turn are no models: only so are the texts under their fields found.
    model_config = ConfigDict(use_attribute_docstrings=True)

    job_id: str
    group: int
    split: str
    task_index: int
    group_size: int
    step: int | None
    epoch: int | None
    note: str | None
    """Why text is missing, where it is."""
    turns: list[ShownTurn]
    """Each turn with the messages that led to it (`messages`), the policy's words (`text`, `reasoning`, `calls`), the
    place of its tokens (`first_token`, `end_token`), and the seconds that it took (`timings`: `engine_s` for sampling
    it, `env_s` for the environment's answer before it, `queue_s` for waiting; null where none were recorded). `parent`
    is the turn that it continues, `reason` why it began a branch, `shared_tokens` how many of its first tokens an
    earlier branch has too (`messages` are the others), `tokens_read_again` how many more it read before it sampled,
    `is_trained` false where the turn was never delivered, or another sample was continued or paid. `request` tells how
    an agent asked for it: `dialect`, `model`, `num_messages`, `num_new_messages`, `num_repeats`."""
    closing: dict[str, float] | None
    """The seconds between its last token and its outcome, like `timings` of a turn."""
    evidence: dict[str, JsonValue]
    """What its reward was made from, by name (`task`, `result`, `judge`, `messages`, `state.NAME`), as far as it was
    kept."""
    evidence_left_out: dict[str, str]
    """What was not kept of it, with the reason."""
    tokens: TokenColumns | None
    """With `include=tokens`: columns `id`, `text`, `sampled`, `logprob`, `ratio`, `version`, `turn`, `branch`.
    `ratio`: how much more probable the token was in training than in sampling; null where unknown."""


def evidence_view(evidence: Evidence) -> dict[str, JsonValue]:
    """Values of types that JSON lacks are shown as they are stored."""
    return {name: json.loads(text) for name, text in evidence.told.items()}


def trained_groups(job: str, batch: LoggedBatch, spec: JobSpec | None) -> list[GroupSummary]:
    """Every group of a batch, with the advantages that the trainer gave its members."""
    from gspo_core.log.advantages import logged_advantages  # few processes show what was trained

    advantages = {} if spec is None else logged_advantages(batch, spec)
    return [_trained_group(job, group, batch, advantages) for group in batch.groups]


def _trained_group(
    job: str, group: Group, batch: LoggedBatch, advantages: Mapping[EpisodeKey, float | None]
) -> GroupSummary:
    rewards = [reward for reward in group.rewards if reward is not None]
    position, erased = batch.position, batch.erased
    return GroupSummary(
        id=f"{job}/{group.group}",
        job_id=job,
        group=group.group,
        status="trained",
        split=str(group.split),
        task_index=group.task_index,
        environment=None,
        size=group.size,
        step=position.step,
        epoch=position.epoch,
        reward_mean=statistics.fmean(rewards) if rewards else None,
        reward_std=statistics.pstdev(rewards) if rewards else None,
        episodes=[
            trained_episode(one, advantages.get(one.key), is_erased=(group.group, one.key.member) in erased)
            for one in group
        ],
    )


def trained_episode(trajectory: Trajectory, advantage: float | None, *, is_erased: bool) -> EpisodeSummary:
    outcome = trajectory.outcome
    return EpisodeSummary(
        id=str(trajectory.key),
        member=trajectory.key.member,
        status="trained",
        attempt=trajectory.attempt,
        worker=None,
        num_failures=None,
        stop_reason=str(outcome.stop_reason),
        reward=outcome.reward,
        reward_parts=dict(outcome.reward_parts),
        metrics=dict(outcome.metrics),
        advantage=advantage,
        num_turns=trajectory.num_turns,
        num_segments=len(trajectory.segments),
        num_tokens=sum(segment.num_tokens for segment in trajectory.segments),
        num_actions=trajectory.num_actions,
        versions=sorted(trajectory.versions),
        users=_users(trajectory.segments),
        is_erased=is_erased,
        timings=_timings_of_metrics(outcome.metrics),
    )


def open_group(job: str, group: GroupView) -> GroupSummary:
    return GroupSummary(
        id=f"{job}/{group.group}",
        job_id=job,
        group=group.group,
        status="ready" if group.is_ready else "open",
        split=str(group.split),
        task_index=group.task_index,
        environment=group.environment,
        size=len(group.episodes),
        step=None,
        epoch=None,
        reward_mean=None,
        reward_std=None,
        episodes=[open_episode(one) for one in group.episodes],
    )


_STATUS = {
    Stage.QUEUED: "queued",
    Stage.HELD: "running",
    Stage.WAITING: "waiting",
    Stage.DONE: "done",
    Stage.DEAD: "given_up",
}


def open_episode(view: EpisodeView, segments: Sequence[Segment] | None = None) -> EpisodeSummary:
    """An episode in the queue; with its segments, also its progress so far."""
    outcome = segments[-1].outcome if segments else None
    known = segments or ()
    return EpisodeSummary(
        id=str(view.key),
        member=view.key.member,
        status=_STATUS[view.stage],
        attempt=view.attempt,
        worker=view.worker,
        num_failures=view.num_failures,
        stop_reason=None if outcome is None else str(outcome.stop_reason),
        reward=None if outcome is None else outcome.reward,
        reward_parts={} if outcome is None else dict(outcome.reward_parts),
        metrics={} if outcome is None else dict(outcome.metrics),
        advantage=None,
        num_turns=None if segments is None else 1 + max((one.turn for one in known if one.num_tokens), default=-1),
        num_segments=view.num_segments,
        num_tokens=None if segments is None else sum(one.num_tokens for one in known),
        num_actions=None if segments is None else sum(one.num_actions for one in known),
        versions=sorted({one.version for one in known if one.num_actions}),
        users=_users(known),
        is_erased=False,
        timings=_timings_of_note(view.note) if outcome is None else _timings_of_metrics(outcome.metrics),
    )


def _users(segments: Iterable[Segment]) -> list[str]:
    return sorted({one.user for one in segments if one.user})


def _timings_of_note(note: str) -> dict[str, float]:
    """The timings that its worker noted beside the newest segment."""
    try:
        told = json.loads(note) if note else {}
    except ValueError:
        told = {}
    items = told.items() if isinstance(told, dict) else ()
    return {name: float(value) for name, value in items if name.endswith("_s") and isinstance(value, int | float)}


def _timings_of_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    named = {"engine_s": "model_s", "env_s": "env_s", "queue_s": "queue_s"}
    return {shown: metrics[name] for shown, name in named.items() if name in metrics}
