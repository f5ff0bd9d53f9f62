"""How the API shows what the store holds.

One rule: shapes of answers are decided here and nowhere else, and every answer has a model, which describes it in the
OpenAPI document. It reads nothing and decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Generic, Literal, Protocol, TypeVar

from pydantic import BeforeValidator, ConfigDict

from gspo_core.documented import Described
from gspo_core.json_value import JSON
from services.state.store import JobEvent, JobRecord, StatusReason


class Identified(Protocol):
    @property
    def id(self) -> str: ...


Item = TypeVar("Item")
T = TypeVar("T")
Listed = TypeVar("Listed", bound=Identified)


def said(value: JSON) -> JSON:
    """As UTF-8 can say it: earlier releases stored halves of surrogate pairs."""
    if isinstance(value, str):
        return _said_text(value)
    if isinstance(value, dict):
        return {_said_text(name): said(item) for name, item in value.items()}
    return [said(item) for item in value] if isinstance(value, list) else value


def _said_text(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


Said = Annotated[T, BeforeValidator(said)]
"""For what users and their code wrote."""


class View(Described):
    model_config = ConfigDict(frozen=True)


class Page(View, Generic[Item]):
    """A part of a list; ask for the next with `after` = the id of its last item while `has_more`."""

    object: Literal["list"] = "list"
    data: list[Item]
    has_more: bool
    first_id: str | None
    last_id: str | None


class ReasonView(View):
    """Why a job is where it is."""

    code: str
    message: str
    since: str | None


class AttemptView(View):
    """One trainer's ownership of a job."""

    attempt: int
    epoch: int
    trainer: str
    began_at: str
    ended_at: str | None
    code: str | None
    """What ended it: `trainer_lost`, `process_lost`, `rank_lost`, `no_progress`, `data_unreadable`, `handed_over`,
    `yielded`, `redis_unavailable`, `disk_full`, or the reason of the job's end."""
    message: str | None
    step: int | None
    """Where the job was then."""


class ParentView(View):
    """The job that a job was forked from."""

    job: str
    step: int
    same_batches: bool
    last: int | None
    """The step whose batch is the last that it is fed; null: as far as they are kept."""
    without: list[str]
    """What these batches lack: groups, episodes, parts of the reward."""


class RecordedView(View):
    """The job whose recorded episodes a job is trained on."""

    job: str
    first: int | None
    last: int | None
    """The last of its steps that are trained on."""
    traces: bool
    """They are conversations of keys that talk."""
    rewards: str | None
    """Digest of the rewards that they were given in place of their own."""


class JobView(View):
    """A job."""

    object: Literal["job"] = "job"
    id: str
    name: str | None
    model: str
    environments: list[str]
    """What each is loaded from."""
    objective: str | None
    """Its name; null for one that has none."""
    status: str
    desired_state: str
    """What its user asked for; the trainer that owns the job brings it about."""
    status_reason: ReasonView | None
    """Why it does not move, or what ended it."""
    attempt: int
    """How many trainers have owned the job."""
    step: int
    """Steps that it has taken."""
    steps: int
    """Steps until it has succeeded."""
    policy_version: int | None
    """The newest published version of the weights."""
    created_at: str
    started_at: str | None
    finished_at: str | None
    metadata: dict[str, str]
    settings: dict[str, Any]
    """Live settings, which replace what was submitted."""
    attempts: list[AttemptView]
    """The last trainers that owned it, each with what ended it."""
    parent: ParentView | None
    """What it was forked from; null for a job that began with its model."""
    recorded: RecordedView | None
    """The recorded episodes that it is trained on; null for a job that samples its own."""
    links: dict[str, str]


class MemoryPhaseView(View):
    """What a rank of the learner holds in one phase, in bytes by kind."""

    phase: str
    device_bytes: dict[str, int]
    host_bytes: dict[str, int]


class MemoryPlanView(View):
    """Whether a job fits given GPUs, under which settings, and what a step would cost."""

    object: Literal["memory.plan"] = "memory.plan"
    gpus: str
    fits: bool
    refusal: str | None
    """Why it does not fit, and what would."""
    learner: dict[str, int | str | bool]
    """What `auto` becomes."""
    usable_bytes: int
    """On each GPU."""
    phases: list[MemoryPhaseView]
    step_s: float
    """Seconds of a step without rollouts, on the assumptions."""
    assumptions: list[str]


class PlannedJobView(JobView):
    """A job, and with `gpus` what its learner takes of them."""

    memory: MemoryPlanView | None = None
    """On the `gpus` that were asked for."""


class PlanView(View):
    """A job as it would be; nothing was created."""

    object: Literal["job.plan"] = "job.plan"
    valid: Literal[True] = True
    """The specification is one; `warnings` and `unchecked` say what may still keep it from running."""
    config: dict[str, Any]
    """The specification with every default spelled out."""
    warnings: list[str]
    """Settings that are legal but known to be wrong, and files that the API does not find."""
    unchecked: list[str]
    """What only trainers and rollout workers can tell."""
    estimate: dict[str, int]
    capacity: dict[str, int]
    memory: MemoryPlanView | None = None
    """The learner's, on the `gpus` that were asked for."""


class ConfigView(View):
    """The specification of a job with every default spelled out."""

    object: Literal["job.config"] = "job.config"
    job_id: str
    config: Said[dict[str, Any]]
    warnings: list[str]


class EventView(View):
    """Something that happened to a job."""

    object: Literal["event"] = "event"
    id: str
    """Resume after it."""
    type: str
    created_at: str
    data: dict[str, Any]


class MetricsView(View):
    """Metrics of a job, one row for each step."""

    object: Literal["job.metrics"] = "job.metrics"
    job_id: str
    data: list[dict[str, float | dict[str, float]]]
    """`step` and the metrics by name."""
    has_more: bool
    """There are later steps; ask again with `from_step` = the last step + 1."""


class ReadyView(View):
    """This process can serve; `degraded` lists what others cannot do."""

    status: Literal["ready"] = "ready"
    degraded: list[str]


def job_view(job: JobRecord) -> JobView:
    spec = job.spec_data
    return JobView(
        id=job.id,
        name=spec.get("name"),
        model=spec["model"],
        environments=[one["ref"] for one in spec.get("environments", ())],
        objective=(spec.get("objective") or {}).get("name"),
        status=str(job.status),
        desired_state=str(job.desired_state),
        status_reason=_reason(job),
        attempt=job.attempt,
        step=job.step,
        steps=job.settings.get("steps", spec["steps"]),
        policy_version=job.policy_version,
        created_at=job.created_at,
        started_at=job.started_at,
        finished_at=job.finished_at,
        metadata=spec.get("metadata", {}),
        settings=dict(job.settings),
        attempts=[AttemptView(**asdict(one)) for one in job.attempts],
        parent=_parent(spec["parent"]) if spec.get("parent") else None,
        recorded=RecordedView(**spec["recorded"]) if spec.get("recorded") else None,
        links={name: f"/v1/jobs/{job.id}{path}" for name, path in _LINKS.items()} | {"ui": f"/ui/#/jobs/{job.id}"},
    )


_LINKS = {
    "self": "",
    **{
        name: f"/{name}"
        for name in (
            *("config", "events", "metrics", "groups", "episodes", "versions", "checkpoints", "environments"),
            *("pause", "resume", "cancel", "fork"),
        )
    },
}


def _reason(job: JobRecord) -> ReasonView | None:
    reason = job.status_reason
    if reason is None and not job.status.is_terminal:
        reason = StatusReason("waiting_for_workers", "no trainer has taken this job yet", job.created_at)
    return ReasonView(code=reason.code, message=reason.message, since=reason.since) if reason else None


def event_view(event: JobEvent) -> EventView:
    return EventView(id=event.id, type=event.type, created_at=event.created_at, data=event.data)


def _parent(at: Mapping[str, Any]) -> ParentView:
    known = {"job": at["job"], "step": at["step"], "same_batches": at["same_batches"]}
    return ParentView(**known, last=at.get("last"), without=at.get("without", []))


def page(items: Sequence[Listed], limit: int) -> Page[Listed]:
    """A page of `items`, which hold one more than `limit` where there are more."""
    shown = list(items[:limit])
    ids = [item.id for item in shown]
    return Page[Any](
        data=shown,
        has_more=len(items) > limit,
        first_id=ids[0] if ids else None,
        last_id=ids[-1] if ids else None,
    )
