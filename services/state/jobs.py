"""A job in the control plane: its record, its states, and the ONE table of transitions between them.

The rule: a transition missing from TRANSITIONS does not exist; the server enforces this table.
It stores nothing.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple, TypeAlias, cast

from gspo_core.position import Position


class JobStatus(StrEnum):
    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        return not TRANSITIONS[self]

    @property
    def is_served(self) -> bool:
        """Whether rollout workers serve a job in this state (a pausing job drains its open episodes)."""
        return self in _SERVED


class DesiredState(StrEnum):
    """The user's wish; the job's owner carries it out."""

    RUNNING = "running"
    PAUSED = "paused"
    CANCELLED = "cancelled"


class CancelManner(StrEnum):
    """How to cancel a job."""

    NOW = "now"
    NOW_WITH_CHECKPOINT = "now+checkpoint"
    """After the current step."""
    DRAIN = "drain"
    """Start nothing new; finish and train the work in progress, as far as it fills steps."""
    DRAIN_WITH_CHECKPOINT = "drain+checkpoint"

    @classmethod
    def of(cls, *, drain: bool, checkpoint: bool) -> CancelManner:
        if drain:
            return cls.DRAIN_WITH_CHECKPOINT if checkpoint else cls.DRAIN
        return cls.NOW_WITH_CHECKPOINT if checkpoint else cls.NOW

    @property
    def drains(self) -> bool:
        return self in (self.DRAIN, self.DRAIN_WITH_CHECKPOINT)

    @property
    def saves(self) -> bool:
        return self in (self.NOW_WITH_CHECKPOINT, self.DRAIN_WITH_CHECKPOINT)


TRANSITIONS: dict[JobStatus, frozenset[JobStatus]] = {
    JobStatus.QUEUED: frozenset({JobStatus.STARTING, JobStatus.CANCELLED, JobStatus.FAILED}),
    JobStatus.STARTING: frozenset({JobStatus.RUNNING, JobStatus.QUEUED, JobStatus.CANCELLING, JobStatus.FAILED}),
    JobStatus.RUNNING: frozenset(
        {
            *(JobStatus.PAUSING, JobStatus.CANCELLING, JobStatus.SUCCEEDED, JobStatus.FAILED),
            *(JobStatus.STARTING, JobStatus.QUEUED),
        }
    ),
    JobStatus.PAUSING: frozenset({JobStatus.PAUSED, JobStatus.CANCELLING, JobStatus.FAILED, JobStatus.STARTING}),
    JobStatus.PAUSED: frozenset({JobStatus.RESUMING, JobStatus.CANCELLING}),
    JobStatus.RESUMING: frozenset({JobStatus.RUNNING, JobStatus.STARTING, JobStatus.CANCELLING, JobStatus.FAILED}),
    JobStatus.CANCELLING: frozenset({JobStatus.CANCELLED, JobStatus.FAILED}),
    JobStatus.SUCCEEDED: frozenset(),
    JobStatus.FAILED: frozenset(),
    JobStatus.CANCELLED: frozenset(),
}

_SERVED = frozenset({JobStatus.STARTING, JobStatus.RUNNING, JobStatus.PAUSING, JobStatus.RESUMING})


def sources_of(target: JobStatus) -> list[JobStatus]:
    """The states that may move to ``target``."""
    return [source for source, targets in TRANSITIONS.items() if target in targets]


# The codes of a job and of its attempts. Whatever takes one is typed with these, so that none can be added unlisted;
# docs/failures.md has to explain each.
WaitCode: TypeAlias = Literal[
    "waiting_for_workers",
    "no_trainer",
    "capacity",
    "yielded",
    "loading_model",
    "no_engine_for_model",
    "no_rollout_worker",
    "waiting_for_trajectories",
    "env_unhealthy",
    "model_invalid",
    "user_paused",
    "user_cancelled",
]
"""Why a job that is not over does not move, or winds up."""

DoneCode: TypeAlias = Literal["steps_done", "reward_reached", "reward_stands_still", "time_over", "user_cancelled"]
"""Why a job ended as it was meant to."""

FailureCode: TypeAlias = Literal[
    "model_invalid",
    "environment_failed",
    "env_unhealthy",
    "images_unsupported",
    "prompt_too_long",
    "no_tokens_sampled",
    "all_rewards_equal",
    "stale_backlog",
    "engine_mismatch",
    "learner_diverged",
    "data_damaged",
    "incompatible_release",
    "max_attempts_exceeded",
    "internal",
    "unknown",
]
"""Why a job failed."""

CountedCode: TypeAlias = Literal[
    "trainer_lost", "process_lost", "rank_lost", "no_progress", "data_unreadable", "queue_damaged"
]
"""Why an attempt ended that counts against ``GSPO_MAX_ATTEMPTS``; another one goes on with the job."""

FreeCode: TypeAlias = Literal["handed_over", "yielded", "redis_unavailable", "disk_full"]
"""Why an attempt ended that does not count."""

ReasonCode: TypeAlias = WaitCode | DoneCode | FailureCode | CountedCode | FreeCode

# The reason shown on entering a state, unless the caller supplies a better one.
_DEFAULT_REASONS: Mapping[JobStatus, tuple[ReasonCode, str]] = {
    JobStatus.QUEUED: ("waiting_for_workers", "no trainer has taken the job yet; each trains one job at a time"),
    JobStatus.STARTING: ("loading_model", "a trainer has taken the job and is loading the model"),
    JobStatus.RUNNING: ("waiting_for_trajectories", "episodes are running"),
    JobStatus.PAUSING: ("user_paused", "the job is pausing; it stops between two steps"),
    JobStatus.PAUSED: ("user_paused", "paused on request"),
    JobStatus.RESUMING: ("loading_model", "the job was resumed and is getting ready"),
    JobStatus.CANCELLING: ("user_cancelled", "cancelled on request; some of it is still stopping"),
    JobStatus.FAILED: ("unknown", "the trainer gave no reason"),
}


def default_reason(status: JobStatus) -> StatusReason:
    """The code is empty for a state that needs no reason."""
    return StatusReason(*_DEFAULT_REASONS.get(status, ("", "")))


class InvalidCursor(ValueError):
    """The position is not an id of the list or stream it is used on."""


class JobNotFound(LookupError):
    """No job has this id."""

    def __init__(self, job: str) -> None:
        super().__init__(f"there is no job {job!r}")
        self.job = job


class DamagedJob(JobNotFound):
    """The job's record in Redis cannot be read: it is left alone, as if it were not there."""

    def __init__(self, job: str, reason: str) -> None:
        LookupError.__init__(self, f"the record of job {job} in Redis cannot be read: {reason}")
        self.job = job


class JobConflict(Exception):
    """The idempotency key or the id belongs to a job with another body."""

    def __init__(self, job: str) -> None:
        super().__init__(f"this key or id was already used for job {job!r} with a different body; use a new key")
        self.job = job


class JobInUse(Exception):
    """Another job cannot do without it; where it ``passes``, that one is only being made."""

    def __init__(self, job: str, why: str, *, passes: bool = False) -> None:
        super().__init__(f"{why}: try again" if passes else f"{why}: {job} cannot be removed before that one is")
        self.job, self.passes = job, passes


class IllegalTransition(Exception):
    """The table of transitions has no way from the job's state to the wanted one."""

    def __init__(self, job: str, current: str, wanted: str) -> None:
        super().__init__(f"job {job} is {current}; it cannot become {wanted}")
        self.job, self.current, self.wanted = job, current, wanted


@dataclass(frozen=True, slots=True)
class StatusReason:
    code: ReasonCode | Literal[""]
    message: str
    since: str | None = None
    """When this code took effect: UTC, RFC 3339; set by the store."""


def fits(_spec: str) -> str | None:
    """The default check, under which every trainer fits every specification."""
    return None


HANDED_OVER = StatusReason("handed_over", "its trainer was asked to stop")
LOST = StatusReason("trainer_lost", "its sign of life stood still for a whole lease")
"""The default reason for the end of an attempt."""


@dataclass(frozen=True, slots=True)
class TrainerAttempt:
    """One trainer's ownership of a job."""

    attempt: int
    epoch: int
    trainer: str
    began_at: str
    ended_at: str | None = None
    code: str | None = None
    """Why it ended: ``trainer_lost``, ``process_lost``, ``rank_lost``, ``handed_over``, ``yielded``, ``no_progress``,
    ``data_unreadable``, ``redis_unavailable``, ``disk_full``, or the reason of the job's end."""
    message: str | None = None
    step: int | None = None
    """The job's step at that time."""


class WentBack(NamedTuple):
    """A job that was over continues from an earlier place, where an epoch without a trainer forks off."""

    epoch: int
    to: Position

    def encode(self) -> str:
        return f"{self.epoch} {self.to.epoch} {self.to.step}"

    @classmethod
    def decode(cls, text: str) -> WentBack:
        epoch, *to = map(int, text.split())
        return cls(epoch, Position(*to))


@dataclass(frozen=True, slots=True)
class JobRecord:
    id: str
    spec: str
    """The accepted specification as JSON text."""
    status: JobStatus
    desired_state: DesiredState
    status_reason: StatusReason | None
    attempt: int
    """Number of trainers that have owned the job."""
    epoch: int
    step: int
    policy_version: int | None
    created_at: str
    started_at: str | None
    finished_at: str | None
    owner: str = ""
    """Who submitted it; empty without authentication."""
    settings_version: int = 0
    """Number of changes to its live settings."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Live settings that override the specification, by key: ``{"optimizer.lr": 1e-6}``."""
    cancel_manner: CancelManner | None = None
    """Set once cancellation is requested."""
    num_yields: int = 0
    """How often it gave its trainer to others since its last new step."""
    attempts: tuple[TrainerAttempt, ...] = ()
    """The most recent owners, each with the reason its attempt ended."""
    went_back: WentBack | None = None
    """The last time, if it ever did. What its files say holds only once they say this."""

    @property
    def spec_data(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(self.spec)
        return data

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with the specification parsed."""
        return asdict(self) | {
            "status": str(self.status),
            "desired_state": str(self.desired_state),
            "spec": self.spec_data,
        }


@dataclass(frozen=True, slots=True)
class Claim:
    """A trainer's lease on a job; ``token`` fences everything the trainer writes."""

    job_id: str
    token: str
    epoch: int
    attempt: int


_CROCKFORD = "0123456789abcdefghjkmnpqrstvwxyz"
_OURS = re.compile(f"job_[0-7][{_CROCKFORD}]{{25}}")
_THIS_CENTURY_S, _DAY_S = 978_307_200, 86_400


def new_job_id(time_s: float) -> str:
    """``job_`` + 48 bits of milliseconds + 80 random bits: ids sort by time and cannot be guessed."""
    number = (int(time_s * 1000) << 80) | secrets.randbits(80)
    return "job_" + "".join(_CROCKFORD[(number >> shift) & 31] for shift in range(125, -1, -5))


def may_have_been(job: str, now_s: float) -> bool:
    """Whether this may be the id of a job that was removed: one of ours, from this century and not from the future."""
    if not _OURS.fullmatch(job):
        return False
    number = 0
    for letter in job.removeprefix("job_"):
        number = number * 32 + _CROCKFORD.index(letter)
    return _THIS_CENTURY_S < (number >> 80) / 1000 < now_s + _DAY_S


# What a record is read from, but for the specification, which is most of it.
FIELDS_WITHOUT_SPEC = (
    *("revision", "owner", "status", "desired_state", "reason_code", "reason_message", "reason_since"),
    *("attempt", "epoch", "step", "policy_version", "created_at", "started_at", "finished_at"),
    *("settings_version", "settings", "cancel_manner", "yields", "attempts", "went_back"),
)


def read_record(job: str, fields: dict[bytes, bytes]) -> JobRecord:
    """The record as the fields of its hash have it. Raises DamagedJob."""
    try:
        return _read(job, fields)
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedJob(job, f"{type(error).__name__}: {error}") from None


def _read(job: str, fields: dict[bytes, bytes]) -> JobRecord:
    record = {name.decode(): value.decode() for name, value in fields.items()}
    int(record["revision"])  # of its files: every change counts it up
    code, version = record.get("reason_code"), record.get("policy_version")
    return JobRecord(
        id=job,
        owner=record.get("owner", ""),
        spec=record["spec"],
        status=JobStatus(record["status"]),
        desired_state=DesiredState(record["desired_state"]),
        status_reason=StatusReason(cast(ReasonCode, code), record["reason_message"], record["reason_since"])
        if code
        else None,
        attempt=int(record["attempt"]),
        epoch=int(record["epoch"]),
        step=int(record["step"]),
        policy_version=None if version is None else int(version),
        created_at=record["created_at"],
        started_at=record.get("started_at"),
        finished_at=record.get("finished_at"),
        settings_version=int(record.get("settings_version", 0)),
        settings=json.loads(record.get("settings", "{}")),
        cancel_manner=CancelManner(record["cancel_manner"]) if "cancel_manner" in record else None,
        num_yields=int(record.get("yields", 0)),
        attempts=tuple(TrainerAttempt(**one) for one in json.loads(record.get("attempts", "[]"))),
        went_back=WentBack.decode(record["went_back"]) if "went_back" in record else None,
    )
