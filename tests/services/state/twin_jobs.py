"""The jobs of the queue's twin: all that the queue knows of a job is who owns it.

The twin is a second, simpler implementation of the queue, with which `test_queue_model` compares the real one.
"""

from __future__ import annotations

from uuid import uuid4

from services.state.jobs import Claim
from services.state.refusals import Fenced
from tests.services.state.twin_world import World


class TwinStore:
    def __init__(self, world: World) -> None:
        self.jobs = TwinJobs(world)


class TwinJobs:
    """What the model test does to jobs, with the signatures of the real table."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def create(self, spec: str, *, job_id: str) -> None:
        self._world.owners.setdefault(job_id, "")

    async def claim(self, trainer: str) -> Claim | None:
        """The first job without an owner."""
        for job, owner in sorted(self._world.owners.items()):
            if not owner:
                token = self._world.owners[job] = uuid4().hex
                self._world.epochs[job] += 1
                return Claim(job, token, self._world.epochs[job], attempt=1)
        return None

    async def release(self, job: str, token: str) -> None:
        if not self._world.owns(job, token):
            raise Fenced("release of the job")
        self._world.owners[job] = ""
