"""Jobs and the trainers' leases on them: created once, moved along the ONE table of transitions, owned by one trainer.

The rule: one function changes a state by compare-and-set and writes the event ``job.status``, so the event stream shows
exactly what happened. If the table has the jobs' directories, it saves each change there before acknowledging it. It
does not interpret specifications.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from pydantic import BaseModel

from gspo_core.log.records import AcceptedJob, DamagedRecord
from services.process.telemetry import get_logger
from services.state.away import Away
from services.state.functions import Functions
from services.state.jobs import (
    FIELDS_WITHOUT_SPEC,
    HANDED_OVER,
    LOST,
    CancelManner,
    Claim,
    DamagedJob,
    DesiredState,
    IllegalTransition,
    InvalidCursor,
    JobConflict,
    JobInUse,
    JobNotFound,
    JobRecord,
    JobStatus,
    StatusReason,
    WentBack,
    default_reason,
    fits,
    may_have_been,
    new_job_id,
    read_record,
    sources_of,
)
from services.state.keys import InvalidJobId, check_job_id, job_key, job_keys, service_key, service_keys
from services.state.leases import BeatWatch
from services.state.refusals import Conflict, Fenced, Forbidden, Missing

if TYPE_CHECKING:
    from services.files.job_records import JobRecords, SavedJobs
    from services.state.rebuild import Rebuild

# The fields of a job's record saved with every change. Progress is left out: checkpoints and versions record it.
STATUS_FIELDS = (
    *("status", "desired_state", "attempt", "epoch", "created_at", "started_at", "finished_at"),
    *("reason_code", "reason_message", "reason_since"),
    *("settings_version", "settings", "cancel_manner", "attempts", "went_back"),
)

# A trainer lost in one of these states counts as a failure; in paused or ending states it was not training.
_COUNTING = [status for status in sources_of(JobStatus.FAILED) if status is not JobStatus.CANCELLING]
_WITHOUT_TRAINING = (JobStatus.PAUSED, JobStatus.CANCELLING)
# A job that its trainer hands over in one of these waits in the queue; in others it goes on where it is.
_NOT_BEGUN = (JobStatus.STARTING,)
_YIELDING = (JobStatus.STARTING, JobStatus.RUNNING)
# What "begin_removal" answers where another job may have been made from this one meanwhile.
AGAIN = b"again"
_TERMINAL = [status for status in JobStatus if status.is_terminal]


class _Owner(NamedTuple):
    token: str | bytes
    """Empty for an unowned job."""
    beat: str | bytes
    job_is_queued: bool
    """Unowned, and either not begun or released before it ran."""
    num_yields: int = 0


class JobTable:
    """``now`` is the time of day in seconds, shown to people; no lease depends on it. What is being made of a job keeps
    it from being removed for at most an hour of it.

    ``max_attempts``: a job fails after losing this many trainers in a row without a new step.
    """

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
        self._max_attempts = max_attempts
        self._saved = saved
        self._rebuild = rebuild
        self._functions = functions
        self._redis = functions.redis
        self._watch = watch
        self._now = now
        # A claim whose reply was lost is repeated with the same token, so it is not lost for a whole lease.
        self._unanswered: dict[str, str] = {}
        self._reported: set[str] = set()
        """Jobs whose record was found damaged."""
        # One claim at a time: two claims sharing a token would both believe they own the job.
        self._claiming = asyncio.Lock()

    async def create(
        self, spec: BaseModel | str, *, idempotency_key: str | None = None, job_id: str | None = None, owner: str = ""
    ) -> JobRecord:
        """Accept a job. The same key (or ``job_id``) and body give the same job, another body JobConflict.

        Include in the key anything that distinguishes credentials.
        """
        text, digest = _canonical(spec)
        wanted_id = check_job_id(job_id or new_job_id(self._now()))
        key_digest = None if idempotency_key is None else _digest_of_key(idempotency_key)
        reason = default_reason(JobStatus.QUEUED)
        while True:
            wanted = AcceptedJob(text, digest, self._time(), key_digest, owner)
            job, accepted = await self._accept_once(wanted_id, wanted)
            try:
                written = (text, digest, accepted.created_at, reason.code, reason.message, accepted.owner)
                await self._functions.call("create", job_keys(job), *written)
                break
            except Conflict:
                raise JobConflict(job) from None
            except Missing:  # the job of this key is being removed: it goes first, and what was written for it just now
                with contextlib.suppress(JobNotFound):
                    await self.remove(job)
                if self._saved is not None:
                    await asyncio.to_thread(self._saved.remove, job)
        # Last, so that a listed job is complete. Nothing has been acknowledged before this point.
        await self._functions.call("announce", service_keys(), job)
        return await self._written_down(job)

    async def under(self, idempotency_key: str) -> str | None:
        """The id handed out under this key; its job may not exist."""
        await self._ensure_rebuilt()
        found = await self._redis.hget(service_key("idempotency"), _digest_of_key(idempotency_key))
        return None if found is None else found.decode()

    async def get(self, job: str) -> JobRecord:
        """Raises JobNotFound."""
        return read_record(job, await self._fields(job))

    async def _fields(self, job: str) -> dict[bytes, bytes]:
        try:
            key = job_key(job, "job")
        except InvalidJobId:
            raise JobNotFound(job) from None
        fields: dict[bytes, bytes] = await self._redis.hgetall(key)
        if not fields and self._rebuild is not None:
            await self._rebuild.ensure()
            fields = await self._redis.hgetall(key)
        if not fields:
            raise JobNotFound(job)
        return fields

    # Saving changes before acknowledging them

    async def _ensure_rebuilt(self) -> None:
        if self._rebuild is not None:
            await self._rebuild.ensure()

    def _directory(self, job: str) -> JobRecords | None:
        return None if self._saved is None else self._saved.of(job)

    async def _accept_once(self, job: str, wanted: AcceptedJob) -> tuple[str, AcceptedJob]:
        """Of all who ask under one key, one job is accepted, also where the server is wiped before its key is on disk:
        then another request may have taken the key meanwhile, and this one's job gives way to its job."""
        job = await self._reserve(wanted.idempotency, job)
        while True:
            accepted = await self._accept(job, wanted)
            holder = await self._reserve(wanted.idempotency, job)
            if holder == job:
                return job, accepted
            directory = self._directory(job)
            if directory is not None:
                await asyncio.to_thread(directory.withdraw)
            job = holder

    async def _reserve(self, key_digest: str | None, job: str) -> str:
        """The job that this key names from now on."""
        await self._ensure_rebuilt()
        if key_digest is None:
            return job
        condition = () if self._rebuild is None else ("rebuilt",)
        while not (holder := await self._functions.call("reserve", service_keys(), key_digest, job, *condition)):
            await self._ensure_rebuilt()  # wiped since
        return str(holder.decode())

    async def _accept(self, job: str, wanted: AcceptedJob) -> AcceptedJob:
        directory = self._directory(job)
        if directory is None:
            return wanted
        accepted = await asyncio.to_thread(directory.accept, wanted)
        if accepted.digest != wanted.digest:
            raise JobConflict(job)
        return accepted

    async def _written_down(self, job: str) -> JobRecord:
        """The job's current state. On return this state (or a newer one) is on disk, whatever changed it."""
        fields = await self._fields(job)
        while self._saved is not None:
            directory = self._saved.of(job)
            read_record(job, fields)  # no file is written of what cannot be read
            record = {name: fields[name.encode()].decode() for name in STATUS_FIELDS if name.encode() in fields}
            if await self._saved.write(directory.write_status, int(fields[b"revision"]), record):
                break
            # The server was rolled back and reuses a revision that is on disk with other content.
            highest, _ = await asyncio.to_thread(directory.newest_status)
            await self._functions.call("pass_revision", job_keys(job), highest)
            fields = await self._fields(job)
        return read_record(job, fields)

    async def page(
        self, limit: int = 20, after: str | None = None, *, before: str | None = None, order: str = "asc"
    ) -> list[JobRecord]:
        """Jobs by id, i.e. in order of creation; ``after`` and ``before`` are exclusive, and may have been removed.

        Raises InvalidCursor.
        """
        if order not in ("asc", "desc"):
            raise ValueError(f"order must be asc or desc, not {order!r}")
        await self._ensure_rebuilt()
        for cursor in (after, before):
            if cursor is None or may_have_been(cursor, self._now()):
                continue
            if await self._redis.zscore(service_key("jobs"), cursor) is None:
                raise InvalidCursor(f"there is no job {cursor!r} to continue from")
        found: list[JobRecord] = []
        while (num_wanted := limit - len(found)) > 0:
            ids = await self._ids(num_wanted, after, before, order)
            found += await self._get_many(ids)  # what was removed meanwhile is not among them
            if len(ids) < num_wanted:
                break
            after = ids[-1]
        return found

    async def _ids(self, limit: int, after: str | None, before: str | None, order: str) -> list[str]:
        lowest, highest = (after, before) if order == "asc" else (before, after)
        start, end = f"({lowest}" if lowest else "-", f"({highest}" if highest else "+"
        first, last = (start, end) if order == "asc" else (end, start)
        found = await self._redis.zrange(
            service_key("jobs"), first, last, desc=order == "desc", bylex=True, offset=0, num=limit
        )
        return [job.decode() for job in found]

    async def served(self) -> list[str]:
        """Jobs that rollout workers serve, oldest first."""
        jobs = await self._get_many(await self._open())
        return [job.id for job in jobs if job.status.is_served]

    async def queued(self) -> list[JobRecord]:
        """Jobs that wait for a trainer, oldest first."""
        return [job for job in await self._get_many(await self._open()) if job.status is JobStatus.QUEUED]

    async def explain_queued(self, job: str, reason: StatusReason) -> None:
        """Show why a job waits; does nothing if it is no longer queued."""
        queued, entering = JobStatus.QUEUED, default_reason(JobStatus.QUEUED)
        said = (str(queued), "", self._time(), reason.code, reason.message, entering.code, entering.message, 0)
        with contextlib.suppress(Forbidden):  # no state leads here: only the reason of a queued job changes
            await self._functions.call("set_status", job_keys(job), *said)

    async def unowned(self) -> list[JobRecord]:
        """Jobs that are not over and that no trainer has, without their specifications."""
        jobs = await self._open()
        async with self._redis.pipeline(transaction=False) as pipeline:
            for job in jobs:
                pipeline.hget(job_key(job, "trainer"), "token")
            tokens = await pipeline.execute()
        found = [job for job, token in zip(jobs, tokens, strict=True) if not token]
        async with self._redis.pipeline(transaction=False) as pipeline:
            for job in found:
                pipeline.hmget(job_key(job, "job"), *FIELDS_WITHOUT_SPEC)
            rows = await pipeline.execute()
        return [record for job, row in zip(found, rows, strict=True) if (record := self._open_one(job, row))]

    def _open_one(self, job: str, row: list[bytes | None]) -> JobRecord | None:
        fields = {
            name.encode(): value for name, value in zip(FIELDS_WITHOUT_SPEC, row, strict=True) if value is not None
        }
        record = self._readable(job, {b"spec": b"{}", **fields}) if fields else None
        return record if record is not None and record.finished_at is None else None

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

    async def set_status(
        self, job: str, status: JobStatus | str, *, token: str | None = None, reason: StatusReason | None = None
    ) -> JobRecord:
        """Move a job to ``target``; if it is already there, only the reason may change.

        With a ``token`` only the owner may. The reason defaults to the state's usual one. The same atomic call writes
        the event ``job.status``. Raises JobNotFound, IllegalTransition, Fenced.
        """
        status = JobStatus(status)
        entering = default_reason(status)
        try:
            await self._functions.call(
                "set_status",
                self._keys(job),
                *(str(status), token or "", self._time()),
                *((reason.code, reason.message) if reason else ("", "")),
                *(entering.code, entering.message),
                int(status.is_terminal),
                *sources_of(status),
            )
        except Missing:
            raise JobNotFound(job) from None
        except Forbidden as refusal:
            raise IllegalTransition(job, refusal.detail, status) from None
        return await self._written_down(job)

    async def set_desired_state(
        self, job: str, desired: DesiredState | str, manner: CancelManner = CancelManner.NOW
    ) -> JobRecord:
        """Record the user's wish; the owner carries it out. A job that waits for a trainer is cancelled at once, if it
        is queued or nothing of it is to be drained or saved.

        Repeating a wish is no error; a cancellation cannot be undone, only its ``manner`` can change, and a finished
        job accepts no other wish (IllegalTransition). Raises JobNotFound.
        """
        desired = DesiredState(desired)
        at_once = default_reason(JobStatus.CANCELLED)
        how = manner if desired is DesiredState.CANCELLED else ""
        try:
            await self._functions.call(
                "set_desired_state",
                self._keys(job),
                *(desired, self._time(), at_once.code, at_once.message, how),
                *_TERMINAL,
            )
        except Missing:
            raise JobNotFound(job) from None
        except Forbidden as refusal:
            raise IllegalTransition(job, refusal.detail, desired) from None
        return await self._written_down(job)

    async def change_settings(
        self, job: str, seen_version: int, values: Mapping[str, Any], changes: Mapping[str, Any]
    ) -> JobRecord:
        """Replace a job's live settings, which override its specification; the event carries the new ones.

        Raises JobNotFound, IllegalTransition (the job is over) and Conflict if ``seen_version`` is not the newest.
        """
        texts = [json.dumps(dict(some), sort_keys=True, allow_nan=False) for some in (values, changes)]
        try:
            await self._functions.call("change_settings", self._keys(job), seen_version, *texts, *_TERMINAL)
        except Missing:
            raise JobNotFound(job) from None
        except Forbidden as refusal:
            raise IllegalTransition(job, refusal.detail, "changed") from None
        return await self._written_down(job)

    async def reopen(
        self, job: JobRecord, *, epoch: int, settings: Mapping[str, Any], went_back: WentBack | None = None
    ) -> JobRecord:
        """Put a job that is over back into the queue, to go on as itself in an epoch after ``epoch``.

        ``went_back``: from where, if not from where it ended; whoever goes on with it writes that down in its files.
        ``settings``: all live settings from now on. Raises JobNotFound, IllegalTransition (it is not over) and Conflict
        if its settings have changed since it was looked at.
        """
        text = json.dumps(dict(settings), sort_keys=True, allow_nan=False)
        reason = default_reason(JobStatus.QUEUED)
        step, back = ("", "") if went_back is None else (went_back.to.step, went_back.encode())
        said = (self._time(), reason.code, reason.message, epoch, step, job.settings_version, text, back)
        try:
            await self._functions.call("reopen", self._keys(job.id), *said, *_TERMINAL)
        except Missing:
            raise JobNotFound(job.id) from None
        except Forbidden as refusal:
            raise IllegalTransition(job.id, refusal.detail, JobStatus.QUEUED) from None
        await self._functions.call("announce", service_keys(), job.id)
        return await self._written_down(job.id)

    @contextlib.asynccontextmanager
    async def used(self, job: str) -> AsyncIterator[None]:
        """While another job is made out of this one, it cannot be removed. Raises JobNotFound."""
        use = uuid4().hex
        try:
            await self._functions.call("use_job", self._keys(job), use, int(self._now()))
        except Missing:
            raise JobNotFound(job) from None
        try:
            yield
        finally:
            with contextlib.suppress(Away):
                await self._functions.call("end_use", self._keys(job), use)

    async def remove(self, job: str, *, made_from: Callable[[JobRecord], str | None] = lambda _: None) -> None:
        """Everything of a job that is over, its record last: a removal that was cut off is finished by the next one.
        ``made_from``: the job that a job needs, which stays.

        Raises JobNotFound, IllegalTransition (it is not over), JobInUse.
        """
        await self._ensure_rebuilt()
        is_gone = False
        while not is_gone:
            digest = await self._begin_removal(job, made_from)
            if digest:  # before its directory, which a repetition under its key would make again
                await self._functions.call("release_key", service_keys(), job, digest)
            if self._saved is not None:
                await asyncio.to_thread(self._saved.remove, job)
            await self._functions.call("withdraw_job", service_keys(), job)
            await self._functions.call("remove_job", job_keys(job))
            # Not where the server was wiped meanwhile and given the job back.
            is_gone = not await self._redis.exists(job_key(job, "job"))

    async def _begin_removal(self, job: str, made_from: Callable[[JobRecord], str | None]) -> str:
        """The digest of the idempotency key that it was submitted under, or an empty text."""
        while True:
            record = await self.get(job)
            known, removing = await self._redis.hmget(job_key(job, "job"), "ended_uses", "removing")
            if removing is None and record.status.is_terminal:
                async for other in self._all():
                    if made_from(other) == job:
                        raise JobInUse(job, f"{other.id} was made from it")
            digest = "" if self._saved is None else await asyncio.to_thread(_key_digest, self._saved.of(job))
            try:
                found = await self._functions.call(
                    "begin_removal", self._keys(job), known or 0, digest, int(self._now())
                )
            except Missing:
                raise JobNotFound(job) from None
            except Forbidden as refusal:
                raise IllegalTransition(job, refusal.detail, "removed") from None
            except Conflict:
                raise JobInUse(job, "another job is just being made from it", passes=True) from None
            if found != AGAIN:
                return str(found.decode())

    async def _all(self) -> AsyncIterator[JobRecord]:
        ids = [job.decode() for job in await self._redis.zrange(service_key("jobs"), 0, -1)]
        for first in range(0, len(ids), 100):
            for record in await self._get_many(ids[first : first + 100]):
                yield record

    async def update_progress(self, job: str, token: str, step: int, version: int) -> None:
        """Raises Fenced."""
        await self._functions.call("update_progress", job_keys(job), token, step, version)

    async def claim(
        self, trainer: str, *, unfit: Callable[[str], str | None] = fits, lost_first: bool = False
    ) -> Claim | None:
        """Claim a waiting job, or one whose trainer's beat stood still for a whole lease; None if there is none.

        ``unfit`` returns why this trainer cannot train a specification: others may take the job, and it shows
        that reason while queued. All trainers must say the same. Any trainer may end a job its user cancelled.

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
        problem = None if record.desired_state is DesiredState.CANCELLED else unfit(record.spec)
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

    async def raise_epoch(self, job: str, token: str, epoch: int) -> int:
        """Raise the epoch to at least ``epoch`` (the highest on disk plus one); returns the resulting epoch."""
        held = int(await self._functions.call("raise_epoch", job_keys(job), token, epoch))
        await self._written_down(job)
        return held

    async def _open(self) -> list[str]:
        members = await self._redis.smembers(service_key("open_jobs"))
        return sorted(member.decode() for member in members)

    async def _get_many(self, jobs: list[str]) -> list[JobRecord]:
        async with self._redis.pipeline(transaction=False) as pipeline:
            for job in jobs:
                pipeline.hgetall(job_key(job, "job"))
            replies = await pipeline.execute()
        return [
            record
            for job, fields in zip(jobs, replies, strict=True)
            if fields and (record := self._readable(job, fields)) is not None
        ]

    def _readable(self, job: str, fields: dict[bytes, bytes]) -> JobRecord | None:
        """None of a job whose record is damaged, which is reported once."""
        try:
            return read_record(job, fields)
        except DamagedJob as error:
            if job not in self._reported:
                self._reported.add(job)
                get_logger().error("a job's record in Redis cannot be read and is skipped", job=job, error=str(error))
            return None

    def _keys(self, job: str) -> list[str]:
        try:
            return job_keys(job)
        except InvalidJobId:
            raise JobNotFound(job) from None

    def _time(self) -> str:
        return datetime.fromtimestamp(self._now(), UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _key_digest(directory: JobRecords) -> str:
    """Of the idempotency key that it was submitted under; empty where there is none, or its record is damaged."""
    try:
        return directory.accepted().idempotency or ""
    except (DamagedRecord, FileNotFoundError):
        return ""


def _digest_of_key(idempotency_key: str) -> str:
    return hashlib.sha256(idempotency_key.encode()).hexdigest()


def _canonical(spec: BaseModel | str) -> tuple[str, str]:
    """The specification as JSON text, and a digest that ignores whitespace and key order."""
    data: Any = json.loads(spec) if isinstance(spec, str) else spec.model_dump(mode="json")
    if not isinstance(data, dict):
        raise TypeError("a job's specification must be a JSON object")
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text, hashlib.sha256(text.encode()).hexdigest()
