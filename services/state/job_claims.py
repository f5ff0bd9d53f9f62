"""The trainers' leases on jobs: claimed, renewed, given up, and taken from a trainer whose beat stands still.

The rule: an owner's writes are fenced by its token, and a takeover raises the epoch. It does not interpret
specifications.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple
from uuid import uuid4

from services.state.functions import Functions
from services.state.jobs import (
    HANDED_OVER,
    LOST,
    CancelManner,
    Claim,
    DesiredState,
    JobNotFound,
    JobStatus,
    StatusReason,
    default_reason,
    fits,
    read_record,
    sources_of,
)
from services.state.kept_jobs import KeptJobs
from services.state.keys import job_key, job_keys, service_key
from services.state.leases import BeatWatch
from services.state.refusals import Fenced, Forbidden, Missing

if TYPE_CHECKING:
    from services.files.job_records import SavedJobs
    from services.state.rebuild import Rebuild

_COUNTING = [status for status in sources_of(JobStatus.FAILED) if status is not JobStatus.CANCELLING]
_WITHOUT_TRAINING = (JobStatus.PAUSED, JobStatus.CANCELLING)
# A job that its trainer hands over in one of these waits in the queue; in others it goes on where it is.
_NOT_BEGUN = (JobStatus.STARTING,)
_YIELDING = (JobStatus.STARTING, JobStatus.RUNNING)


class _Owner(NamedTuple):
    token: str | bytes
    """Empty for an unowned job."""
    beat: str | bytes
    job_is_queued: bool
    """Unowned, and either not begun or released before it ran."""
    num_yields: int = 0


class JobClaims(KeptJobs):
    """``max_attempts``: a job fails after losing this many trainers in a row without a new step."""

    def __init__(
        self,
        functions: Functions,
        watch: BeatWatch,
        now: Callable[[], float],
        *,
        max_attempts: int,
        saved: SavedJobs | None,
        rebuild: Rebuild | None,
    ) -> None:
        super().__init__(functions, now, saved=saved, rebuild=rebuild)
        self._max_attempts = max_attempts
        self._watch = watch
        # A claim whose reply was lost is repeated with the same token, so it is not lost for a whole lease.
        self._unanswered: dict[str, str] = {}
        # One claim at a time: two claims sharing a token would both believe they own the job.
        self._claiming = asyncio.Lock()

    async def explain_queued(self, job: str, reason: StatusReason) -> None:
        """Show why a job waits; does nothing if it is no longer queued."""
        queued, entering = JobStatus.QUEUED, default_reason(JobStatus.QUEUED)
        said = (str(queued), "", self._time(), reason.code, reason.message, entering.code, entering.message, 0)
        with contextlib.suppress(Forbidden):  # no state leads here: only the reason of a queued job changes
            await self._functions.call("set_status", job_keys(job), *said)

    async def explain_unowned(self, job: str, reason: StatusReason) -> bool:
        """Show why a job without a trainer waits. False: a trainer has it, or it is over."""
        try:
            said = await self._functions.call(
                "explain_unowned", self._keys(job), self._time(), reason.code, reason.message
            )
        except Missing:
            return False
        if said:
            await self._written_down(job)
        return bool(said)

    async def update_progress(self, job: str, token: str, step: int, version: int) -> None:
        """Raises Fenced."""
        await self._functions.call("update_progress", job_keys(job), token, step, version)

    async def claim(
        self, trainer: str, *, unfit: Callable[[str], str | None] = fits, lost_first: bool = False
    ) -> Claim | None:
        """Claim a waiting job, or one whose trainer's beat stood still for a whole lease; None if there is none.

        ``unfit`` returns why this trainer cannot train a specification: others may take the job, and it shows
        that reason while queued. All trainers must say the same. Any trainer may end a job its user cancelled, unless
        something of it is to be drained or saved.

        ``lost_first``: jobs of dead trainers come first, and waiting jobs are left alone while another job's trainer
        may turn out dead. A restarted trainer thus continues what it had.

        Idle trainers call this at least twice per lease: a beat must be watched before it counts as standing still.
        A takeover raises attempt and epoch by one and starts the job again, unless it is paused or cancelling.
        """
        async with self._claiming:
            await self._ensure_rebuilt()
            for job, seen in await self._to_be_had(lost_first):
                try:
                    if await self._is_left_to_others(job, unfit):
                        continue
                    claim = await self._claim(job, trainer, seen)
                except (Missing, JobNotFound, Fenced):
                    # The server was wiped between two calls: the job is unowned, and another trainer may claim it soon.
                    self._unanswered.pop(job, None)
                    continue
                if claim is not None:
                    return claim
        return None

    async def _to_be_had(self, lost_first: bool) -> list[tuple[str, _Owner]]:
        """Jobs without an owner or with a dead one, oldest first. With ``lost_first``, begun jobs come first, and only
        they are listed while another job's owner may be dead."""
        looked_at = {job: await self._seen(job) for job in await self._open()}
        found = [(job, owner) for job, owner in looked_at.items() if owner is not None]
        found.sort(key=lambda one: one[1].num_yields)  # those that could do nothing with a trainer come last
        if not lost_first:
            return found
        lost = [(job, owner) for job, owner in found if not owner.job_is_queued]
        if any(self._watch.is_undecided(job) for job, owner in looked_at.items() if owner is None):
            return lost
        return lost + [(job, owner) for job, owner in found if owner.job_is_queued]

    async def give_up_lost(self, own: str = "") -> list[str]:
        """Drop dead owners of jobs other than ``own`` (beat still for a whole lease): such a job waits for a trainer
        and holds no engine. Busy trainers and the API call this at least twice per lease; idle trainers claim such jobs
        instead."""
        given_up = []
        for job in await self._open():
            owner = await self._seen(job) if job != own else None
            if owner is not None and owner.token and await self._lose(job, owner):
                given_up.append(job)
        return given_up

    async def _lose(self, job: str, owner: _Owner) -> bool:
        said = (owner.token, owner.beat, self._time(), LOST.code, LOST.message, *_WITHOUT_TRAINING)
        # A server wiped meanwhile has forgotten the job.
        with contextlib.suppress(Missing, JobNotFound):
            if await self._functions.call("lose", job_keys(job), *said):
                await self._written_down(job)
                return True
        return False

    async def _is_left_to_others(self, job: str, unfit: Callable[[str], str | None]) -> bool:
        if not (fields := await self._redis.hgetall(job_key(job, "job"))):
            return False
        record = read_record(job, fields)
        is_to_end = record.desired_state is DesiredState.CANCELLED and record.cancel_manner in (None, CancelManner.NOW)
        problem = None if is_to_end else unfit(record.spec)
        if problem is None:
            return False
        await self.explain_queued(job, StatusReason("capacity", problem))
        return True

    async def _claim(self, job: str, trainer: str, seen: _Owner) -> Claim | None:
        token = self._unanswered.setdefault(job, uuid4().hex)
        reason = default_reason(JobStatus.STARTING)
        reply = await self._functions.call(
            "claim",
            job_keys(job),
            *(token, trainer, seen.token, seen.beat, self._time(), reason.code, reason.message),
            *(self._max_attempts, len(_COUNTING)),
            *_COUNTING,
            *sources_of(JobStatus.STARTING),
        )
        if reply is None:
            del self._unanswered[job]
            return None
        epoch = await self._own_epoch(job, token, int(reply[0]))
        await self._written_down(job)
        del self._unanswered[job]
        self._watch.forget(job)
        return Claim(job, token, epoch, attempt=int(reply[1]))

    async def _own_epoch(self, job: str, token: str, epoch: int) -> int:
        """A server that lost its latest writes may hand out an epoch twice; the directory knows better."""
        directory = self._directory(job)
        if directory is None:
            return epoch
        highest = await asyncio.to_thread(directory.highest_epoch)
        return epoch if epoch > highest else await self.raise_epoch(job, token, highest + 1)

    async def _seen(self, job: str) -> _Owner | None:
        """The job's owner if the job may be claimed. None: leave it alone."""
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.hmget(job_key(job, "job"), ["status", "finished_at", "yields"])
            pipeline.hmget(job_key(job, "trainer"), ["token", "beat"])
            (status, finished_at, yields), (token, beat) = await pipeline.execute()
        if finished_at is not None:
            # Finished jobs leave the open set here, because that set lives in another slot than the job.
            await self._redis.srem(service_key("open_jobs"), job)
            self._watch.forget(job)
            return None
        if status is None:
            return None
        if not token or token == self._unanswered.get(job, "").encode():
            return _Owner("", "", status == JobStatus.QUEUED.encode(), int(yields or 0))
        owner = _Owner(token, beat, job_is_queued=False)
        return owner if self._watch.stands_still(job, (token, beat)) else None

    async def beat(self, job: str, token: str) -> None:
        """Renew the lease, at least every fifth of its length. Raises Fenced."""
        await self._functions.call("beat_trainer", job_keys(job), token)

    async def release(self, job: str, token: str, cause: StatusReason = HANDED_OVER) -> None:
        """Give the job up in an orderly way: another trainer may claim it at once, and the attempt does not count.
        ``cause`` is recorded with it. Raises Fenced."""
        reason = default_reason(JobStatus.QUEUED)
        await self._functions.call(
            "release",
            job_keys(job),
            *(token, self._time(), cause.code, cause.message, reason.code, reason.message),
            *_NOT_BEGUN,
        )
        await self._written_down(job)

    async def yield_trainer(self, job: str, token: str, cause: StatusReason) -> None:
        """Give the job up because it can do nothing with a trainer: it waits behind all others, with this reason, and
        the attempt does not count. Raises Fenced."""
        said = (token, self._time(), cause.code, cause.message)
        await self._functions.call("yield", job_keys(job), *said, *_YIELDING)
        await self._written_down(job)

    async def end_attempt(self, job: str, token: str, cause: StatusReason) -> None:
        """Give the job up because this attempt failed: it counts, with its cause on record. Raises Fenced."""
        await self._functions.call("end_attempt", job_keys(job), token, self._time(), cause.code, cause.message)
        await self._written_down(job)

    async def raise_epoch(self, job: str, token: str, epoch: int, *, goes_back: bool = False) -> int:
        """Raise the epoch to at least ``epoch`` (the highest on disk plus one); returns the resulting epoch.

        ``goes_back``: to an earlier step, after which every step counts as a new one again.
        """
        more = ("back",) if goes_back else ()
        held = int(await self._functions.call("raise_epoch", job_keys(job), token, epoch, *more))
        await self._written_down(job)
        return held
