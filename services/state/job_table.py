"""Jobs: created once, moved along the ONE table of transitions, removed when they are over.

The rule: one function changes a state by compare-and-set and writes the event ``job.status``, so the event stream shows
exactly what happened. If the table has the jobs' directories, it saves each change there before acknowledging it. It
does not interpret specifications.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from pydantic import BaseModel

from gspo_core.log.records import AcceptedJob, DamagedRecord
from services.state.client import Away
from services.state.job_claims import JobClaims
from services.state.jobs import (
    CancelManner,
    DesiredState,
    IllegalTransition,
    JobConflict,
    JobInUse,
    JobNotFound,
    JobRecord,
    JobStatus,
    StatusReason,
    WentBack,
    default_reason,
    new_job_id,
    sources_of,
)
from services.state.keys import check_job_id, job_key, job_keys, service_key, service_keys
from services.state.refusals import Conflict, Forbidden, Missing

if TYPE_CHECKING:
    from services.files.job_records import JobRecords

# What "begin_removal" answers where another job may have been made from this one meanwhile.
AGAIN = b"again"
_TERMINAL = [status for status in JobStatus if status.is_terminal]


class JobTable(JobClaims):
    """What is being made of a job keeps it from being removed for at most an hour."""

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

    async def _accept_once(self, job: str, wanted: AcceptedJob) -> tuple[str, AcceptedJob]:
        """All requests under one key get one job, even if the server is wiped before the key is on disk: another
        may then have taken the key, and this one's job gives way to its job."""
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

    async def retell(self, job: str, token: str, reason: StatusReason) -> None:
        """Say a job's present reason in newer words, for those who look at it: no event, and nothing on disk.

        Nothing happens where the job has another reason by now. Raises Fenced.
        """
        await self._functions.call("retell", self._keys(job), token, reason.code, reason.message)

    async def set_desired_state(
        self, job: str, desired: DesiredState | str, manner: CancelManner = CancelManner.NOW
    ) -> JobRecord:
        """Record the user's wish; the owner carries it out. A job that waits for a trainer is cancelled at once, if
        nothing of it has begun, or nothing is to be drained or saved.

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

        ``went_back``: where it goes on, if not where it ended; its files say so already, or the next trainer writes it.
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
        ``made_from``: the job that a job needs, which stays; it may look at files.

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
            if is_gone and self._saved is not None:  # a reader may have saved what an environment says of itself
                await asyncio.to_thread(self._saved.remove, job)

    async def _begin_removal(self, job: str, made_from: Callable[[JobRecord], str | None]) -> str:
        """The digest of the idempotency key that it was submitted under, or an empty text."""
        while True:
            record = await self.get(job)
            known, removing = await self._redis.hmget(job_key(job, "job"), "ended_uses", "removing")
            if removing is None and record.status.is_terminal:
                others = [other async for other in self._all()]
                child = await asyncio.to_thread(_child_of, job, others, made_from)
                if child is not None:
                    raise JobInUse(job, f"{child.id} was made from it")
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


def _child_of(job: str, others: Iterable[JobRecord], made_from: Callable[[JobRecord], str | None]) -> JobRecord | None:
    return next((one for one in others if made_from(one) == job), None)


def _key_digest(directory: JobRecords) -> str:
    """Digest of the idempotency key it was submitted under; empty if there is none, or its record is damaged."""
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
