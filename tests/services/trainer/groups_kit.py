"""A run without a learner: a test plays the episodes of its groups and sees what is taken of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from gspo_core.codec import encode
from gspo_core.spec import JobSpec
from gspo_core.types import EpisodeKey, Group
from services.files.batch_log import BatchLog
from services.files.checkpoints import CheckpointStore
from services.files.job_dir import JobDir
from services.files.weights import WeightStore
from services.state.queue import Append, Bus
from services.state.store import Claim, Store
from services.trainer.fleet.parity import LabelledWeights
from services.trainer.groups.intake import Intake
from services.trainer.groups.run_context import Services
from services.trainer.groups.tasks import TaskSchedule
from services.trainer.run import JobRun
from services.trainer.telling.status import JobStatusBoard
from tests.services.trainer.trainer_kit import DEADLINE_S, episode


class Stage:
    """A job of groups of three that trains from two on; a worker holds them all and plays what a test says."""

    def __init__(
        self,
        claim: Claim,
        store: Store,
        bus: Bus,
        job_dir: Path,
        rollout: dict[str, Any],
        zero_variance: str = "keep",
        engines: Any = None,
    ) -> None:
        spec = JobSpec.model_validate(
            {
                "model": "m",
                "environments": [{"ref": "a:B"}],
                "groups_per_step": 1,
                "objective": {"advantage": {"zero_variance": zero_variance}},
                "rollout": {"group_size": 3, "max_staleness": 1, "on_partial_group": "min_viable:2", **rollout},
            }
        )
        self.claim, self.store, self.bus = claim, store, bus
        self.intake = Intake(bus, claim.job_id)
        services = Services(
            bus=bus,
            store=store,
            status=JobStatusBoard(store, claim),
            engines=engines,
            intake=self.intake,
            weights=WeightStore(JobDir(job_dir)),
            batch_log=BatchLog(JobDir(job_dir)),
            checkpoints=CheckpointStore(JobDir(job_dir)),
            job_dir=JobDir(job_dir),
        )
        self.run: Any = JobRun(claim, spec, services, lambda: cast(Any, None))
        self.run._staleness.add(0, 0)
        self.run._context.held = LabelledWeights(0, f"{claim.job_id}/{claim.epoch}/0")
        self.run._admission.schedule = TaskSchedule(0, [4], [1.0])

        async def check(*_: object) -> None: ...

        self.run._gate.check = check

    async def begin(self) -> None:
        await self.run._admission.admit()
        self.token = await self.bus.join("worker")
        await self.bus.lease(self.claim.job_id, "worker", self.token, 6)

    async def play(
        self, group: int, member: int, reward: float, num_turns: int, *, version: int = 0, upto: int | None = None
    ) -> None:
        """Turns of three tokens; all of them end the episode."""
        key = EpisodeKey(self.claim.job_id, group, member)
        turns = episode(group, member, reward, [version] * num_turns).segments[:upto]
        segments = [replace(one, key=key) for one in turns]
        appends = [Append(key, 0, one.index, encode(one), one.is_final, 0) for one in segments]
        await self.bus.append(key.job, self.token, appends)

    async def take(self) -> list[Group]:
        async with asyncio.timeout(DEADLINE_S):
            batch = await self.run._batches.batch(None, self.run._context.held)
        return list(batch.groups)
