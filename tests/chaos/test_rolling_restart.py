"""Every service is asked to leave and started again under running jobs: nothing is lost, doubled or sampled again."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from tests.chaos.__main__ import ROOT, judge
from tests.chaos.evidence import Evidence
from tests.chaos.processes import Process
from tests.chaos.runner import Options, Run
from tests.chaos.stack import LEAVING_S, Size
from tests.chaos.users import RunFailed

pytestmark = pytest.mark.slow

ORDER = ("environments", "rollout", "engine", "trainer", "api")
STEP_S = 240.0
ROUNDS = 2
# A world that can be gone on with: another one is played to its end by the worker that leaves.
SIZE = Size(lease_s=30.0, drain_s=60.0, has_environments_apart=True)
OPTIONS = Options(seed=12, faults=0, minutes=0.0, steps=40, size=SIZE, settle_s=480.0, worlds=("Replayed", "Kept"))


class Rolling(Run):
    async def _strike_all(self, submitting: asyncio.Task[None]) -> None:
        for _ in range(ROUNDS):
            for service in ORDER:
                for process in self.stack.of(service):
                    await self._restart(process)
                    await self._go_on(submitting)
            await self.stack.restart_redis()
            await self._go_on(submitting)
        self._is_calm = True

    async def _restart(self, process: Process) -> None:
        try:
            await self.stack.nursery.restart(process, LEAVING_S[process.service])
        except TimeoutError:
            raise RunFailed(f"{process.name} did not leave when it was asked to") from None

    async def _go_on(self, submitting: asyncio.Task[None]) -> None:
        """Until every job has taken another step, or is over."""
        went_on = asyncio.Event()
        self.watch.expect_steps([job.id for job in self.watch.running()], lambda seconds: went_on.set())
        try:
            async with asyncio.timeout(STEP_S):
                while not went_on.is_set():
                    self._check(submitting)
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise RunFailed("a job took no further step") from None


@pytest.mark.timeout(1800)
def test_a_rolling_restart_loses_doubles_and_samples_again_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # For the oracle too, a process of its own: bit for bit is promised for the same number of threads.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run = Rolling(tmp_path / "run", OPTIONS)
    try:
        asyncio.run(run.play())
        assert judge(run.work, ROOT) == 0
        jobs = Evidence(run.work).jobs
        assert len(jobs) >= 2
        for job in jobs:
            trained = [(batch, group) for batch in job.batches.values() for group in batch.groups]
            assert len(trained) == job.spec.steps * job.spec.groups_per_step
            # An attempt begins anew where something that was stored has to be sampled again.
            assert {one.attempt for _, group in trained for one in group.trajectories} == {0}
            # And no step was logged by an epoch that had to be given up.
            assert job.logged == set(job.lineage)
    except BaseException:
        run.keep()
        raise
    run.disk.close()
    shutil.rmtree(run.work)
