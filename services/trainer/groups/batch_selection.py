"""Takes groups from the queue and settles each as trained or dropped.

Rule: before training, a batch passes the parity gate, is sealed, goes into the batch log, and is committed, in that
order. A batch taken from the queue is therefore always recoverable, a logged batch is trained without further checks,
and no episode that was erased in the queue is logged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

import numpy as np

from gspo_core.learner import computing
from gspo_core.log.batches import BatchExtra, LoggedBatch
from gspo_core.types import Group, Split, StopReason
from services.state.queue_records import DropReason, GroupEnd
from services.trainer.fleet.parity import LabelledWeights, ParityGate, ScoringLearner
from services.trainer.groups.admission import Admission
from services.trainer.groups.run_context import RunContext
from services.trainer.groups.selection import EmptyGroup, Selection, no_tokens, nothing_to_train, refusal
from services.trainer.groups.selection_bias import SelectionBias
from services.trainer.groups.step_progress import StepProgress
from services.trainer.groups.tasks import FIRST_EVAL_GROUP

# Fail the job after dropping this many batches' worth of groups in a row: later groups would fare no better.
MAX_BATCHES_DROPPED_IN_A_ROW = 8
# What says nothing of later groups. While no step is taken no token grows older, so groups that were too old are no
# lasting state: they are told, and never end a job.
OF_AGE: Collection[DropReason] = ("dropped_stale", "dropped_late")
PASSING: Collection[DropReason] = ("dropped_erased", *OF_AGE)
# Fail sooner, after one batch but at least so many groups, if none of a job's episodes ever sampled a token: whether a
# prompt fits does not depend on the policy.
MIN_EMPTY_GROUPS = 8


class BatchSelection:
    """Selects the batches of one job. ``stops_waiting`` returns True when something else must come before the next
    batch, and raises errors from background work."""

    def __init__(
        self, context: RunContext, admission: Admission, gate: ParityGate, stops_waiting: Callable[[], bool]
    ) -> None:
        self._context, self._admission, self._gate = context, admission, gate
        self._stops_waiting = stops_waiting
        self._bus, self._intake = context.services.bus, context.services.intake
        self._lineage, self._tuning = context.lineage, context.tuning
        self._progress = StepProgress(context)
        self._selection_bias = SelectionBias(self._intake, context.job)
        self._dropped_in_a_row: Counter[DropReason] = Counter()
        self._num_too_old = 0
        """Groups dropped for their age since the last batch."""
        self._is_held_back = False
        """Whether their replacements wait for engines."""
        self._empty: EmptyGroup | None = None
        """Why the last group without a sampled token was dropped."""
        self._unrewarded: Counter[StopReason] = Counter()
        """How members ended, without a reward, of the groups that were dropped in a row for them."""
        self._dropped_since: dict[DropReason, list[int]] = {}
        """Groups dropped since the last batch, by reason."""
        self._num_dropped: dict[str, float] = {}
        """The counts by reason that went into the last logged batch, and what it says of late rewards."""

    def take_metrics(self) -> dict[str, float]:
        """Return selection-bias metrics since the last call, with the drop counts of the last batch."""
        return self._selection_bias.take_metrics() | self._num_dropped

    async def batch(self, learner: ScoringLearner, held: LabelledWeights) -> LoggedBatch | None:
        """Return the next batch to train, logged and committed, or None if something else comes first."""
        while (chosen := await self._choose(learner, held)) is not None:
            members = {group.group: [one.key.member for one in group] for group in chosen}
            if await self._bus.seal(self._context.job, self._context.token, members):
                break  # else an episode was erased since: its group is chosen again without it, or dropped
        if chosen is None:
            return None
        numbers = [group.group for group in chosen]
        step = self._lineage.step + 1
        extra: BatchExtra = {
            "version": held.version,
            "num_dispatched": self._lineage.num_dispatched,
            "dropped": {str(reason): groups for reason, groups in self._dropped_since.items()},
            "staleness": self._context.ages.table(chosen),
            "settings": self._tuning.logged(),
            "computed": computing(self._tuning.spec),
            "dealing": "groups",
        }
        if late := self._trained_at_any_age(numbers):
            extra["late"], extra["late_cap"] = late, self._tuning.spec.rollout.staleness_cap
        num_late = len(self._intake.waited.intersection(numbers))
        epoch, log = self._context.claim.epoch, self._context.services.batch_log
        await self._context.disk.write(f"the batch of step {step}", log.write, epoch, step, chosen, extra)
        self._num_dropped = {
            f"dropped/{name.removeprefix('dropped_')}": len(of) for name, of in self._dropped_since.items()
        }
        self._num_dropped |= self._context.late.metrics(num_late)
        self._dropped_since = {}
        await self._bus.commit(self._context.job, self._context.token, step, numbers)
        self._forget(numbers, are_trained=True)
        self._dropped_in_a_row.clear()
        self._unrewarded.clear()
        self._num_too_old = 0
        return LoggedBatch(epoch, step, tuple(chosen), extra)

    async def _choose(self, learner: ScoringLearner, held: LabelledWeights) -> list[Group] | None:
        spec, intake, lineage, services = self._tuning.spec, self._intake, self._lineage, self._context.services
        selection = Selection(spec, intake, services.status, services.clock, self._admission.dispatched_steps)
        self._progress.begin()
        while True:
            if self._stops_waiting():
                return None
            num_segments = intake.num_segments
            ready = await self._trainable()
            owed = set(lineage.owed())
            waiting = self._context.late.waiting(owed) - ready.keys()
            choice = selection.choose(sorted(owed - waiting), ready, lineage.step, self._context.ages.of)
            for group in choice.drop:
                await self.drop(group, "dropped_stale")
            if choice.train:
                chosen = [ready[group] for group in sorted(choice.train)]
                await self._gate.check(learner, chosen, held)
                if not any(self._gate.refusal(group) for group in chosen):
                    break
                continue  # the check just found a bad engine
            if choice.drop or self._is_held_back:
                await self._replace_too_old()
            closing = selection.to_close(list(lineage.owed()), ready)
            if sum([await self._bus.cancel(self._context.job, self._context.token, group) for group in closing]):
                continue
            await self._make_up_for_waiting(owed)
            await selection.explain(choice, lineage.step)
            await self._progress.look(owed, ready.keys())
            await intake.progress(num_segments)
        await selection.is_over()
        await self._progress.end()
        if self._is_held_back:
            self._is_held_back = False
            await services.status.goes_on()
        return chosen

    async def _replace_too_old(self) -> None:
        """Replacements that an engine with old weights samples would be too old in their turn: they wait for one that
        has followed, in words."""
        lag = self._context.services.engines.lag()
        if lag and not self._is_held_back:
            step = self._lineage.step + 1
            await self._context.services.status.waits(
                f"step {step} waits for engines to follow: what they sample is older than staleness_cap "
                f"(groups dropped in a row: {self._num_too_old}); {lag}"
            )
        elif self._is_held_back and not lag:
            await self._context.services.status.goes_on()
        self._is_held_back = bool(lag)
        if not lag:
            await self._admission.admit()

    async def _trainable(self) -> dict[int, Group]:
        """Return the complete groups that can be trained; drop the others and start replacements."""
        owed = set(self._lineage.owed())
        complete = await self._intake.complete(Split.TRAIN, among=owed)
        refused: list[tuple[int, DropReason]] = [
            (number, "dropped_unreadable") for number in await self._intake.unreadable(among=owed)
        ]
        while self._intake.refusals:
            await self._context.alert("segment_refused", ": ".join(self._intake.refusals.popitem()))
        refused += [
            (group.group, reason)
            for group in complete
            if (reason := self._refusal(group) or self._too_late(group) or self._gate.refusal(group))
        ]
        for group in complete:
            if (group.group, "dropped_no_tokens") in refused:
                await self._note_empty(group)
            if (group.group, "dropped_partial") in refused:
                self._unrewarded.update(one.outcome.stop_reason for one in group if one.reward is None)
        for number, reason in refused:
            await self.drop(number, reason)
        if refused:
            await self._admission.admit()
        gone = {number for number, _ in refused}
        return {group.group: group for group in complete if group.group not in gone}

    async def _make_up_for_waiting(self, owed: set[int]) -> None:
        """Others are started as soon as groups wait for nothing but rewards, not with the next step only."""
        late = self._context.late
        await late.look()
        if late.num_excused(owed) > self._admission.num_excused:
            await self._admission.admit()

    def _refusal(self, group: Group) -> DropReason | None:
        reason = refusal(group, self._tuning.spec)
        return "dropped_erased" if reason and group.group in self._intake.erased else reason

    def _is_old(self, group: int) -> bool:
        """Whether it has tokens that are too old to be trained."""
        versions = sorted(self._intake.versions(group))
        ages = self._context.ages.of(np.array(versions, dtype=np.int32))
        return bool(versions) and int(ages.max()) > self._tuning.spec.rollout.staleness_cap

    def _too_late(self, group: Group) -> DropReason | None:
        drops = self._tuning.spec.rewards.on_late_reward == "drop" and group.group in self._intake.waited
        return "dropped_late" if drops and self._is_old(group.group) else None

    def _trained_at_any_age(self, groups: list[int]) -> list[int]:
        if self._tuning.spec.rewards.on_late_reward != "train":
            return []
        return [group for group in groups if group in self._intake.waited and self._is_old(group)]

    async def drop(self, group: int, reason: DropReason) -> None:
        await self._bus.commit(self._context.job, self._context.token, self._lineage.step + 1, [group], reason=reason)
        # A Redis that lost writes contradicts all that was under way, and nothing that is started after it.
        is_passing = reason in PASSING or (reason == "dropped_unreadable" and self._intake.is_broken(group))
        self._forget([group], are_trained=False)
        self._lineage.num_dropped += 1
        if not is_passing:
            self._dropped_in_a_row[reason] += 1
        elif reason in OF_AGE:
            await self._count_too_old()
        self._dropped_since.setdefault(reason, []).append(group)
        if self._nothing_can_be_trained():
            raise nothing_to_train(self._dropped_in_a_row, self._empty, self._unrewarded)

    async def _count_too_old(self) -> None:
        self._num_too_old += 1
        if self._num_too_old == MAX_BATCHES_DROPPED_IN_A_ROW * self._tuning.spec.groups_per_step:
            told = f"{self._num_too_old} groups in a row were older than staleness_cap and were dropped"
            await self._context.alert("stale_backlog", f"{told}: lower max_staleness or raise staleness_cap")

    def _nothing_can_be_trained(self) -> bool:
        dropped, batch = self._dropped_in_a_row, self._tuning.spec.groups_per_step
        if dropped.total() >= MAX_BATCHES_DROPPED_IN_A_ROW * batch:
            return True
        is_all_empty = dropped["dropped_no_tokens"] == dropped.total() == self._lineage.num_dropped
        return is_all_empty and not self._lineage.step and dropped.total() >= max(batch, MIN_EMPTY_GROUPS)

    async def _note_empty(self, group: Group) -> None:
        """Tell the job's owner, once, that nothing is sampled for some tasks."""
        task = self._admission.schedule.task(group.group)
        reason = no_tokens(group, self._tuning.spec.environments[task.environment].ref)
        if self._empty is None:
            await self._context.alert(reason.code, f"{reason.message}: such groups are not trained")
        self._empty = reason

    def _forget(self, groups: list[int], *, are_trained: bool) -> None:
        for group in groups:
            self._selection_bias.settle(group, self._tuning.spec.rollout.group_size, is_trained=are_trained)
        self._intake.forget(groups)
        self._lineage.settle(groups)
        self._admission.forget(groups)

    async def commit_again(self) -> None:
        """Clear leftovers of the previous trainer from the queue: groups that it logged but may have died before
        committing, and its abandoned evaluation rounds."""
        job = self._context.job
        found = await self._bus.open_groups(job)
        orphans = [group for group in found if group >= FIRST_EVAL_GROUP]
        settled = [group for group in found if self._lineage.is_settled(group)]
        leftovers: tuple[tuple[list[int], GroupEnd], ...] = ((settled, "trained"), (orphans, "dropped_trainer_lost"))
        for left, reason in leftovers:
            if left:
                await self._bus.commit(job, self._context.token, self._lineage.step, left, reason=reason)
                self._intake.forget(left)
