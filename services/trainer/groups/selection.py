"""Selects the groups of the next batch: gathers the input of ``choose_groups`` and explains why a batch waits.

Rule: only pure functions decide about groups. This module collects their input; the trainer carries out their answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from gspo_core.advantage import judge_group, judged
from gspo_core.log.sequences import StalenessOf
from gspo_core.spec import JobSpec
from gspo_core.staleness import Choice, OpenGroup, choose_groups
from gspo_core.types import Group, StopReason
from services.state.jobs import FailureCode
from services.state.queue_records import DropReason
from services.trainer.groups.intake import Intake
from services.trainer.telling.failure import JobFailure
from services.trainer.telling.status import JobStatusBoard


def refusal(group: Group, spec: JobSpec) -> DropReason | None:
    """Return why a complete group can never be trained, or None if it can."""
    rollout, rewards = spec.rollout, [reward for reward in group.rewards if reward is not None]
    if not rewards or (rollout.on_partial_group != "all" and len(rewards) < rollout.min_group_size):
        return "dropped_partial"
    if not any(one.num_trained for one in group if one.reward is not None):
        return "dropped_no_tokens"
    if judged(group, spec.objective.advantage).dropped:
        return "dropped_zero_variance"
    return None


@dataclass(frozen=True, slots=True)
class EmptyGroup:
    """Why no token was sampled in a group."""

    code: Literal["prompt_too_long", "no_tokens_sampled"]
    message: str


def no_tokens(group: Group, environment: str) -> EmptyGroup:
    """Return why nothing was sampled in a group that was dropped for that; ``environment`` names where it played."""
    ended = [one.outcome for one in group if one.reward is not None]
    for metrics in (one.metrics for one in ended if "prompt_tokens" in one.metrics):
        prompt, bound, models = (metrics[name] for name in ("prompt_tokens", "context_tokens", "model_context_tokens"))
        of_what = "the model's context" if bound == models else "limits.max_context_tokens"
        task = f"the prompt of task {group.task_index} of {environment}"
        return EmptyGroup("prompt_too_long", f"{task} has {prompt:,.0f} tokens; {of_what} is {bound:,.0f}")
    stops = Counter(str(one.stop_reason) for one in ended)
    counts = ", ".join(f"{count} by {reason}" for reason, count in stops.most_common())
    message = f"the episodes of task {group.task_index} of {environment} ended before a token was sampled: {counts}"
    return EmptyGroup("no_tokens_sampled", message)


def nothing_to_train(
    dropped: Counter[DropReason], empty: EmptyGroup | None = None, unrewarded: Counter[StopReason] | None = None
) -> JobFailure:
    """Build the job failure that best explains a long run of dropped groups; ``empty`` is the last ``no_tokens``, and
    ``unrewarded`` how members of theirs ended that have no reward."""
    code: Mapping[DropReason, FailureCode] = {
        "dropped_partial": "env_unhealthy",
        "dropped_zero_variance": "all_rewards_equal",
        "dropped_mismatch": "engine_mismatch",
        "dropped_unreadable": "incompatible_release",
    }
    advice: Mapping[DropReason, str] = {
        "dropped_partial": _why_partial(unrewarded or Counter()),
        "dropped_zero_variance": "all episodes of each group had the same reward: the tasks are too easy or too hard",
        "dropped_mismatch": "an engine sampled them with weights other than those it reported",
        "dropped_unreadable": "this release cannot read what rollout workers sent: see the segment_refused alert",
    }
    ((reason, count),) = dropped.most_common(1)
    if reason == "dropped_no_tokens" and empty is not None:
        return JobFailure(empty.code, f"{empty.message}; {count} groups in a row left nothing to train")
    return JobFailure(code[reason], f"{dropped.total()} groups in a row could not be trained; {advice[reason]}")


def _why_partial(unrewarded: Counter[StopReason]) -> str:
    counts = ", ".join(f"{count} by {reason}" for reason, count in unrewarded.most_common())
    ended = f"their episodes ended without a reward ({counts})" if counts else "too few of their episodes have a reward"
    if unrewarded and unrewarded.most_common(1)[0][0] is StopReason.NO_REWARD:
        return f"{ended}: nobody posted one within rewards.deadline_s"
    return f"{ended}, for reasons outside the policy: see the env.health events, and the logs of workers and gateways"


def groups_to_close(num_rewarded: Mapping[int, int], *, min_group_size: int, num_missing: int) -> list[int]:
    """Return the unfinished groups to train without their stragglers: the oldest ones with enough members.

    ``num_rewarded`` maps each unfinished group to its number of members that ended with a reward. Returns at most
    ``num_missing`` groups, so that all others can finish.
    """
    viable = sorted(group for group, count in num_rewarded.items() if count >= min_group_size)
    return viable[: max(0, num_missing)]


@dataclass
class Selection:
    """Chooses among the open groups of a job. Use a new one for each batch: the wait limit applies per batch."""

    spec: JobSpec
    intake: Intake
    status: JobStatusBoard
    clock: Callable[[], float]
    dispatched_steps: Mapping[int, int]
    """The published step at the time each group was dispatched."""
    _waiting_since: float | None = field(default=None, init=False)

    def choose(self, owed: Collection[int], ready: Collection[int], step: int, staleness_of: StalenessOf) -> Choice:
        rollout = self.spec.rollout
        return choose_groups(
            [self._view(group, group in ready, step, staleness_of) for group in owed],
            step=step,
            groups_per_step=self.spec.groups_per_step,
            staleness_cap=rollout.staleness_cap,
            on_stale=rollout.on_stale,
            may_wait=self._waiting_since is None or self.clock() - self._waiting_since < rollout.stale_wait_s,
        )

    def _view(self, group: int, is_ready: bool, step: int, staleness_of: StalenessOf) -> OpenGroup:
        versions = self.intake.versions(group)
        ages = staleness_of(np.array(sorted(versions), dtype=np.int32))
        oldest = step - int(ages.max()) if versions else None
        has_waited = group in self.intake.waited
        return OpenGroup(group, is_ready, oldest, self.dispatched_steps.get(group, step), may_be_old=has_waited)

    def to_close(self, owed: Collection[int], ready: Collection[int]) -> list[int]:
        """Return groups whose stragglers to cancel: the batch lacks groups and the job does not wait for stragglers."""
        rollout = self.spec.rollout
        if rollout.on_stragglers == "wait":
            return []
        rewards = {group: self.intake.rewards(group, rollout.group_size) for group in owed if group not in ready}
        # Closing a group without variance would drop it; its stragglers may still add some.
        advantage = self.spec.objective.advantage
        counts = {group: len(of) for group, of in rewards.items() if not judge_group(of, advantage).dropped}
        num_missing = self.spec.groups_per_step - len(ready)
        return groups_to_close(counts, min_group_size=rollout.min_group_size, num_missing=num_missing)

    async def explain(self, choice: Choice, step: int) -> None:
        """Report, once, which episodes an otherwise complete batch waits for, if any."""
        if not choice.wait_for or self._waiting_since is not None:
            return
        self._waiting_since = self.clock()
        episodes = [str(key) for group in choice.wait_for for key in self.intake.unfinished(group)]
        names = ", ".join(episodes[:8]) or f"groups {list(choice.wait_for)}, none of whose episodes has arrived"
        limit_s = self.spec.rollout.stale_wait_s
        await self.status.waits(
            f"step {step + 1} waits up to {limit_s:g} s for episodes that would exceed staleness_cap: {names}"
        )

    async def is_over(self) -> None:
        """Clear the reported wait after a batch was taken."""
        if self._waiting_since is not None:
            await self.status.goes_on()
