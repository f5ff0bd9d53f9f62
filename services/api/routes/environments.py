"""Environments: registered under a name, each content an immutable version; examined and tried by workers."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

from fastapi import Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from gspo_core.documented import FreeForm
from gspo_core.outbound import AddressRefused
from gspo_core.spec import AgentSpec
from services.api.http import audit
from services.api.http.access import Caller
from services.api.http.context import ApiContext, ContextOf
from services.api.http.errors import FINAL, RequestRefused, documented
from services.api.http.etags import IfMatch, IfNoneMatch, require_match, tagged
from services.api.http.listing import after_id
from services.api.http.requests import read_bounded
from services.api.http.routers import v1_router
from services.api.submission.environment_sources import ConfigRefused, Loadable, Source, judge, loadable
from services.api.views.store_views import Page, Said, View, page
from services.files.environments.named_urls import AddressNamed
from services.files.environments.registry import (
    NAME,
    EnvironmentNotFound,
    EnvironmentRegistry,
    NameTaken,
    Registration,
    parse_reference,
)
from services.state.process_requests import NoAnswer, NoWorkerThere, TooManyRequests, WorkerRequestFailed

router = v1_router("environments", "/environments")

Name = Annotated[str, StringConstraints(pattern=f"^{NAME.pattern}$")]
# An examination ends by itself sooner.
VALIDATE_S, ASK_S = 130.0, 60.0
MAX_JOBS = 10_000
PYTHON = "text/x-python"
ARCHIVES = ("application/zip", "application/gzip", "application/x-tar")
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_ASKING = documented(409, 413, 415)


class NewEnvironment(BaseModel):
    """An environment to register."""

    model_config = ConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        json_schema_extra={
            "examples": [
                {"name": "sums", "source": {"type": "reference", "ref": "environments.calculator:Calculator"}},
                {"name": "lake", "source": {"type": "gym", "id": "FrozenLake-v1", "config": {"show": "render"}}},
                {"name": "shop", "source": {"type": "openenv", "url": "wss://shop.example.org/ws"}},
            ]
        },
    )

    name: Name
    """Lower-case letters, digits, `_` and `-`. It belongs to the owner of the key that used it first."""
    source: Source
    agent: AgentSpec | None = None
    """An agent plays it, started so; the source is then what has its tasks, or its function `run`. Jobs need not say it
    again."""


class UploadQuery(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    name: Name
    """The name to register it under."""
    ref: Annotated[
        str,
        StringConstraints(
            pattern=r"^([A-Za-z_][A-Za-z0-9_./-]*\.py|[A-Za-z_][A-Za-z0-9_.]*):[A-Za-z_][A-Za-z0-9_.]*$", max_length=512
        ),
    ]
    """Where the class is in it: `file.py:Class`, or `package.module:Class` in an archive."""
    agent: Annotated[str, StringConstraints(max_length=65_536)] | None = None
    """How its agent is started, as JSON: `{"command": ["python", "agent.py"]}`. A program runs beside the file of
    `ref`."""


class EnvironmentQuery(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    """Length of a page."""
    after: str | None = None
    """Id of the item before the page."""
    name: str | None = None
    """Only versions of this name."""


class TasksQuery(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    split: Literal["train", "eval"] = "train"
    """`eval`: held-out tasks."""
    first: Annotated[int, Field(ge=0, le=2**53)] = 0
    """Index of the first task wanted."""
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    """How many."""


class ScriptedCall(BaseModel):
    """A call of a tool."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, StringConstraints(max_length=200)]
    arguments: FreeForm = Field(default_factory=dict)


class ScriptedTurn(BaseModel):
    """One turn of the policy."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    text: Annotated[str, StringConstraints(max_length=20_000)] = ""
    """Text of the turn."""
    calls: Annotated[list[ScriptedCall], Field(max_length=32)] = []
    """Tool calls, in order."""


class Trial(BaseModel):
    """One episode to play."""

    model_config = ConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        json_schema_extra={
            "examples": [
                {"turns": [{"calls": [{"name": "calculate", "arguments": {"expression": "1+1"}}]}, {"text": "2"}]},
                {"task": 3, "split": "eval", "turns": None},
            ]
        },
    )

    split: Literal["train", "eval"] = "train"
    """`eval`: a held-out task."""
    task: Annotated[int, Field(ge=0, le=2**53)] = 0
    """Which task."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """The environment's seed."""
    turns: Annotated[list[ScriptedTurn], Field(max_length=64)] | None = None
    """The policy's turns. Null: those of the environment's own `oracle`."""


class EnvironmentView(View):
    """A version of an environment. A job names it as `ref`."""

    object: Literal["environment"] = "environment"
    id: str
    """`NAME@VERSION`."""
    name: str
    version: int
    status: Literal["validating", "ready", "invalid"]
    """`validating` until a rollout worker has examined it."""
    source: Said[dict[str, Any]]
    agent: Said[dict[str, Any] | None]
    """How its agent is started, if it has one."""
    digest: str
    """Names its content: the same content is the same version."""
    created_at: str
    failures: Said[list[str]]
    """Why it is invalid."""


class ReportView(View):
    """The findings of an examination: episodes without a model, on a rollout worker."""

    object: Literal["environment.report"] = "environment.report"
    environment: str
    ok: bool
    checks: Said[list[dict[str, Any]]]


class TrialView(View):
    """One episode, as it was played."""

    object: Literal["environment.trial"] = "environment.trial"
    environment: str
    transcript: Said[list[dict[str, Any]]]
    stop_reason: str | None
    reward: float
    reward_parts: dict[str, float]


class TasksView(View):
    """Some tasks in order."""

    object: Literal["environment.tasks"] = "environment.tasks"
    environment: str
    total: int
    tasks: Said[list[dict[str, Any]]]


class SchemaView(View):
    """Its tools, limits and numbers of tasks."""

    object: Literal["environment.schema"] = "environment.schema"
    environment: str
    description: Said[dict[str, Any]]


@router.post("", status_code=201, responses={200: {"model": EnvironmentView}, **_ASKING})
async def register(wanted: NewEnvironment, request: Request, response: Response, context: ContextOf) -> EnvironmentView:
    """Register an environment. The same content under the same name is the same version: 200 instead of 201."""
    try:
        found = loadable(wanted.source)
        await asyncio.to_thread(judge, found, wanted.agent, context.networks)
    except AddressRefused as error:
        where = error.where if isinstance(error, AddressNamed) else "url"
        raise RequestRefused(422, "address_refused", str(error), param=f"source.{where}") from None
    except ConfigRefused as error:
        raise RequestRefused(422, "validation_failed", str(error), param="source.config") from None
    source = wanted.source.model_dump(mode="json")
    agent = None if wanted.agent is None else wanted.agent.model_dump(mode="json", exclude_unset=True)
    return await _add(context, _caller(request), response, wanted.name, source, found, upload=None, agent=agent)


@router.post(
    "/uploads",
    status_code=201,
    responses={200: {"model": EnvironmentView}, **_ASKING},
    openapi_extra={
        "requestBody": {"required": True, "content": {kind: _BINARY for kind in (PYTHON, *ARCHIVES)}},
    },
)
async def upload(
    query: Annotated[UploadQuery, Query()], request: Request, response: Response, context: ContextOf
) -> EnvironmentView:
    """Register an uploaded file (`text/x-python`) or package (zip, or tar, plain or gzipped). Off unless enabled."""
    if not context.may_upload:
        raise RequestRefused(403, "uploads_disabled", "the operator has not enabled uploads (GSPO_ENV_UPLOADS)")
    from services.files.environments.archives import (  # most installations take no uploads
        MAX_PACKED_BYTES,
        ArchiveRefused,
        unpack,
    )

    agent = await _agent_of(query, context)
    packed = await read_bounded(request, (PYTHON, *ARCHIVES), MAX_PACKED_BYTES)
    registry = _registry(context)
    kind = request.headers["content-type"].partition(";")[0].strip().lower()
    module = query.ref.rpartition(":")[0]
    if kind == PYTHON and ("/" in module or not module.endswith(".py")):
        raise RequestRefused(422, "validation_failed", "for a single file, the ref must be file.py:Class", param="ref")
    if ".." in module.split("/"):
        raise RequestRefused(422, "validation_failed", "the ref points outside of the upload", param="ref")
    digest = hashlib.sha256(b"\0".join((kind.encode(), module.encode() if kind == PYTHON else b"", packed))).hexdigest()

    def check(folder: FilePath) -> None:
        path = module if module.endswith(".py") else module.replace(".", "/")
        if not any((folder / name).is_file() for name in (path, f"{path}.py", f"{path}/__init__.py")):
            raise RequestRefused(422, "validation_failed", f"there is no {module} in the upload", param="ref")

    try:
        await asyncio.to_thread(registry.require_name, query.name, _owner(_caller(request)))
        only = module if kind == PYTHON else None
        await asyncio.to_thread(unpack, packed, registry.upload_dir(digest), file_name=only, check=check)
    except NameTaken as error:
        raise _taken(error) from None
    except ArchiveRefused as error:
        raise RequestRefused(422, "archive_refused", str(error)) from None
    source = {"type": "upload", "ref": query.ref, "size_bytes": len(packed)}
    found = Loadable(query.ref, {})
    return await _add(context, _caller(request), response, query.name, source, found, upload=digest, agent=agent)


@router.get("")
async def list_environments(
    query: Annotated[EnvironmentQuery, Query()], request: Request, context: ContextOf
) -> Page[EnvironmentView]:
    """Registered versions by name; only admins see those of others."""
    caller = _caller(request)

    def find() -> list[EnvironmentView]:
        registry = _registry(context)
        held = [one for one in registry.all() if query.name in (None, one.name) and _sees(caller, one)]
        return [_view(registry, one) for one in after_id(held, query.after, query.limit)]

    return page(await asyncio.to_thread(find), query.limit)


@router.get(
    "/{environment}",
    response_model=EnvironmentView,
    responses={304: {"description": "As `If-None-Match` says"}},
)
async def get_environment(
    environment: str, request: Request, context: ContextOf, if_none_match: IfNoneMatch = None
) -> Response:
    """One version: `name@version`, or the newest one of a `name`."""
    one = await _get(context, request, environment)
    return tagged(await asyncio.to_thread(_view, _registry(context), one), one.digest[:16], if_none_match)


@router.delete("/{environment}", status_code=204, responses=documented(409, 412))
async def remove_environment(environment: str, request: Request, context: ContextOf, if_match: IfMatch = None) -> None:
    """Remove a version, named in full. Refused while an unfinished job refers to it. Its number is not used again."""
    parsed = parse_reference(environment)
    if parsed is None or parsed[1] is None:
        raise RequestRefused(422, "validation_failed", "name the version: name@version", param="environment")
    one = await _get(context, request, environment, to_change=True)
    require_match(if_match, one.digest[:16])
    for job in await context.store.jobs.page(MAX_JOBS, order="desc"):
        refs = [entry.get("ref") for entry in job.spec_data.get("environments", ())]
        if not job.status.is_terminal and one.id in refs:
            raise RequestRefused(409, "environment_in_use", f"job {job.id} uses {one.id}", headers=FINAL)
    await asyncio.to_thread(_registry(context).remove, one)
    audit.changed("environment", one.id, old={"owner": one.owner, "digest": one.digest})


@router.post("/{environment}/validate")
async def validate_environment(environment: str, request: Request, context: ContextOf) -> ReportView:
    """Have a rollout worker examine it: some dozens of episodes without a model, in a separate process."""
    one = await _get(context, request, environment)
    report = await _ask(context, {"environment": one.id, "do": "validate"}, VALIDATE_S)
    return ReportView(environment=one.id, ok=report["ok"], checks=report["checks"])


@router.post("/{environment}/try", responses=documented(413, 415))
async def try_environment(environment: str, trial: Trial, request: Request, context: ContextOf) -> TrialView:
    """Have a rollout worker play one episode of it with the given turns, or with those of its oracle."""
    one = await _get(context, request, environment)
    played = await _ask(context, {"environment": one.id, "do": "play", **trial.model_dump(mode="json")}, ASK_S)
    return TrialView(environment=one.id, **played)


@router.get("/{environment}/tasks")
async def list_tasks(
    environment: str, query: Annotated[TasksQuery, Query()], request: Request, context: ContextOf
) -> TasksView:
    """Some of its tasks, asked of a rollout worker."""
    one = await _get(context, request, environment)
    wanted = {"split": query.split, "first": query.first, "count": query.limit}
    return TasksView(environment=one.id, **await _ask(context, {"environment": one.id, "do": "tasks", **wanted}, ASK_S))


@router.get("/{environment}/schema")
async def get_schema(environment: str, request: Request, context: ContextOf) -> SchemaView:
    """Its tools and limits, asked of a rollout worker."""
    one = await _get(context, request, environment)
    description = await _ask(context, {"environment": one.id, "do": "schema"}, ASK_S)
    return SchemaView(environment=one.id, description=description)


async def _add(
    context: ApiContext,
    caller: Caller,
    response: Response,
    name: str,
    source: Mapping[str, Any],
    found: Loadable,
    *,
    upload: str | None,
    agent: Mapping[str, Any] | None,
) -> EnvironmentView:
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    wanted = Registration(
        name, 0, _owner(caller), now, source, found.ref, found.config, upload, found.is_remote, agent=agent
    )
    registry = _registry(context)
    try:
        one, is_new = await asyncio.to_thread(registry.add, wanted)
    except NameTaken as error:
        raise _taken(error) from None
    if is_new:
        audit.changed("environment", one.id, new={"owner": one.owner, "digest": one.digest})
        with contextlib.suppress(TooManyRequests):  # then it stays unexamined until someone asks for it
            await context.worker_requests.send({"environment": one.id, "do": "validate"}, is_awaited=False)
    response.status_code = 201 if is_new else 200
    response.headers["Location"] = f"/v1/environments/{one.id}"
    return await asyncio.to_thread(_view, registry, one)


async def _agent_of(query: UploadQuery, context: ApiContext) -> Mapping[str, Any] | None:
    """Raises RequestRefused."""
    if query.agent is None:
        return None
    try:
        agent = AgentSpec.model_validate_json(query.agent)
        await asyncio.to_thread(judge, Loadable(query.ref, {}), agent, context.networks)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise RequestRefused(422, "validation_failed", f"{where}: {first['msg']}", param="agent") from None
    except AddressRefused as error:
        raise RequestRefused(422, "address_refused", str(error), param="agent") from None
    if ".." in (agent.reward or "").rpartition(":")[0].split("/"):
        raise RequestRefused(422, "validation_failed", "the reward points outside of the upload", param="agent")
    return agent.model_dump(mode="json", exclude_unset=True)


def _taken(error: NameTaken) -> RequestRefused:
    return RequestRefused(409, "name_taken", str(error), param="name", headers=FINAL)


async def _ask(context: ApiContext, order: Mapping[str, Any], timeout_s: float) -> Any:
    try:
        return await context.worker_requests.ask(order, timeout_s)
    except WorkerRequestFailed as error:
        raise RequestRefused(422, "environment_invalid", str(error)[:2000], param="environment") from None
    except NoWorkerThere:
        message = "no rollout worker is running; start one and try again"
        raise RequestRefused(503, "no_worker", message, headers={"Retry-After": "5"}) from None
    except NoAnswer:
        message = "the rollout worker that took this request has not answered; try again"
        raise RequestRefused(503, "no_answer", message, headers={"Retry-After": "5"}) from None
    except TooManyRequests:
        message = "too many requests to rollout workers are in progress; try again later"
        raise RequestRefused(429, "capacity", message, headers={"Retry-After": "5"}) from None


async def _get(context: ApiContext, request: Request, reference: str, *, to_change: bool = False) -> Registration:
    caller = _caller(request)
    one = await asyncio.to_thread(_registry(context).get, reference)
    if not (caller.sees(one.owner) if to_change else _sees(caller, one)):
        raise EnvironmentNotFound(reference)
    return one


def _owner(caller: Caller) -> str:
    """The owner of environments that it registers."""
    return "" if caller.is_admin else caller.owner


def _sees(caller: Caller, one: Registration) -> bool:
    """Everyone sees an admin's environments."""
    return one.owner == "" or caller.sees(one.owner)


def _view(registry: EnvironmentRegistry, one: Registration) -> EnvironmentView:
    report = registry.report(one)
    status: Literal["validating", "ready", "invalid"] = "validating"
    failures: list[str] = []
    if report is not None:
        status = "ready" if report["ok"] else "invalid"
        failures = [str(check["message"]) for check in report["checks"] if check["status"] == "fail"]
    return EnvironmentView(
        id=one.id,
        name=one.name,
        version=one.version,
        status=status,
        source=dict(one.source),
        agent=None if one.agent is None else dict(one.agent),
        digest=one.digest,
        created_at=one.created_at,
        failures=failures,
    )


def _registry(context: ApiContext) -> EnvironmentRegistry:
    if context.registry is None:
        raise RequestRefused(404, "environment_not_found", "this process has no data directory to keep environments in")
    return context.registry


def _caller(request: Request) -> Caller:
    caller: Caller = request.scope["caller"]
    return caller
