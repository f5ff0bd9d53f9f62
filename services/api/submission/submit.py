"""Submitting a job in either dialect of the API: checks and pins its model, pins its environments, and finds the job of
a repeated request.

Rule: an accepted job stays accepted, whatever becomes of its environments; a repetition is compared with the original
job under the versions that the original was pinned to. This process may lack the files of models, which are mounted
where jobs run: what it misses is for a rollout worker to judge. It knows no routes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from gspo_core.spec import JobSpec
from gspo_core.spec_sizes import size_problems
from services.api.http.access import Caller
from services.api.http.context import ApiContext
from services.api.http.errors import RequestRefused, invalid
from services.api.submission.environment_refs import pin, pinned_as
from services.files.data_dir import HubDir, HubKind, HubName, commit_of
from services.files.job_records import JobRecords
from services.state.keys import InvalidJobId
from services.state.process_requests import NoAnswer, NoWorkerThere, TooManyRequests, WorkerRequestFailed
from services.state.store import JobConflict, JobNotFound, JobRecord

# A worker looks at a model's files in milliseconds, unless it is busy with examinations.
LOOK_AT_MODEL_S = 3.0

Spec = TypeVar("Spec", bound=JobSpec)


async def submit(
    context: ApiContext,
    spec: JobSpec,
    caller: Caller,
    *,
    key: str | None,
    job_id: str,
    is_repetition: bool = False,
    bring: Callable[[JobSpec, str], Awaitable[None]] | None = None,
) -> JobRecord:
    """A new job under ``job_id``, or the earlier one of the same key.

    ``is_repetition``: ``job_id`` was given to an earlier request, which may have made its job. ``bring``: what it needs
    of others, where the request has more to say of that than the specification. Raises RequestRefused, JobConflict.
    """
    spec = await asyncio.to_thread(pin_model, spec, context.hub)
    own_key = _own(caller, key)

    async def create(wanted: JobSpec) -> JobRecord:
        return await context.store.jobs.create(wanted, idempotency_key=own_key, job_id=job_id, owner=caller.owner)

    held = await _made_before(context, own_key, job_id, is_repetition=is_repetition)
    if spec.recorded is not None:
        from services.api.submission.recording import completed  # few jobs are trained on recorded episodes

        spec = await completed(context, spec, caller, held)
    if held is None:
        # An earlier request of this key may have got no further than what it brought.
        job_id = (await context.store.jobs.under(own_key) if own_key else None) or job_id
        pinned = await checked(context, spec, caller)
        unused = JobRecords(context.history.job_dir(job_id))
        try:
            async with _kept(context, spec):
                await (_bring(context, spec, caller, job_id) if bring is None else bring(spec, job_id))
                made = await create(pinned.as_submitted())
        except JobConflict:
            await asyncio.to_thread(unused.forget_prepared)
            # A request sent at the same time may have found other versions.
            held = await _made_before(context, own_key, job_id, is_repetition=is_repetition)
            if held is None:
                raise
        except Exception:
            if own_key is None:  # it can never be asked for again
                await asyncio.to_thread(unused.forget_prepared)
            raise
        else:
            if made.id != job_id:
                await asyncio.to_thread(unused.forget_prepared)
            return made
    return await create(filled_in_as(model_as(pinned_as(spec, held), held), held))


async def made_under(context: ApiContext, caller: Caller, key: str | None) -> JobRecord | None:
    """The job of an earlier request of this key."""
    return await _made_before(context, _own(caller, key), "", is_repetition=False)


def _own(caller: Caller, key: str | None) -> str | None:
    """Keys of different callers never meet: the same text from another caller neither sees nor blocks a job."""
    return f"{caller.name}:{key}" if key else None


async def checked(context: ApiContext, spec: Spec, caller: Caller) -> Spec:
    """With its environments pinned. Raises RequestRefused for what is refused whatever the job is made from."""
    from services.api.submission.prompt_check import check_environments  # most processes read more than they submit

    require_reasonable(spec)
    await check_model(context, spec, caller)
    await check_environments(context, spec)
    return await asyncio.to_thread(pin, spec, context.registry, caller, context.networks)


def require_reasonable(spec: JobSpec) -> None:
    """Refuses sizes that no installation holds. Raises RequestRefused."""
    if too_large := size_problems(spec):
        raise invalid(too_large)


@contextlib.asynccontextmanager
async def _kept(context: ApiContext, spec: JobSpec) -> AsyncIterator[None]:
    """The job that it is made from cannot be removed meanwhile. Raises JobNotFound."""
    source = spec.parent or spec.recorded
    if source is None:
        yield
        return
    async with context.store.jobs.used(source.job):
        yield


async def _bring(context: ApiContext, spec: JobSpec, caller: Caller, job_id: str) -> None:
    if spec.parent is not None:
        from services.api.submission.forking import bring_parent  # few jobs are forks

        await bring_parent(context, spec, caller, job_id, {})
    if spec.recorded is not None:
        from services.api.submission.recording import bring_recorded

        await bring_recorded(context, spec, caller, job_id, {})


async def _made_before(
    context: ApiContext, own_key: str | None, job_id: str, *, is_repetition: bool
) -> JobRecord | None:
    job = await context.store.jobs.under(own_key) if own_key else None
    if job is None and is_repetition:
        job = job_id
    try:
        return None if job is None else await context.store.jobs.get(job)
    except JobNotFound:  # the first request got no further than its key
        return None


def pin_model(spec: Spec, hub: HubDir | None) -> Spec:
    """With the directory of the commit that was fetched, where the model is a name of the hub: every process then reads
    the same files for as long as the job lasts. A directory of that name wins, and what was never fetched stays as it
    is, because others may see what the API does not. Nothing is downloaded. Reads directories: call it in a thread."""
    name = HubName.parse(spec.model)
    if hub is None or name is None or Path(spec.model).is_dir():
        return spec
    fetched = hub.fetched(HubKind.MODEL, name)
    return spec if fetched is None else spec.model_copy(update={"model": str(fetched)})


def model_as(spec: Spec, held: JobRecord) -> Spec:
    """With the commit of the earlier job, where both name the same model of the hub."""
    ours, theirs = Path(spec.model), Path(str(held.spec_data.get("model")))
    are_commits = commit_of(ours) is not None and commit_of(theirs) is not None
    if are_commits and _repository(ours) == _repository(theirs):
        return spec.model_copy(update={"model": str(theirs)})
    return spec


def filled_in_as(spec: Spec, held: JobRecord) -> Spec:
    """With what the earlier job was given where it said nothing: another release gives other things."""
    theirs = held.spec_data.get("optimizer", {}).get("signal_scaling")
    named = spec.with_name(held.spec_data.get("objective", {}).get("name"))
    if theirs is None and not named.optimizer.signal_scaling:  # releases that gave none stored no false either
        return named.with_signal_scaling(None)
    return named.with_signal_scaling(True) if named.wants_signal_scaling else named


def _repository(directory: Path) -> tuple[Path, str]:
    return directory.parent, directory.name.rpartition("@")[0]


async def check_model(context: ApiContext, spec: JobSpec, caller: Caller) -> None:
    """Refuses a model that cannot be trained, if a process that sees its files says so, and what a job that the caller
    may not see has made. Raises RequestRefused."""
    model = spec.model
    if not await _may_read(context, model, caller):
        raise _model_refused(f"there is no directory {model} (where rollout workers run)")
    from gspo_core.model_files import refusal_of  # most processes read more than they submit

    seen_here = await asyncio.to_thread(refusal_of, Path(model), spec.chat.calls)
    if seen_here is None:
        return
    try:
        seen_there = await _ask_a_worker(context, spec)
    except (NoAnswer, NoWorkerThere, TooManyRequests, WorkerRequestFailed):
        if await asyncio.to_thread(Path(model).is_dir):
            raise _model_refused(seen_here) from None
        return
    if seen_there is not None:
        is_of_hub = HubName.parse(model) is not None
        advice = f"; if it is a model of the Hugging Face hub, run: gspo fetch {model}" if is_of_hub else ""
        raise _model_refused(f"{seen_there} (where rollout workers run){advice}")


async def _may_read(context: ApiContext, model: str, caller: Caller) -> bool:
    """Whether the caller may use the model. In a missing job's folder it may not, as in that of another owner's job."""
    jobs_dir = context.history.jobs_dir.path
    try:
        path, jobs = await asyncio.to_thread(lambda: (Path(model).resolve(), jobs_dir.resolve()))
    except (OSError, RuntimeError, ValueError):  # links in a circle, or no name of a file
        return True
    if caller.is_admin or jobs not in path.parents:
        return True
    try:
        return caller.sees((await context.store.jobs.get(path.relative_to(jobs).parts[0])).owner)
    except (JobNotFound, InvalidJobId):
        return False


async def _ask_a_worker(context: ApiContext, spec: JobSpec) -> str | None:
    if not any(one.role == "rollout" and one.is_alive for one in await context.presence.members()):
        raise NoWorkerThere
    found = await context.worker_requests.ask(
        {"do": "model", "model": spec.model, "calls": spec.chat.calls}, LOOK_AT_MODEL_S
    )
    return None if found["problem"] is None else str(found["problem"])


def _model_refused(problem: str) -> RequestRefused:
    return RequestRefused(422, "model_invalid", problem, param="model")
