"""An engine that says other log-probs than its weights have, in the real stack: nothing of it is trained.

The scripted engine of other runs is no model, so nobody could tell; here the embedded engine samples.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.evidence import Evidence
from tests.chaos.lies import ANSWER_MARK, less_probable
from tests.chaos.lines import Order
from tests.chaos.runner import Options, Run
from tests.chaos.stack import Size

pytestmark = pytest.mark.slow

SIZE = Size(jobs=1, apis=1, trainers=1, workers=1, engines=1, lease_s=30.0, has_real_engines=True)
OPTIONS = Options(
    seed=2, faults=0, minutes=0.0, steps=2, size=SIZE, worlds=("Drawn",), transports=("disk",), least_jobs=2
)
ENDED_S = 240.0


class Lied(Run):
    """Of two jobs the first has an honest engine, the second one that lies in every answer."""

    def _spec(self, number: int) -> dict[str, Any]:
        spec = super()._spec(number)
        del spec["rollout"]["max_engine_k3"]
        return spec | {"limits": {"max_turns": 1, "max_context_tokens": 900}}

    async def _strike_all(self, submitting: asyncio.Task[None]) -> None:
        async with asyncio.timeout(ENDED_S):
            while not any(job.is_over for job in self.watch.jobs.values()):
                self._check(submitting)
                await asyncio.sleep(0.01)
        self._lie()
        self._is_calm = True

    def _lie(self) -> None:
        (line,) = self.stack.engine_lines.values()
        line.order(Order(ANSWER_MARK, reply=less_probable, done=self._lie))


@pytest.mark.timeout(900)
def test_log_probs_that_no_weights_have_end_the_job_before_it_learns_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run = Lied(tmp_path / "run", OPTIONS)
    try:
        asyncio.run(run.play())
        honest, lied = sorted(Evidence(run.work).jobs, key=lambda job: job.id)
        assert (honest.status["status"], len(honest.lineage)) == ("succeeded", OPTIONS.steps)
        assert lied.status["status"] == "failed"
        assert "engine_mismatch" in str(lied.status)
        assert lied.lineage == []
    except BaseException:
        run.keep()
        raise
    run.disk.close()
    shutil.rmtree(run.work)
