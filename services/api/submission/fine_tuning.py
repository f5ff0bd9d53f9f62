"""Jobs in the terms of OpenAI's fine-tuning API, so that its unmodified client drives this service.

Rule: a request is translated whole, or refused by name where it would mean something else here (a grader of OpenAI's)
or nothing at all: a job that trains otherwise than asked costs more than a refusal. Null and `auto` mean "left out". It
stores nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StringConstraints
from typing_extensions import TypedDict

from gspo_core.spec import JobSpec
from services.api.http.errors import RequestRefused
from services.api.views.store_views import ReasonView, View, job_view
from services.state.jobs import JobStatus
from services.state.store import JobEvent, JobRecord

ENVIRONMENT = "env:"
STATUSES: Mapping[JobStatus, str] = {
    JobStatus.QUEUED: "queued",
    JobStatus.STARTING: "queued",
    JobStatus.RUNNING: "running",
    JobStatus.PAUSING: "running",
    JobStatus.PAUSED: "paused",
    JobStatus.RESUMING: "running",
    JobStatus.CANCELLING: "running",
    JobStatus.SUCCEEDED: "succeeded",
    JobStatus.FAILED: "failed",
    JobStatus.CANCELLED: "cancelled",
}
_LEVELS: Mapping[str, Literal["warn"]] = {"alert": "warn", "gap": "warn"}
# Fields that OpenAI places elsewhere; all other fields of a specification are taken as they are.
_OWN = frozenset({"name", "metadata", "seed", "model"})
# Hyperparameters of that API, and where a job says the same; each is a section and a key of it.
_TUNED: Mapping[str, tuple[str, ...]] = {
    "batch_size": ("groups_per_step",),
    "learning_rate": ("optimizer", "lr"),
    "eval_interval": ("evaluation", "every"),
}
# Those that mean nothing here, and what to say instead.
_ELSEWHERE: Mapping[str, str] = {
    "n_epochs": "a job is as long as its `steps`",
    "learning_rate_multiplier": "give `learning_rate`, or `optimizer.lr`",
    "compute_multiplier": "give `rollout.group_size` and `groups_per_step`",
    "eval_samples": "give `evaluation.tasks` and `evaluation.episodes_per_task`",
    "reasoning_effort": "give `chat.variables` of the model's template",
    "validation_file": "held-out tasks come from the environment: give `evaluation`",
    "integrations": "read metrics at /v1/jobs/{id}/metrics",
    "response_format": "the environment scores what the policy says",
}


class FineTuningRequest(BaseModel):
    """A job as the OpenAI client submits it; every field of a job specification may stand beside these."""

    model_config = ConfigDict(
        extra="allow",
        use_attribute_docstrings=True,
        json_schema_extra={
            "examples": [{"model": ".gspo/models/calculator-tiny", "training_file": "env:sums", "steps": 100}]
        },
    )

    model: Annotated[str, StringConstraints(min_length=1, max_length=1024)]
    """A model directory."""
    training_file: Annotated[str, StringConstraints(max_length=1100)]
    """`env:NAME`, `env:NAME@VERSION` or `env:package.module:Class`. With `environments`, the first of them."""
    hyperparameters: dict[str, JsonValue] | None = None
    """`batch_size` becomes `groups_per_step`, `learning_rate` becomes `optimizer.lr`, `eval_interval` becomes
    `evaluation.every`; `auto` leaves the default. Others are refused."""
    method: dict[str, JsonValue] | None = None
    """`{"type": "reinforcement", "reinforcement": {"grader": {"type": "env"}, "hyperparameters": {...}}}`."""
    metadata: dict[str, str] | None = None
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**63)] | None = None
    suffix: str | None = None
    """The job's name."""


class FacadeNumbers(TypedDict):
    batch_size: int | None
    learning_rate: float | None


class FacadeGrader(TypedDict):
    type: Literal["env"]


class FacadeReinforcement(TypedDict):
    grader: FacadeGrader
    hyperparameters: FacadeNumbers


class FacadeMethod(TypedDict):
    type: Literal["reinforcement"]
    reinforcement: FacadeReinforcement


class FacadeError(View):
    code: str
    message: str
    param: str | None = None


class FineTuningJob(View):
    """A job, as OpenAI shows one, with what it has beyond that."""

    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    id: str
    created_at: int
    finished_at: int | None
    model: str
    fine_tuned_model: str | None
    status: str
    training_file: str
    validation_file: str | None = None
    hyperparameters: FacadeNumbers
    method: FacadeMethod
    organization_id: str
    result_files: list[str]
    seed: int
    trained_tokens: int | None = None
    error: FacadeError | None
    metadata: dict[str, str]
    status_reason: ReasonView | None
    policy_version: int | None
    step: int
    steps: int
    links: dict[str, str]


class FineTuningEvent(View):
    """Something that happened to a job."""

    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    id: str
    created_at: int
    level: Literal["info", "warn", "error"]
    message: str
    type: Literal["message", "metrics"]
    data: dict[str, Any]


def specification(given: FineTuningRequest) -> dict[str, Any]:
    """The specification that a native client would have submitted. Raises RequestRefused."""
    further = {name: value for name, value in (given.model_extra or {}).items() if value is not None}
    _refuse_unknown(further, JobSpec.model_fields.keys() - _OWN, "")
    spec = dict(further)
    spec["model"] = given.model
    spec |= {
        name: value
        for name, value in (("name", given.suffix), ("metadata", given.metadata), ("seed", given.seed))
        if value is not None
    }
    spec["environments"] = _environments(given.training_file, spec.get("environments"))
    _tune(spec, given.hyperparameters or {}, "hyperparameters")
    _tune(spec, _of_method(given.method), "method.reinforcement.hyperparameters")
    return spec


def _environments(training_file: str, given: JsonValue) -> JsonValue:
    """The environments given at length, or else the one that ``training_file`` names. Raises RequestRefused."""
    if not training_file.startswith(ENVIRONMENT):
        message = "training_file names an environment: env:NAME, or env:package.module:Class"
        raise RequestRefused(422, "validation_failed", message, param="training_file")
    ref = training_file.removeprefix(ENVIRONMENT)
    if given is None:
        return [{"ref": ref}]
    first = given[0] if isinstance(given, list) and given else None
    # Anything but an object with a name is refused with the rest of the specification.
    if isinstance(first, dict) and isinstance(first.get("ref"), str) and first["ref"] != ref:
        message = f"training_file is {training_file!r}, but environments[0].ref is {first['ref']!r}; name the first one"
        raise RequestRefused(422, "validation_failed", message, param="training_file")
    return given


def _refuse_unknown(given: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Raises RequestRefused for the first name that would be passed over."""
    for name, value in given.items():
        if name in known or value is None:
            continue
        place = f"{where}.{name}" if where else name
        reason = _ELSEWHERE.get(name, "it is not a field of a job")
        raise RequestRefused(422, "unknown_field", f"{place} would have no effect here: {reason}", param=place)


def _of_method(method: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if method is None:
        return {}
    inner = method.get("reinforcement")
    _refuse_unknown(method, ("type", "reinforcement"), "method")
    grader = inner.get("grader") if isinstance(inner, dict) else None
    if method.get("type") != "reinforcement" or (grader is not None and grader != {"type": "env"}):
        message = 'the method is "reinforcement" and its grader {"type": "env"}: the environment scores'
        raise RequestRefused(422, "validation_failed", message, param="method")
    if inner is None:
        return {}
    if not isinstance(inner, dict):
        raise RequestRefused(
            422, "validation_failed", "method.reinforcement must be an object", param="method.reinforcement"
        )
    _refuse_unknown(inner, ("grader", "hyperparameters"), "method.reinforcement")
    numbers = inner.get("hyperparameters")
    if numbers is None:
        return {}
    if not isinstance(numbers, dict):
        place = "method.reinforcement.hyperparameters"
        raise RequestRefused(422, "validation_failed", f"{place} must be an object", param=place)
    return numbers


def _tune(spec: dict[str, Any], numbers: Mapping[str, Any], where: str) -> None:
    """Writes hyperparameters where a job has them. Raises RequestRefused where that place says something else."""
    given = {name: value for name, value in numbers.items() if value is not None and value != "auto"}
    _refuse_unknown(given, _TUNED, where)
    for name, value in given.items():
        *sections, key = _TUNED[name]
        place = spec
        for section in sections:
            inner = place.get(section)
            place[section] = inner = {} if inner is None else inner
            if not isinstance(inner, dict):
                return  # the specification is refused for it
            place = inner
        if place.setdefault(key, value) != value:
            said, other = f"{where}.{name}", ".".join(_TUNED[name])
            message = f"{said} is {value!r}, but {other} is {place[key]!r}; set it only once"
            raise RequestRefused(422, "validation_failed", message, param=said)


def facade_job(job: JobRecord) -> FineTuningJob:
    native, spec = job_view(job), job.spec_data
    reason = native.status_reason
    failed = job.status is JobStatus.FAILED and reason is not None
    numbers: FacadeNumbers = {
        "batch_size": spec.get("groups_per_step"),
        "learning_rate": spec.get("optimizer", {}).get("lr"),
    }
    reinforcement: FacadeReinforcement = {"grader": {"type": "env"}, "hyperparameters": numbers}
    return FineTuningJob(
        id=job.id,
        created_at=epoch_seconds(job.created_at),
        finished_at=None if job.finished_at is None else epoch_seconds(job.finished_at),
        model=native.model,
        fine_tuned_model=f"{job.id}@latest" if job.status is JobStatus.SUCCEEDED else None,
        status=STATUSES[job.status],
        training_file=ENVIRONMENT + str(spec["environments"][0]["ref"]),
        hyperparameters=numbers,
        method={"type": "reinforcement", "reinforcement": reinforcement},
        organization_id=job.owner,
        result_files=[],
        seed=int(spec.get("seed", 0)),
        error=FacadeError(code=reason.code, message=reason.message) if failed and reason is not None else None,
        metadata=native.metadata,
        status_reason=reason,
        policy_version=native.policy_version,
        step=native.step,
        steps=native.steps,
        links=native.links,
    )


def facade_event(event: JobEvent) -> FineTuningEvent:
    data = event.data
    is_failure = event.type == "job.status" and data.get("status") == "failed"
    return FineTuningEvent(
        id=event.id,
        created_at=epoch_seconds(event.created_at),
        level="error" if is_failure else _LEVELS.get(event.type, "info"),
        message=_in_words(event),
        type="metrics" if event.type == "step" else "message",
        data={"type": event.type, **data},
    )


def _in_words(event: JobEvent) -> str:
    data = event.data
    if event.type == "step":
        return f"step {data.get('step')}: mean reward {data.get('reward/mean', 'unknown')}"
    if event.type == "job.status":
        return f"the job is {data.get('status')}"
    return f"{event.type}: {data['message']}" if "message" in data else event.type


def epoch_seconds(time: str) -> int:
    return int(datetime.fromisoformat(time).timestamp())
