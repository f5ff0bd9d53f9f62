"""Shapes of the API's answers, as the client hands them on.

Rule: an answer stays the JSON object that it was, and a newer server may add keys. Nothing is validated here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NotRequired, TypeAlias, TypedDict

from gspo_core.json_value import JSON
from gspo_core.messages import Message

if TYPE_CHECKING:
    from gspo_core.environment_records import CheckRecord, Description

NOT_LOADED = "it cannot be loaded: "
"""What an answer about an environment begins with where a job that names it could never begin."""


class Reason(TypedDict):
    """Why a job is where it is."""

    code: str
    message: str
    since: str | None


class JobAttempt(TypedDict):
    attempt: int
    epoch: int
    trainer: str
    began_at: str
    ended_at: str | None
    code: str | None
    message: str | None
    step: int | None


class Parent(TypedDict):
    """The job that a job was forked from."""

    job: str
    step: int
    same_batches: bool
    last: NotRequired[int | None]
    without: NotRequired[list[str]]
    """Releases before 0.3 do not say these two."""


class Recorded(TypedDict):
    """The job whose recorded episodes a job is trained on."""

    job: str
    first: int | None
    last: int | None
    traces: bool
    rewards: str | None


class RetrainPlan(TypedDict):
    """What a job on recorded episodes would be trained on."""

    object: str
    job: str
    first: int | None
    last: int | None
    steps: int
    rewards: int


class ForkPlan(TypedDict):
    """What a fork would take."""

    object: str
    parent: str
    step: int
    from_checkpoint: int | None
    replayed_steps: int
    same_batches: int


class ReplayPlan(TypedDict):
    """What a replay would take."""

    object: str
    from_checkpoint: int | None
    replayed_steps: int
    trained_steps: int


class Replay(TypedDict):
    """A question about trained steps."""

    object: str
    id: str
    job_id: str
    status: str
    """``waiting``, ``running``, ``interrupted`` (ask again), ``done``, ``failed``."""
    first: int
    last: int
    set: dict[str, JSON]
    without: list[str]
    single: str | None
    influence: bool
    from_checkpoint: int | None
    replayed_steps: int
    trained_steps: int
    done_steps: int | None
    created_at: str
    finished_at: str | None
    message: str | None


class ReplayDetail(Replay):
    answer: dict[str, JSON] | None
    """What ``gspo replay --json`` prints."""


class PastEvent(TypedDict):
    """An event of a page."""

    id: str
    type: str
    created_at: str
    data: dict[str, JSON]


class Job(TypedDict):
    """A job as the API shows it."""

    object: str
    id: str
    name: str | None
    model: str
    environments: NotRequired[list[str]]
    """What each is loaded from. Releases before 0.3 do not say, nor the next."""
    objective: NotRequired[str | None]
    status: str
    desired_state: str
    status_reason: Reason | None
    attempt: int
    step: int
    steps: int
    policy_version: int | None
    created_at: str
    started_at: str | None
    finished_at: str | None
    metadata: dict[str, str]
    settings: Settings
    attempts: list[JobAttempt]
    parent: Parent | None
    recorded: Recorded | None
    links: dict[str, str]


class RegisteredEnvironment(TypedDict):
    """A version of an environment; a job names it by its ``id``."""

    object: str
    id: str
    name: str
    version: int
    status: str
    source: EnvironmentSource
    agent: dict[str, JSON] | None
    digest: str
    created_at: str
    failures: list[str]


class EnvironmentSource(TypedDict, total=False):
    """``type`` decides which of the others are there."""

    type: str
    ref: str
    url: str
    id: str
    dataset: str
    reward: str
    tasks: list[dict[str, JSON]]
    config: dict[str, JSON]


Settings: TypeAlias = dict[str, JSON]
"""By section, as in a job file."""


class Plan(TypedDict):
    """A job that was checked and not created."""

    object: str
    valid: bool
    config: Settings
    warnings: list[str]
    unchecked: NotRequired[list[str]]
    """Questions that only trainers and rollout workers can answer."""
    estimate: dict[str, int]
    capacity: NotRequired[dict[str, int]]
    memory: NotRequired[Settings | None]
    """The learner's, on the GPUs that were asked for."""


class EpisodeSummary(TypedDict):
    object: str
    id: str
    member: int
    status: str
    attempt: int
    worker: str | None
    num_failures: int | None
    stop_reason: str | None
    reward: float | None
    reward_parts: dict[str, float]
    metrics: dict[str, float]
    advantage: float | None
    num_turns: int | None
    num_segments: int
    num_tokens: int | None
    num_actions: int | None
    versions: list[int]
    users: list[str]
    is_erased: bool
    timings: dict[str, float]


class GroupSummary(TypedDict):
    object: str
    id: str
    job_id: str
    group: int
    status: str
    split: str
    task_index: int
    environment: int | None
    size: int
    step: int | None
    epoch: int | None
    reward_mean: float | None
    reward_std: float | None
    episodes: list[EpisodeSummary]


class ShownMessage(TypedDict):
    role: str
    text: str


class ShownCall(TypedDict):
    name: str | None
    arguments: JSON
    status: str
    raw: str


class ShownTurn(TypedDict):
    """One turn of an episode, as it was said."""

    branch: int
    turn: int
    parent: int | None
    """The turn that it goes on from."""
    reason: str | None
    """Why it began a branch, where an agent asked for it."""
    is_trained: bool
    num_actions: int
    versions: list[int]
    messages: list[ShownMessage]
    """The messages that led to it."""
    reasoning: str
    text: str
    calls: list[ShownCall]


class EpisodeDetail(EpisodeSummary):
    job_id: str
    group: int
    split: str
    task_index: int
    group_size: int
    step: int | None
    epoch: int | None
    note: str | None
    turns: list[ShownTurn]
    closing: dict[str, float] | None
    tokens: dict[str, list[str | float | None]] | None
    """By column; None unless asked for."""


class Taken(TypedDict):
    """The fate of one pushed item."""

    index: int
    accepted: bool
    reason: str | None
    message: str | None


class TaskCounts(TypedDict):
    train: int
    eval: int


class OutsideDescription(TypedDict):
    """An environment that only your own code can play."""

    num_tasks: TaskCounts


class PublishedVersion(TypedDict):
    """A published version of a job's weights."""

    object: str
    id: str
    version: int
    epoch: int
    step: int
    parent: int | None
    size_bytes: int
    is_kept: bool
    loaded_by: list[str]


class Checkpoint(TypedDict):
    object: str
    id: str
    job_id: str
    epoch: int
    step: int
    created_at: str
    size_bytes: int


class CheckpointFile(TypedDict):
    path: str
    size_bytes: int


class CheckpointExport(TypedDict):
    object: str
    status: str
    path: str | None
    message: str | None


class CheckpointDetail(Checkpoint):
    files: list[CheckpointFile]
    export: CheckpointExport


class EnvironmentValidation(TypedDict):
    object: str
    environment: str
    ok: bool
    checks: list[CheckRecord]


class TrialCall(TypedDict):
    name: str | None
    arguments: JSON


TrialEntry = TypedDict(
    "TrialEntry",
    {"from": str, "text": NotRequired[str], "calls": NotRequired[list[TrialCall]], "message": NotRequired[Message]},
)
"""The policy's words (``text``, ``calls``), or a ``message`` to it."""


class Trial(TypedDict):
    object: str
    environment: str
    transcript: list[TrialEntry]
    stop_reason: str | None
    reward: float
    reward_parts: dict[str, float]


class Worker(TypedDict):
    """A registered process; each role adds fields of its own."""

    object: str
    id: str
    role: str
    alive: bool
    draining: bool
    links: dict[str, str]
    state: NotRequired[str | None]
    job: NotRequired[str | None]
    label: NotRequired[str]
    """Of the weights that an engine holds."""
    jobs: NotRequired[list[str]]
    num_episodes: NotRequired[int]
    host: NotRequired[str]
    device: NotRequired[str]
    pid: NotRequired[int]


class Lease(TypedDict):
    """The hold that an agent has of an episode."""

    object: str
    id: str
    job_id: str
    episode: str
    attempt: int
    state: str
    lease_s: float
    expires_at: str


class EpisodeLease(Lease):
    """An episode to play, and where its turns are asked for."""

    task: dict[str, JSON]
    base_url: str
    api_key: str
    model: str


class TalkKey(TypedDict):
    """A key that talks to a job's policy without an episode, with what it has used."""

    object: str
    id: str
    job_id: str
    label: str
    created_at: str
    expires_at: str | None
    max_turns: int | None
    max_tokens: int | None
    max_seconds: float | None
    num_turns: int
    num_tokens: int
    seconds: float


class NewTalkKey(TalkKey):
    key: str


class Trace(TypedDict):
    """A conversation of such a key."""

    object: str
    id: str
    job_id: str
    key: str
    user: str
    began_at: str
    is_redacted: bool
    num_turns: int
    num_branches: int
    num_tokens: int
    num_sampled: int
    versions: list[int]


class TraceDetail(Trace):
    turns: list[ShownTurn]
    tokens: NotRequired[dict[str, list[JSON]] | None]
    warning: str | None


class Erased(TypedDict):
    """How much recorded traffic is gone."""

    object: str
    num_segments: int


class Entered(TypedDict):
    """A step that an episode entered."""

    episode: str
    step: int
    epoch: int
    in_job: str


class InUse(TypedDict):
    """An episode in the queue that could not be erased now."""

    episode: str
    why: str


class ErasedEpisodes(TypedDict):
    """What became of the text of episodes, and what erasing does not reach."""

    object: str
    queued: list[str]
    """Episodes that were not trained yet: they have ended, and nothing of them is left in the queue."""
    in_use: list[InUse]
    erased: list[Entered]
    not_yet: list[Entered]
    unreadable: list[str]
    stays: list[str]


class Drain(TypedDict):
    """A process that was asked to leave, or an engine to be left alone."""

    object: str
    id: str
    alive: bool
    state: NotRequired[str]
    """Engines alone have this and ``job``; a ``drained`` one may be stopped."""
    job: NotRequired[str | None]


class TaskList(TypedDict):
    tasks: list[dict[str, JSON]]


class SchemaAnswer(TypedDict):
    description: Description


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a job. A `gap` says that events before it are no longer kept."""

    id: str
    """Resume after it."""
    type: str
    data: Mapping[str, JSON]
