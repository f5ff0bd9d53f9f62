"""Takes a run in hand that loses what it had learned, as far as its job says: slower, or back to its best evaluation.

Rule: it acts at a step boundary, by what a user could do too: a change of live settings, which the batch log records,
and a history that forks off at an earlier checkpoint, where no log is removed. So every step can be trained again
from the files. Once it has acted, the run is compared with what it does from then on, by later trainers too: one fall
is answered once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from gspo_core.position import Position
from gspo_core.staleness import in_history
from services.state.refusals import Conflict
from services.state.store import IllegalTransition
from services.trainer.groups.run_context import RunContext
from services.trainer.groups.tasks import FIRST_EVAL_GROUP
from services.trainer.telling.best_evaluation import MEAN, BestEvaluation, Evaluated

EVENTS_AT_ONCE = 1000


@dataclass(frozen=True)
class Fall:
    """An evaluation below the best one by more than chance."""

    step: int
    mean: float
    best: Evaluated

    def __str__(self) -> str:
        return (
            f"held-out reward fell to {self.mean:.3g} after step {self.step}; it was {self.best.mean:.3g} after step "
            f"{self.best.step}"
        )


class FallGuard:
    """The guard of one run. Pass every evaluation to ``expect`` when it begins and to ``note`` when it is over."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._evaluations = BestEvaluation()
        self._expected = set[int]()
        self._fall: Fall | None = None
        self._place: Position | None = None
        """Where the job is about to go back to."""

    @property
    def _goes_back(self) -> bool:
        return self._context.spec.watchdog.on_fall == "go_back"

    async def recall(self) -> None:
        """Load the evaluations of earlier trainers, without those that came before an answer to a fall; those beyond
        the present step are of a history that was left."""
        answered = await self._answered_after()
        for row in await self._context.services.store.metrics.read(self._context.job):
            if answered < row["step"] <= self._context.lineage.step:
                self._evaluations.compare(int(row["step"]), row)

    async def _answered_after(self) -> int:
        """The step after which the run was last slowed where it stood; -1 if it never was."""
        found, read, job = -1, self._context.services.store.events.read, self._context.job
        events = await read(job, count=EVENTS_AT_ONCE)
        while events:
            for event in events:
                if (
                    event.type == "alert"
                    and event.data["kind"] == "fall_answered"
                    and event.data.get("back_to") is None
                ):
                    found = int(event.data["step"])
            events = await read(job, events[-1].id, count=EVENTS_AT_ONCE)
        return found

    def expect(self, step: int) -> None:
        self._expected.add(step)

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        best = self._evaluations.compare(step, metrics)
        self._expected.discard(step)
        if best is not None and self._context.spec.watchdog.on_fall != "tell":
            self._fall = Fall(step, metrics[MEAN], best)

    @property
    def keeps_evaluated(self) -> bool:
        """Whether each evaluation needs a checkpoint of the weights that it measures."""
        return self._goes_back

    def is_spared(self, position: Position) -> bool:
        """Whether a checkpoint is, or may turn out to be, that of the best evaluation."""
        best = self._evaluations.best
        return self._goes_back and (
            position.step in self._expected or (best is not None and position.step == best.step)
        )

    @property
    def has_seen_a_fall(self) -> bool:
        """Whether there was one since ``act`` was last called."""
        return self._fall is not None

    async def act(self) -> None:
        """Answer a fall, if there was one since the last call. Call this between two steps, with nothing beside it that
        starts groups or publishes."""
        fall, self._fall = self._fall, None
        if fall is None:
            return
        self._place = place = await asyncio.to_thread(self._place_of, fall.best.step) if self._goes_back else None
        rate = await self._slow_down()
        if rate is None:
            return
        said = f"{fall}: the learning rate is {rate:.3g} from now on"
        if place is None:
            self._evaluations = BestEvaluation()
            more = "; no checkpoint of that time is left to go back to" if self._goes_back else ""
            await self._context.alert("fall_answered", said + more, back_to=None)
            return
        await self._drop_what_is_under_way()
        # An epoch that no trainer ever has: raised first, so that the next trainer of the job does not begin it too.
        jobs, claim = self._context.services.store.jobs, self._context.claim
        epoch = await jobs.raise_epoch(claim.job_id, claim.token, claim.epoch + 1, goes_back=True)
        await asyncio.to_thread(self._context.services.checkpoints.go_back, epoch, place)
        said += f", and the job goes on from step {place.step}"
        await self._context.alert("fall_answered", said, back_to=place.step)
        self._context.phase.leave()

    async def _drop_what_is_under_way(self) -> None:
        """Call it before the job goes back: if this process dies in between, all that is lost is played again. A group
        that stayed would be taken for the new history's group of that number, and the fallen policy's tokens for young
        ones."""
        bus, claim = self._context.services.bus, self._context.claim
        left = [group for group in await bus.open_groups(claim.job_id) if group < FIRST_EVAL_GROUP]
        step = self._context.lineage.step
        await bus.commit(claim.job_id, claim.token, step, left, reason="dropped_went_back")

    def _place_of(self, step: int) -> Position | None:
        """The newest checkpoint of this run that is not newer than ``step``, or where the job began with its model."""
        checkpoints, epoch = self._context.services.checkpoints, self._context.claim.epoch
        forks = checkpoints.forks()
        found = [at for at in checkpoints.positions() if at.step <= step and in_history(at, epoch, forks)]
        if not (found or step or self._context.spec.parent):
            return Position(0, 0)
        return max(found, key=lambda at: (at.step, at.epoch), default=None)

    async def _slow_down(self) -> float | None:
        """Change the job's learning rate, and return it; None if the job was ended meanwhile."""
        jobs = self._context.services.store.jobs
        while True:
            job = await jobs.get(self._context.job)
            rate = float(job.settings.get("optimizer.lr", self._context.spec.optimizer.lr))
            change = {"optimizer.lr": rate * self._context.spec.watchdog.slow_by}
            try:
                await jobs.change_settings(job.id, job.settings_version, {**job.settings, **change}, change)
            except Conflict:  # its user changed something meanwhile: look again
                continue
            except IllegalTransition:
                return None
            return change["optimizer.lr"]
