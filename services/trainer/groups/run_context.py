"""State shared by the parts of one run: the claim, external services, and progress.

Rule: it only holds state and decides nothing; each part keeps its private state to itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gspo_core.log.lineage import Lineage
from gspo_core.log.settings import Tuning
from gspo_core.spec import JobSpec
from gspo_core.versions import WeightsManifest
from services.files.batch_log import BatchLog
from services.files.checkpoints import CheckpointStore
from services.files.job_dir import JobDir
from services.files.weights import WeightStore
from services.state.queue import Bus
from services.state.store import Claim, Store
from services.trainer.fleet.engines import EnginePool
from services.trainer.fleet.parity import LabelledWeights
from services.trainer.groups.intake import Intake
from services.trainer.groups.late_rewards import LateRewardWatch
from services.trainer.groups.staleness import StalenessTable
from services.trainer.telling.disk_waits import DiskWaits
from services.trainer.telling.failure import AlertKind
from services.trainer.telling.reports import Listener
from services.trainer.telling.run_phase import RunPhase
from services.trainer.telling.status import JobStatusBoard


@dataclass(frozen=True)
class Services:
    """The external services of a run."""

    bus: Bus
    store: Store
    status: JobStatusBoard
    engines: EnginePool
    intake: Intake
    weights: WeightStore
    batch_log: BatchLog
    checkpoints: CheckpointStore
    job_dir: JobDir
    budget_bytes: int | None = None
    """The byte budget of the job in Redis."""
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], float] = time.time
    """Unix seconds, as the gateways count them."""
    listeners: Sequence[Listener] = ()
    """Extra receivers of every metric, beside the store and the job's files."""


class RunContext:
    newest: WeightsManifest
    """The newest published weights."""
    held: LabelledWeights
    """Version and label under which the learner's weights are, or will be, published."""

    def __init__(self, claim: Claim, spec: JobSpec, services: Services) -> None:
        self.claim = claim
        self.services = services
        self.tuning = Tuning(spec)
        self.phase = RunPhase(has_history=claim.attempt > 1)
        self.lineage = Lineage()
        self.ages = StalenessTable(claim.epoch, self.lineage)
        self.disk = DiskWaits(self.alert)
        self.late = LateRewardWatch(services.bus, claim, lambda: self.spec, services.now)

    @property
    def job(self) -> str:
        return self.claim.job_id

    @property
    def token(self) -> str:
        return self.claim.token

    @property
    def spec(self) -> JobSpec:
        """The specification with current live settings."""
        return self.tuning.spec

    @property
    def fills_step(self) -> bool:
        """Whether the groups in flight suffice for one more step, without those that wait for rewards."""
        owed = set(self.lineage.owed())
        return len(owed) - len(self.late.waiting(owed)) >= self.spec.groups_per_step

    async def alert(self, kind: AlertKind, message: str, **more: int | None) -> None:
        """``more``: what a later trainer has to know of it."""
        data = {"step": self.lineage.step, "kind": kind, "message": message, **more}
        await self.services.store.events.add(self.job, "alert", data, token=self.token)
