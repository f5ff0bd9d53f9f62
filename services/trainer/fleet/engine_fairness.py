"""Shares engines between jobs: a job with more than it asked for gives to a job with less.

Rule: no job gets more than it asked for while another lacks engines. Each job decides on its own what to give, from
shared state. It does not choose the receiver: the first job to bind a free engine gets it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from gspo_core.spec import JobSpec
from services.state.fleet_records import EngineRecord
from services.state.store import Store


class EngineFairness:
    def __init__(self, store: Store, job: str, num_wanted: int) -> None:
        self._store = store
        self._job = job
        self._num_wanted = num_wanted
        self._wanted: dict[str, int] = {}
        """Other job -> number of engines it asked for."""

    async def others_lack(self, records: Iterable[EngineRecord]) -> int:
        """Number of engines that other jobs asked for and do not hold."""
        records = list(records)
        others = [job for job in await self._store.jobs.served() if job != self._job]
        return sum([max(0, await self._of(job) - _num_bound(records, job)) for job in others])

    async def surplus(
        self, records: Sequence[EngineRecord], mine: Sequence[str], *, staying: Collection[str] = ()
    ) -> list[str]:
        """The engines of ``mine`` to give away now, none of ``staying``: at most what other jobs lack beyond the free
        engines."""
        spare = len(mine) - self._num_wanted
        if spare <= 0:
            return []
        num_free = sum(record.job is None for record in records)
        lacked = await self.others_lack(records) - num_free
        return sorted(set(mine).difference(staying))[: max(0, min(spare, lacked))]

    async def _of(self, job: str) -> int:
        if job not in self._wanted:
            spec = JobSpec.model_validate_json((await self._store.jobs.get(job)).spec)
            self._wanted[job] = 0 if spec.recorded is not None else spec.resources.num_engines
        return self._wanted[job]


def _num_bound(records: Iterable[EngineRecord], job: str) -> int:
    return sum(record.job == job for record in records)
