"""Trajectories that were sampled outside, as segments for the queue.

Rule: a pushed trajectory passes every check that a rollout worker's segments pass, and a few that a worker's own code
makes unnecessary; a refusal has one word, for programs. It reads no queue and appends nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from gspo_core.codec import SegmentRejected, decode, encode
from gspo_core.invariants import InvalidValue
from gspo_core.position import Position
from gspo_core.spec import JobSpec
from gspo_core.types import EpisodeKey, Outcome, Segment, StopReason
from services.state.versions import Version as Published

MAX_ITEMS, MAX_TOKENS, MAX_METRICS = 64, 200_000, 64
_LARGEST_ID = 2**31 - 1
# Rounding in float32 may lift the log-prob of a certain token above 0.
_SLACK = 1e-6
_LEAST = -3.4e38

Reason = Literal[
    "not_open",
    "held",
    "duplicate",
    "gap",
    "length_mismatch",
    "no_action",
    "no_prefix",
    "unknown_token",
    "unknown_version",
    "stale",
    "non_finite",
    "invalid_logprob",
    "too_long",
    "invalid_outcome",
    "job_not_running",
]
Version = Annotated[int, Field(ge=0, le=2**31)]
TokenId = Annotated[int, Field(ge=0, le=_LARGEST_ID)]
Named = Annotated[
    dict[Annotated[str, StringConstraints(max_length=64)], float], Field(max_length=MAX_METRICS, default_factory=dict)
]


class PushedTrajectory(BaseModel):
    """An episode, or a piece of one, of a group that the trainer has dispatched."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    group: Annotated[int, Field(ge=0, le=2**31)]
    """An open one: `GET /v1/jobs/{id}/groups?status=open` says which task it is about."""
    member: Annotated[int, Field(ge=0, le=2**16)]
    """Which of its episodes."""
    num_before: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0
    """How many tokens of this episode were pushed before this piece."""
    token_ids: Annotated[list[TokenId], Field(max_length=MAX_TOKENS)]
    mask: Annotated[list[bool], Field(max_length=MAX_TOKENS)]
    """True where the policy sampled the token; prompts and what tools return are false."""
    logprobs: Annotated[list[float], Field(max_length=MAX_TOKENS)]
    """As recorded when sampled, at the job's `sampling.temperature`; 0 where the mask is false."""
    policy_versions: Version | Annotated[list[Version], Field(max_length=MAX_TOKENS)]
    """The version that sampled each token, or one for all. Those of tokens that were not sampled say nothing."""
    reward: float | None = None
    """The episode's, sent with its last piece. Left out while more is to come."""
    stop_reason: StopReason = StopReason.COMPLETED
    """Why it ended, with the last piece."""
    reward_parts: Named
    metrics: Named

    @property
    def is_last(self) -> bool:
        return self.reward is not None or not self.stop_reason.has_reward

    @property
    def versions(self) -> list[int]:
        given = self.policy_versions
        return [given] * len(self.token_ids) if isinstance(given, int) else given


class TrajectoryRefused(Exception):
    """This trajectory is not taken."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Rules:
    """Limits that all trajectories of one request share."""

    spec: JobSpec
    vocab_size: int
    oldest_step: int
    steps: Mapping[int, int]
    """By published version: the last step that it shares with the newest one."""
    source: str
    """The pushing caller, in the place of an engine's name."""


def shared_steps(table: Sequence[Published]) -> dict[int, int]:
    """By version, as its age is counted: of weights that the job went back from, the step that it went back to."""
    from gspo_core.staleness import shared_step  # few jobs are pushed to

    if not table:
        return {}
    known = {one.version: one for one in table}
    forks = {
        row.epoch: Position(before.epoch if row.parent is None else known[row.parent].epoch, row.step)
        for before, row in pairwise(table)
        if row.epoch != before.epoch
    }
    newest, furthest = Position(table[-1].epoch, table[-1].step), max(one.step for one in table)
    shared = {epoch: shared_step(Position(epoch, furthest), newest, forks) for epoch in {one.epoch for one in table}}
    return {one.version: min(one.step, shared[one.epoch]) for one in table}


def vocab_size_of(model: Path) -> int:
    """Raises OSError, ValueError."""
    config = json.loads((model / "config.json").read_bytes())
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if not isinstance(size, int):
        raise ValueError(f"{model}/config.json has no vocab_size")
    return size


def pieces(
    given: PushedTrajectory, rules: Rules, held: Sequence[Segment], key: EpisodeKey, attempt: int, environment: int
) -> list[Segment]:
    """The segments that continue the held ones. Raises TrajectoryRefused."""
    _check(given, rules, held, environment)
    try:
        made = list(_cut(given, rules, held, key, attempt))
        # The trainer's own gate: segments that it would refuse must not reach the queue.
        return [decode(encode(one)) for one in made]
    except (InvalidValue, SegmentRejected) as error:
        raise TrajectoryRefused("invalid_outcome", str(error)) from None


def _check(given: PushedTrajectory, rules: Rules, held: Sequence[Segment], environment: int) -> None:
    num_held = sum(one.num_tokens for one in held)
    if given.num_before < num_held:
        raise TrajectoryRefused("duplicate", f"{num_held} tokens of this episode are already stored")
    if given.num_before > num_held:
        raise TrajectoryRefused("gap", f"{num_held} tokens of this episode are stored, not {given.num_before}")
    lengths = {len(given.token_ids), len(given.mask), len(given.logprobs), len(given.versions)}
    if len(lengths) > 1:
        raise TrajectoryRefused(
            "length_mismatch", "token_ids, mask, logprobs and policy_versions must have one entry per token"
        )
    if not given.token_ids and not given.is_last:
        raise TrajectoryRefused("no_action", "a piece without tokens must be the last one")
    most = rules.spec.episode_limits(environment).max_context_tokens
    if num_held + len(given.token_ids) > most:
        raise TrajectoryRefused("too_long", f"an episode may have at most {most} tokens here")
    if given.token_ids and max(given.token_ids) >= rules.vocab_size:
        raise TrajectoryRefused(
            "unknown_token", f"token ids of this model are below {rules.vocab_size}, not {max(given.token_ids)}"
        )
    if not num_held and given.mask and given.mask[0]:
        raise TrajectoryRefused(
            "no_prefix",
            "the first token of an episode follows nothing, so nobody can have sampled it: push the prompt too",
        )
    if given.is_last and not any(given.mask) and not any(one.num_actions for one in held):
        raise TrajectoryRefused("no_action", "the policy has sampled no token of this episode")
    _check_numbers(given)
    for version in {version for version, acts in zip(given.versions, given.mask, strict=True) if acts}:
        if version not in rules.steps:
            raise TrajectoryRefused("unknown_version", f"version {version} was never published")
        if rules.steps[version] < rules.oldest_step:
            raise TrajectoryRefused("stale", f"version {version} is older than rollout.staleness_cap allows")


def _check_numbers(given: PushedTrajectory) -> None:
    from gspo_core.environment_contract import BeyondBounds, check_all, check_size

    rewards = [] if given.reward is None else [given.reward]
    if not all(map(math.isfinite, (*given.logprobs, *rewards, *given.metrics.values(), *given.reward_parts.values()))):
        raise TrajectoryRefused("non_finite", "log-probs, reward and metrics must be finite")
    try:
        check_size("the reward", given.reward or 0.0)
        for numbers in (given.metrics, given.reward_parts):
            check_all(numbers)
    except BeyondBounds as error:
        raise TrajectoryRefused("invalid_outcome", str(error)) from None
    for value, acts in zip(given.logprobs, given.mask, strict=True):
        if value < _LEAST:
            raise TrajectoryRefused("non_finite", f"{value} does not fit in a 32-bit float")
        if value > _SLACK or (value and not acts):
            raise TrajectoryRefused("invalid_logprob", "log-probs must be at most 0, and 0 where the mask is false")
    if given.reward is not None and not given.stop_reason.has_reward:
        raise TrajectoryRefused("invalid_outcome", f"an episode that ended with {given.stop_reason} takes no reward")


def _cut(
    given: PushedTrajectory, rules: Rules, held: Sequence[Segment], key: EpisodeKey, attempt: int
) -> Sequence[Segment]:
    """A segment has one version and one turn: cut where sampled tokens change either."""
    starts = [0, *_borders(given), len(given.token_ids)]
    turn = held[-1].turn if held else 0
    has_acted = bool(held) and any(one.num_actions for one in held if one.turn == turn)
    made: list[Segment] = []
    for start, end in pairwise(starts):
        if start == end and len(given.token_ids):
            continue
        mask = given.mask[start:end]
        acted = [version for version, acts in zip(given.versions[start:end], mask, strict=True) if acts]
        if has_acted and mask and not mask[0]:
            turn, has_acted = turn + 1, False
        has_acted = has_acted or bool(acted)
        version = acted[0] if acted else (made[-1].version if made else held[-1].version if held else min(rules.steps))
        is_end = given.is_last and end == len(given.token_ids)
        made.append(
            Segment(
                key=key,
                attempt=attempt,
                branch=0,
                index=len(held) + len(made),
                turn=turn,
                version=version,
                temperature=rules.spec.sampling.temperature,
                engine_id=rules.source,
                outcome=_outcome(given) if is_end else None,
                token_ids=np.array(given.token_ids[start:end], np.int32),
                action_mask=np.array(mask, np.bool_),
                behavior_logprobs=np.minimum(np.array(given.logprobs[start:end], np.float32), 0.0),
            )
        )
    return made


def _borders(given: PushedTrajectory) -> list[int]:
    """The starts of further turns, and the places where the version changes within a turn."""
    borders: list[int] = []
    version: int | None = None
    for place, (acts, by) in enumerate(zip(given.mask, given.versions, strict=True)):
        if place and not acts and given.mask[place - 1]:
            borders.append(place)
            version = None
        elif acts:
            if version is not None and by != version:
                borders.append(place)
            version = by
    return borders


def _outcome(given: PushedTrajectory) -> Outcome:
    return Outcome(given.stop_reason, given.reward, given.reward_parts, given.metrics)
