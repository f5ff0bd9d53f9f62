"""Shapes of the API's answers, as the client hands them on; ``make docs`` writes them from the API's models.

Rule: an answer stays the JSON object that it was, and a newer server may add keys, and words where some are listed:
those are ``str``. Nothing is validated here. What is ``NotRequired``, older releases or some processes do not say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NotRequired, TypedDict

from gspo_core.answer_parts import NOT_LOADED as NOT_LOADED
from gspo_core.answer_parts import EnvironmentSource as EnvironmentSource
from gspo_core.answer_parts import Event as Event
from gspo_core.answer_parts import RoleFields
from gspo_core.answer_parts import Settings as Settings
from gspo_core.answer_parts import TrialCall as TrialCall
from gspo_core.answer_parts import TrialEntry as TrialEntry
from gspo_core.json_value import JSON

if TYPE_CHECKING:
    from gspo_core.environment_records import CheckRecord, EnvironmentDescription


class Reason(TypedDict):
    """Why a job is where it is."""

    code: str
    message: str
    since: str | None


class JobAttempt(TypedDict):
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


class Parent(TypedDict):
    """The job that a job was forked from."""

    job: str
    step: int
    same_batches: bool
    last: NotRequired[int | None]
    """The step whose batch is the last that it is fed; null: as far as they are kept."""
    without: NotRequired[list[str]]
    """What these batches lack: groups, episodes, parts of the reward."""


class Recorded(TypedDict):
    """The job whose recorded episodes a job is trained on."""

    job: str
    first: int | None
    last: int | None
    """The last of its steps that are trained on."""
    traces: bool
    """They are conversations of keys that talk."""
    rewards: str | None
    """Digest of the rewards that they were given in place of their own."""


class Job(TypedDict):
    """A job."""

    object: str
    id: str
    name: str | None
    model: str
    environments: NotRequired[list[str]]
    """What each is loaded from."""
    objective: NotRequired[str | None]
    """Its name; null for one that has none."""
    status: str
    desired_state: str
    """What its user asked for; the trainer that owns the job brings it about."""
    status_reason: Reason | None
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
    settings: dict[str, JSON]
    """Live settings, which replace what was submitted."""
    attempts: list[JobAttempt]
    """The last trainers that owned it, each with what ended it."""
    parent: Parent | None
    """What it was forked from; null for a job that began with its model."""
    recorded: Recorded | None
    """The recorded episodes that it is trained on; null for a job that samples its own."""
    links: dict[str, str]


class PastEvent(TypedDict):
    """Something that happened to a job."""

    object: str
    id: str
    """Resume after it."""
    type: str
    created_at: str
    data: dict[str, JSON]


class Plan(TypedDict):
    """A job as it would be; nothing was created."""

    object: str
    valid: bool
    """The specification is one; `warnings` and `unchecked` say what may still keep it from running."""
    config: dict[str, JSON]
    """The specification with every default spelled out."""
    warnings: list[str]
    """Settings that are legal but known to be wrong, and files that the API does not find."""
    unchecked: NotRequired[list[str]]
    """What only trainers and rollout workers can tell."""
    estimate: dict[str, int]
    capacity: NotRequired[dict[str, int]]
    memory: NotRequired[dict[str, JSON] | None]
    """The learner's, on the `gpus` that were asked for."""


class ForkPlan(TypedDict):
    """What a fork would take; nothing was created."""

    object: str
    parent: str
    step: int
    from_checkpoint: int | None
    """Step of the checkpoint that it begins with; null: the base model."""
    replayed_steps: int
    """Steps that are trained again before it begins."""
    same_batches: int
    """Batches of the parent that it would be fed."""


class RetrainPlan(TypedDict):
    """What the job would be trained on; nothing was created."""

    object: str
    job: str
    first: int | None
    last: int | None
    steps: int
    """One for each batch."""
    rewards: int
    """How many episodes are given another."""


class ReplayPlan(TypedDict):
    """What a replay would take; nothing was begun."""

    object: str
    from_checkpoint: int | None
    replayed_steps: int
    trained_steps: int


class Replay(TypedDict):
    """A question about trained steps, answered by training them again."""

    object: str
    id: str
    job_id: str
    status: str
    """`waiting`, `running`, `interrupted`, `done`, `failed`. `interrupted`: the process that worked on it has ended;
    ask again, and it begins anew."""
    first: int
    last: int
    set: dict[str, JSON]
    """Settings that are to be different, by key."""
    without: list[str]
    """Groups, episodes and parts of the reward that are left out."""
    single: str | None
    """`GROUP/MEMBER` of the episode whose tokens are shown."""
    influence: bool
    """Whether each group is left out in turn."""
    from_checkpoint: int | None
    """Step of the checkpoint that it begins with; null: the base model."""
    replayed_steps: int
    """Steps that are trained again to get to the first one asked for."""
    trained_steps: int
    """Steps that are trained in all."""
    done_steps: int | None
    """How many of these are trained by now; null unless the API process that answers works on it."""
    created_at: str
    finished_at: str | None
    message: str | None
    """Why it failed; while it runs, what it said last."""


class ReplayDetail(Replay):
    """A replay with its answer."""

    answer: dict[str, JSON] | None


class EpisodeSummary(TypedDict):
    """One episode, without its turns."""

    object: str
    id: str
    """`JOB/GROUP/MEMBER`, the same in logs and in Redis; `/v1/episodes/` + id shows it."""
    member: int
    status: str
    """`queued`, `running`, `waiting` (for its reward), `done` (waits for its group or for the trainer), `given_up`,
    `trained`."""
    attempt: int
    """Counts from 0; a new attempt starts the episode again."""
    worker: str | None
    """The rollout worker that plays it now."""
    num_failures: int | None
    stop_reason: str | None
    reward: float | None
    reward_parts: dict[str, float]
    metrics: dict[str, float]
    advantage: float | None
    """Its reward relative to its group, as the trainer computed it."""
    num_turns: int | None
    num_segments: int
    num_tokens: int | None
    num_actions: int | None
    """Tokens that the policy sampled."""
    versions: list[int]
    """The versions that sampled its tokens."""
    users: list[str]
    """In whose names its turns were asked for, as far as the requests of its agent said."""
    is_erased: bool
    """What was read and said in it is gone; its lengths, versions and rewards are not."""
    timings: dict[str, float]
    """Seconds until the newest segment, over all workers that had it: `engine_s`, `env_s`, `queue_s` (no engine could
    take a request, or the environment had no place), `store_s`."""


class GroupSummary(TypedDict):
    """The episodes of one task."""

    object: str
    id: str
    """`JOB/GROUP`."""
    job_id: str
    group: int
    status: str
    """`open`, `ready`, `trained`. `ready` groups wait for the trainer."""
    split: str
    task_index: int
    environment: int | None
    """Index in the list of the job's environments, where known."""
    size: int
    """How many episodes were dispatched."""
    step: int | None
    """The step that trained it."""
    epoch: int | None
    reward_mean: float | None
    reward_std: float | None
    episodes: list[EpisodeSummary]


class ShownMessage(TypedDict):
    role: str
    text: str


class ShownCall(TypedDict):
    """An attempt to call a tool."""

    name: str | None
    arguments: JSON
    status: str
    raw: str


class ShownRequest(TypedDict):
    """How an agent asked for a turn."""

    dialect: str
    model: str
    """As the agent named it; the job decides which one answers."""
    num_messages: int
    num_new_messages: int
    num_repeats: int
    """How often the turn was asked for again and given again; known at the end of the episode."""


class ShownTurn(TypedDict):
    """Where a turn's tokens stand, which turn it continues, the messages that led to it, and the policy's words."""

    branch: int
    turn: int
    first_token: int
    end_token: int
    num_actions: int
    logprob_mean: float | None
    versions: list[int]
    engines: list[str]
    cache_modes: list[str]
    reward: float | None
    timings: dict[str, float] | None
    parent: int | None
    reason: str | None
    shared_tokens: NotRequired[int]
    tokens_read_again: NotRequired[int]
    is_trained: bool
    request: NotRequired[ShownRequest | None]
    messages: list[ShownMessage]
    text: str | None
    reasoning: str | None
    complete: bool | None
    calls: list[ShownCall]


class EpisodeDetail(EpisodeSummary):
    """One episode with its turns."""

    job_id: str
    group: int
    split: str
    task_index: int
    group_size: int
    step: int | None
    epoch: int | None
    note: str | None
    """Why text is missing, where it is."""
    turns: list[ShownTurn]
    """Each turn with the messages that led to it (`messages`), the policy's words (`text`, `reasoning`, `calls`), the
    place of its tokens (`first_token`, `end_token`), and the seconds that it took (`timings`: `engine_s` for sampling
    it, `env_s` for the environment's answer before it, `queue_s` for waiting; null where none were recorded). `parent`
    is the turn that it continues, `reason` why it began a branch, `shared_tokens` how many of its first tokens an
    earlier branch has too (`messages` are the others), `tokens_read_again` how many more it read before it sampled,
    `is_trained` false where the turn was never delivered, or another sample was continued or paid. `request` tells how
    an agent asked for it: `dialect`, `model`, `num_messages`, `num_new_messages`, `num_repeats`."""
    closing: dict[str, float] | None
    """The seconds between its last token and its outcome, like `timings` of a turn."""
    evidence: NotRequired[dict[str, JSON]]
    """What its reward was made from, by name (`task`, `result`, `judge`, `messages`, `state.NAME`), as far as it was
    kept."""
    evidence_left_out: NotRequired[dict[str, str]]
    """What was not kept of it, with the reason."""
    tokens: dict[str, list[str | float | None]] | None
    """With `include=tokens`: columns `id`, `text`, `sampled`, `logprob`, `ratio`, `version`, `turn`, `branch`. `ratio`:
    how much more probable the token was in training than in sampling; null where unknown."""


class Taken(TypedDict):
    """What became of one item."""

    index: int
    accepted: bool
    reason: str | None
    """`not_open`, `held`, `duplicate`, `gap`, `length_mismatch`, `no_action`, `no_prefix`, `unknown_token`,
    `unknown_version`, `stale`, `non_finite`, `invalid_logprob`, `too_long`, `invalid_outcome`, `job_not_running`. Why
    it was not accepted."""
    message: str | None


class TaskCounts(TypedDict):
    train: int
    eval: int


class OutsideDescription(TypedDict):
    """An environment that is played elsewhere."""

    num_tasks: TaskCounts
    """Groups are about tasks from 0 up to this number, in an order that the job's seed decides."""


class PublishedVersion(TypedDict):
    """A published version of a job's weights."""

    object: str
    id: str
    """`JOB/EPOCH/VERSION`: the label of engines that hold these weights."""
    version: int
    epoch: int
    step: int
    parent: int | None
    """The version that these weights were trained from, or are identical to."""
    size_bytes: int
    is_kept: bool
    """Whether its files still exist."""
    loaded_by: list[str]
    """Engines that hold its label now."""


class Checkpoint(TypedDict):
    """A point from which a trainer can go on."""

    object: str
    id: str
    """`JOB/EPOCH/STEP`; `/v1/checkpoints/` + id shows it."""
    job_id: str
    epoch: int
    step: int
    created_at: str
    size_bytes: int


class CheckpointFile(TypedDict):
    path: str
    size_bytes: int


class CheckpointExport(TypedDict):
    """Its weights as a plain model directory."""

    object: str
    status: str
    """`none`, `exporting`, `ready`, `failed`."""
    path: str | None
    """Below `GSPO_DATA_DIR`, once it is ready."""
    message: str | None
    """Why it failed, what it waits for, or why its files are not listed."""
    files: NotRequired[list[CheckpointFile]]
    """Once it is ready: each is found at `/export/files/` + path."""
    written_at: NotRequired[str | None]
    """When it was, once it is ready: files of one export have been fetched where this is as it was."""


class CheckpointDetail(Checkpoint):
    """A checkpoint with its files."""

    files: list[CheckpointFile]
    export: CheckpointExport


class RegisteredEnvironment(TypedDict):
    """A version of an environment. A job names it as `ref`."""

    object: str
    id: str
    """`NAME@VERSION`."""
    name: str
    version: int
    status: str
    """`validating`, `ready`, `invalid`. `validating` until a rollout worker has examined it."""
    source: EnvironmentSource
    agent: dict[str, JSON] | None
    """How its agent is started, if it has one."""
    digest: str
    """Names its content: the same content is the same version."""
    created_at: str
    failures: list[str]
    """Why it is invalid."""


class EnvironmentValidation(TypedDict):
    """The findings of an examination: episodes without a model, on a rollout worker."""

    object: str
    environment: str
    ok: bool
    checks: list[CheckRecord]


class Trial(TypedDict):
    """One episode, as it was played."""

    object: str
    environment: str
    transcript: list[TrialEntry]
    stop_reason: str | None
    reward: float
    reward_parts: dict[str, float]


class TaskList(TypedDict):
    """Some tasks in order."""

    object: str
    environment: str
    total: int
    tasks: list[dict[str, JSON]]


class SchemaAnswer(TypedDict):
    """Its tools, limits and numbers of tasks."""

    object: str
    environment: str
    description: EnvironmentDescription


class Worker(RoleFields):
    """A process: the fields that it registered with, and these."""

    object: str
    id: str
    role: str
    """`trainer`, `rollout`, `gateway`, `engine`."""
    alive: bool
    draining: bool
    """It was asked to leave, or, for an engine, to take no more work."""
    links: dict[str, str]
    """`drain`: where to ask it, while it is alive."""


class Drain(TypedDict):
    """A process that was asked to leave, or an engine to be left alone: engines alone have `state` and `job`."""

    object: str
    id: str
    alive: bool
    state: NotRequired[str]
    """`in_use`, `draining`, `drained`. `drained` once no job holds it: then it may be stopped."""
    job: NotRequired[str | None]
    """The job that still holds it."""


class Lease(TypedDict):
    """The hold that an agent has of an episode."""

    object: str
    id: str
    job_id: str
    episode: str
    attempt: int
    state: str
    """`lent`, `finished`, `released`, `expired`."""
    lease_s: float
    expires_at: str
    """At the earliest, where no sign of life comes before."""


class EpisodeLease(Lease):
    """An episode to play."""

    task: dict[str, JSON]
    base_url: str
    """For the OpenAI dialects; without `/v1`, for Anthropic's."""
    api_key: str
    """Valid for this attempt alone."""
    model: str
    reward_key: NotRequired[str]
    """By which rewards are posted; it samples nothing."""


class TalkKey(TypedDict):
    """A key that talks without an episode, without its secret."""

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
    """What to send to the gateway as a key of OpenAI or Anthropic. It cannot be shown again."""


class Trace(TypedDict):
    """A conversation of such a key."""

    object: str
    id: str
    job_id: str
    key: str
    user: str
    began_at: str
    is_redacted: bool
    """Its turns are texts that went through `GSPO_TRAFFIC_REDACTOR`: `read` and `said`, without tokens."""
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
    """`JOB/GROUP/MEMBER`."""
    step: int
    epoch: int
    in_job: str
    """Whose log holds it: the episode's job, or one that was forked from it and was brought this log."""


class InUse(TypedDict):
    """An episode in the queue that could not be erased now."""

    episode: str
    why: str


class ErasedEpisodes(TypedDict):
    """What became of the text of episodes."""

    object: str
    queued: list[str]
    """Episodes that were played, or waited for their reward or to be trained. They have ended without an outcome and
    are gone from Redis; their groups go on without them."""
    in_use: list[InUse]
    """Nothing of these is erased."""
    erased: list[Entered]
    """Their tokens, log-probs and names of users are gone from these logs; lengths, rewards and versions are not."""
    not_yet: list[Entered]
    """Nothing of these is erased: their job is not over and may have to train these steps again. Ask again once it has
    a later checkpoint."""
    unreadable: list[str]
    """Logs, and segments of the queue, that could not be looked into."""
    stays: list[str]
    """What erasing does not reach."""
