"""Nobody trains: all trainers are killed and none comes, until each job that waits for one has said so.

The rule kept here: what is awaited is what a user reads, the reason of the job's record; how long it took is noted, and
judged by the oracle. A job that is over, held, or wiped out of Redis meanwhile has nothing to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection
from typing import Any

from services.state.client import Away, RedisFault
from services.state.jobs import DesiredState, JobRecord, JobStatus
from services.state.store import JobNotFound, Store
from tests.chaos.processes import Nursery, Process
from tests.chaos.watch import impatient

NO_TRAINER = "no_trainer"
GIVEN_UP_S = 60.0
"""Other faults strike meanwhile: who has to say it, and where, may have to start first."""


async def kept_away(
    nursery: Nursery, trainers: Collection[Process], jobs: Collection[str], redis_url: str, tell: Callable[..., None]
) -> None:
    """Kills the trainers at once, and lets them come back when all has been said."""
    for trainer in trainers:
        trainer.is_wanted = False
        nursery.kill(trainer)
    began = time.monotonic()
    try:
        silent = await _said_by_all(jobs, redis_url, began + GIVEN_UP_S)
        tell(seconds=round(time.monotonic() - began, 2), jobs=sorted(jobs), silent=silent)
    finally:
        for trainer in trainers:
            await nursery.revive(trainer)


async def _said_by_all(jobs: Collection[str], redis_url: str, until: float) -> dict[str, Any]:
    """What those say that have not said it at the end."""
    silent: dict[str, Any] = dict.fromkeys(jobs)
    while silent and time.monotonic() < until:
        for job in list(silent):
            with contextlib.suppress(Away, RedisFault, OSError):
                async with impatient(redis_url) as client:
                    silent[job] = await _left_to_say(Store(client), job)
        silent = {job: said for job, said in silent.items() if said != ""}
        await asyncio.sleep(0.1)
    return silent


async def _left_to_say(store: Store, job: str) -> str:
    """Empty: nothing."""
    try:
        record = await store.jobs.get(job)
    except JobNotFound:
        return ""
    return "" if _is_excused(record) else f"{record.status.value}: {record.status_reason}"


def _is_excused(record: JobRecord) -> bool:
    said = record.status_reason is not None and record.status_reason.code == NO_TRAINER
    return said or JobStatus(record.status).is_terminal or record.desired_state is not DesiredState.RUNNING
