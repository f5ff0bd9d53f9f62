"""The whole of a training job, as its user writes it.

One rule: what a job does is written here and nowhere else. Unknown keys are refused, every default is visible, and the
docstring under a field is the only description of it (the JSON schema and the OpenAPI text are made from it).

It reads no file and no environment variable (`gspo_core.spec_file` reads files), resolves no model and runs no
environment. What is legal but known to be wrong is not refused; `spec_warnings` names it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, Field, JsonValue, StringConstraints, model_validator

from gspo_core.documented import Documented
from gspo_core.json_value import JSON
from gspo_core.learner_config import LearnerOptions, OptimizerConfig
from gspo_core.objective_config import ObjectiveConfig, config_refusals, config_warnings
from gspo_core.outbound import MAX_URL_CHARS
from gspo_core.stop_spec import StopSpec, WatchdogSpec

PositiveInt = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Temperature = Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)]
# Pairs, lengths of keys and of values: generous for labels, too small to keep data in.
MAX_METADATA = (16, 64, 512)

# Beyond this staleness cap nothing is trained (as a multiple of the pace that admission keeps).
STALENESS_CAP_FACTOR = 4


T = TypeVar("T")


def _finite(value: T) -> T:
    """Free-form parts are checked by hand: a validator's ban on NaN and infinity does not reach into them."""
    for number in _numbers(value):
        if not math.isfinite(number):
            raise ValueError(f"numbers must be finite, not {number}")
    return value


def _numbers(value: object) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _numbers(item)
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item)


def _whole_vocabulary(top_p: float) -> float:
    if top_p != 1:
        raise ValueError(
            "only 1 can be trained: engines report log-probs over the whole vocabulary, so every ratio would be off "
            "by the probability mass that is cut away"
        )
    return top_p


_CLASS = re.compile(r"[^\s:]+:[A-Za-z_][A-Za-z0-9_.]*")
_REGISTERED = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}(@[1-9][0-9]{0,7})?")


def _reference(text: str) -> str:
    if not _CLASS.fullmatch(text) and not _REGISTERED.fullmatch(text):
        raise ValueError("use package.module:Class, path/to/file.py:Class, or name@version of a registered environment")
    return text


FreeForm = Annotated[dict[str, JsonValue], AfterValidator(_finite)]


class ParseErrorPolicy(Documented):
    """What happens when a tool call of the policy cannot be read."""

    feedback: Count = 2
    """Unreadable turns in a row that are answered with the error, so that the policy can try again."""
    then: Literal["end"] = "end"
    """What happens at the next one: the episode ends with `parse_error`."""


class Limits(Documented):
    """Limits of an episode. Where one is left out, the environment author's value applies, else the default stated."""

    max_turns: PositiveInt | None = None
    """Assistant turns of an episode; the episode ends with `max_turns`. Default 16."""
    max_tool_calls: PositiveInt | None = None
    """Tool calls of an episode; the episode ends with `max_tool_calls`. Default 32."""
    max_episode_tokens: PositiveInt | None = None
    """Sampled tokens of an episode, all turns together; the episode ends with `max_tokens`. Default 8192."""
    max_context_tokens: PositiveInt | None = None
    """Prompt, tool output and sampled tokens of an episode together; the episode ends with `context_overflow`.
    The model's own limit applies too. Default 32768."""
    max_observation_chars: Annotated[int, Field(ge=100)] | None = None
    """Characters of one answer from an environment that the policy reads. A longer one loses its middle, and a line in
    its place says how much was left out. Default 100000."""
    reset_timeout_s: Seconds | None = None
    """Time for an environment to start an episode; exceeding it is a retried infrastructure failure. Default 60."""
    step_timeout_s: Seconds | None = None
    """Time for one tool call; beyond it the policy is told, or the episode ends with `tool_timeout`. Default 20."""
    score_timeout_s: Seconds | None = None
    """Time for computing the reward; exceeding it is an infrastructure failure. Default 30."""
    close_timeout_s: Seconds | None = None
    """Time for an environment to clean up; exceeding it is only counted. Default 10."""
    episode_timeout_s: Seconds | None = None
    """Wall-clock time of an episode, not counting waits for weights or for an engine; the episode ends with
    `episode_timeout`. Default 1800."""
    retries: Count | None = None
    """How often starting an episode is retried after an infrastructure failure. Default 2."""
    on_parse_error: ParseErrorPolicy | None = None
    """What happens when a tool call of the policy cannot be read. Default: feedback 2, then end."""
    on_truncation: Literal["score", "zero"] | None = None
    """The reward of an episode that hit a limit: `score` asks the environment as usual, `zero` is 0.
    Default score."""
    max_repetition_tokens: Annotated[int, Field(ge=8)] | None = None
    """A turn that repeats a piece of at most 64 tokens for this many tokens ends the episode with `repetition`, a limit
    like the others. Checked after every `chunk_tokens`. Default none."""
    overlong_tokens: PositiveInt | None = None
    """A penalty for the last this many of `max_episode_tokens`: the reward falls linearly over them, by 1 at the limit.
    Held-out episodes keep their reward. Default none."""


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """The limits that apply to an episode, all of them set. `Limits` describes each."""

    max_turns: int = 16
    max_tool_calls: int = 32
    max_episode_tokens: int = 8192
    max_context_tokens: int = 32768
    max_observation_chars: int = 100_000
    reset_timeout_s: float = 60.0
    step_timeout_s: float = 20.0
    score_timeout_s: float = 30.0
    close_timeout_s: float = 10.0
    episode_timeout_s: float = 1800.0
    retries: int = 2
    on_parse_error: ParseErrorPolicy = field(default_factory=ParseErrorPolicy)
    on_truncation: Literal["score", "zero"] = "score"
    max_repetition_tokens: int | None = None
    overlong_tokens: int | None = None

    @classmethod
    def resolve(cls, *layers: Limits) -> Self:
        """Later layers win: author of the environment, job, the job's entry for this environment."""
        given: dict[str, Any] = {}
        for layer in layers:
            values = {name.name: getattr(layer, name.name) for name in fields(cls)}
            given |= {name: value for name, value in values.items() if value is not None}
        return cls(**given)


class HostSpec(Documented):
    """Limits of the processes that an environment runs in. Where one is left out, its author's value (`hosting`)
    applies, else the default stated."""

    sessions_per_process: PositiveInt | None = None
    """Episodes that share a process. Default: 256 if every method is async, 16 if the environment is `replayable` or
    offers snapshots, else 1."""
    max_processes: PositiveInt | None = None
    """Processes per rollout worker. Episodes that do not fit wait for a place. Default 64."""
    memory_mb: PositiveInt | None = None
    """Memory of one process; beyond it the episode that acted ends with `env_crash`. Default 1024."""
    file_mb: PositiveInt | None = None
    """Size of a file that it may write; beyond it writing fails. Default 64."""
    boot_timeout_s: Seconds = 120.0
    """Time for loading the environment; beyond it the worker cannot serve the job."""


# Of a command: more than any shell would be given, less than what makes a record large.
MAX_WORDS, MAX_WORD_CHARS = 64, 4096

_Word = Annotated[str, StringConstraints(min_length=1, max_length=MAX_WORD_CHARS, pattern=r"^[^\x00]+$")]


class AgentSpec(Documented):
    """How the agent is started, once an episode. With nothing given, `ref` names a function `run(task, llm)`."""

    url: Annotated[str, StringConstraints(max_length=MAX_URL_CHARS, pattern=r"^https?://[^\s]+$")] | None = None
    """A service that is sent the task, a base URL and a key with POST, and plays the episode before it answers.
    `ref` names what has the tasks."""
    command: Annotated[tuple[_Word, ...], Field(min_length=1, max_length=MAX_WORDS)] | None = None
    """A program and its arguments, started with the task, base URL and key in environment variables. `ref` names what
    has the tasks."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.url is not None and self.command is not None:
            raise ValueError("give url or command, not both")
        return self


class EnvironmentSpec(Documented):
    """One environment of a job."""

    ref: Annotated[str, StringConstraints(max_length=1024), AfterValidator(_reference)]
    """Its class: `package.module:Class` or `path/to/file.py:Class`. Or a registered environment: `name@version`, or
    `name` for the newest version at the time the job is submitted."""
    config: FreeForm = Field(default_factory=dict)
    """Keyword arguments for the class. A registered version brings its own."""
    agent: AgentSpec | None = None
    """An agent plays the episodes and asks the gateway for its turns; `{}` is enough where `ref` names a function
    `run(task, llm)`. Left out: `ref` is a class whose methods the policy calls as tools."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Its share of the groups, relative to the other environments' weights."""
    limits: Limits = Field(default_factory=Limits)
    """Limits for episodes of this environment; they override the job's."""
    host: HostSpec = Field(default_factory=HostSpec)
    """Limits of the processes that it runs in."""
    broken_reward: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """The reward of an episode whose own action broke its environment (`tool_timeout`, `env_crash`).
    Left out: the low end of the environment's `reward_range`, else 0."""


class RolloutSpec(Documented):
    """How episodes are collected, and how stale training data may be."""

    group_size: PositiveInt = 8
    """Episodes of one task, whose rewards are compared with each other."""
    max_staleness: Count = 4
    """Steps by which sampling may run ahead of the published weights. 0 is exactly synchronous."""
    staleness_cap: Count = Field(default_factory=lambda given: STALENESS_CAP_FACTOR * given["max_staleness"])
    """Tokens older than this many steps are never trained. Left out: 4 times `max_staleness`."""
    on_stale: Literal["mask", "drop", "wait"] = "mask"
    """What happens to an episode beyond the cap: `mask` withholds the old tokens and keeps the reward in its group's
    baseline, `drop` drops the group, `wait` delays a step that would put an unfinished episode beyond it."""
    stale_wait_s: Seconds = 600.0
    """With `on_stale: wait`: the longest that a step is delayed; after that, tokens beyond the cap are masked."""
    on_partial_group: Annotated[str, StringConstraints(pattern=r"^(all|drop|min_viable:[1-9][0-9]*)$")] = "all"
    """A group with a member that cannot be finished: `all` waits for every member within its retries, `min_viable:k`
    trains the group from k finished members on, `drop` drops the group."""
    on_stragglers: Literal["wait", "cancel"] = "wait"
    """With `on_partial_group: min_viable:k`, while a batch lacks groups: `wait` waits for the members still playing,
    `cancel` ends them as soon as k members of their group have a reward. Dispatch more members than you need, and the
    slowest hold nobody up; this favours short episodes, which `selection/*` measures."""
    chunk_tokens: PositiveInt = 1024
    """Longer turns are sampled in pieces of this many tokens; a killed process loses at most one piece."""
    lease_tokens: PositiveInt | None = None
    """While other episodes wait for a place on a rollout worker, an episode samples this many tokens at a stretch, then
    queues behind them and continues from what is stored. Left out: every episode keeps its place, which computes no
    token twice and is best while workers have places for all."""
    lease_s: Seconds | None = None
    """The same by time: how long an episode keeps its place while others wait for one."""
    weight_sync: Literal["retract", "in_place"] = "retract"
    """What happens to requests in flight when new weights arrive: `retract` recomputes their keys and values under the
    new weights, `in_place` continues with those of the old ones, which pauses engines for less time but gives results
    that no single version reproduces."""
    weight_transport: Literal["disk", "group"] = "disk"
    """How new weights reach the engines: `disk` has engines read them from a volume that they and the trainer mount at
    the same path, `group` sends the tensors over the network (gloo, or NCCL from a trainer with a GPU), one engine at
    a time."""
    max_engine_k3: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.02
    """Largest divergence (k3, per token) between the log-probs of an engine and of the trainer under the same weights.
    Beyond it nothing is trained: the engine has other weights, a wrong template or temperature, or broken numerics."""

    @property
    def min_group_size(self) -> int:
        """Finished members that make a group trainable."""
        _, _, minimum = self.on_partial_group.partition(":")
        return int(minimum) if minimum else self.group_size

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.staleness_cap < self.max_staleness:
            raise ValueError(
                f"staleness_cap ({self.staleness_cap}) must not be below max_staleness ({self.max_staleness}): "
                "episodes that admission allows would be withheld. Raise it or leave it out"
            )
        if self.min_group_size > self.group_size:
            raise ValueError(
                f"on_partial_group asks for {self.min_group_size} members, but group_size is {self.group_size}"
            )
        if self.on_stragglers == "cancel" and self.min_group_size == self.group_size:
            raise ValueError(
                "on_stragglers: cancel needs on_partial_group: min_viable:k with fewer members than group_size"
            )
        return self


class SamplingSpec(Documented):
    """How the policy is sampled while it trains."""

    temperature: Temperature = 1.0
    """Temperature of the distribution that tokens are drawn from; the trainer uses the same."""
    max_new_tokens: PositiveInt = 1024
    """Sampled tokens of one turn."""
    top_p: Annotated[float, AfterValidator(_whole_vocabulary)] = 1.0
    """Always 1, the whole vocabulary: the recorded log-probs describe no other distribution."""


class ChatSpec(Documented):
    """How messages become tokens. Left out, the model's own files decide."""

    format: Literal["auto", "hermes", "template"] = "auto"
    """`hermes`: ChatML with Hermes tool calls, written out here, as Qwen2.5 and Qwen3 read it. `template`: the model's
    own chat template. `auto`: hermes where both give the same tokens, else template."""
    calls: Literal["auto", "hermes", "qwen_xml", "llama_json", "none"] = "auto"
    """The syntax in which the model writes tool calls, where its own template is used: `qwen_xml` for Qwen3-Coder and
    Qwen3.5, `llama_json` for Llama 3. `auto` goes by what the template tells the model."""
    thinking: Literal["keep", "template"] = "keep"
    """What happens to earlier reasoning when a new user message comes: `keep` leaves the history as it was sampled;
    `template` removes it where the model's template does, which starts a new branch of the episode."""
    variables: FreeForm = Field(default_factory=dict)
    """Passed to the template, e.g. `{"enable_thinking": false}` for Qwen3."""


class EvaluationSpec(Documented):
    """Episodes on held-out tasks; they are measured and never trained."""

    tasks: PositiveInt = 32
    """Number of held-out tasks to play; fewer if the environments have fewer."""
    episodes_per_task: PositiveInt = 1
    """Episodes per task."""
    every: PositiveInt = 10
    """Steps between evaluations. One is also made before the first step and one after the last."""
    temperature: Temperature | None = None
    """Sampling temperature of these episodes. Left out: that of the training episodes."""


class CheckpointSpec(Documented):
    """What is kept on disk."""

    keep: PositiveInt = 2
    """Number of newest checkpoints to keep."""
    keep_versions: PositiveInt = 4
    """Number of newest published weight versions to keep."""
    keep_batches: PositiveInt = 200
    """Number of newest batch logs to keep, for inspection; logs that a kept checkpoint needs are kept as well."""


class ResourceSpec(Documented):
    """What a job needs in order to be placed; it waits until this is available."""

    device: Literal["any", "cpu", "cuda"] = "any"
    """Kind of device that the trainer runs on."""
    num_engines: PositiveInt = 1
    """Engines that must serve the job before it starts."""
    priority: Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False)] = 1.0
    """Its share of the rollout workers' places, relative to the other jobs that want them."""


class JobSpec(Documented):
    """A training job: a model, the environments it learns in, and how."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=128)] | None = None
    """A label for people; it need not be unique."""
    model: Annotated[str, StringConstraints(min_length=1, max_length=4096, pattern=r"^[^\s\x00](.*[^\s\x00])?$")]
    """The model to start from: a directory with its files in the format of Hugging Face, seen by all processes; or
    OWNER/NAME of the hub, which `gspo fetch` has fetched. The job then stores the directory of that commit."""
    environments: Annotated[tuple[EnvironmentSpec, ...], Field(min_length=1, max_length=64)]
    """The environments it learns in; tasks are drawn from all of them by weight."""
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    """The loss."""
    rollout: RolloutSpec = Field(default_factory=RolloutSpec)
    """How episodes are collected, and how stale training data may be."""
    sampling: SamplingSpec = Field(default_factory=SamplingSpec)
    """How the policy is sampled while it trains."""
    chat: ChatSpec = Field(default_factory=ChatSpec)
    """How messages become tokens."""
    limits: Limits = Field(default_factory=Limits)
    """Limits for every episode; those in an environment's entry override them."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """How the loss changes the weights."""
    learner: LearnerOptions = Field(default_factory=LearnerOptions)
    """How the trainer computes: low-rank additions, memory against speed, precision."""
    steps: PositiveInt = 200
    """Steps after which the job has succeeded."""
    groups_per_step: PositiveInt = 8
    """Groups that make up the batch of one step."""
    checkpoint_every: PositiveInt = 20
    """Steps between checkpoints. One is also made after the last step."""
    checkpoints: CheckpointSpec = Field(default_factory=CheckpointSpec)
    """What is kept on disk."""
    evaluation: EvaluationSpec | None = None
    """Measure on held-out tasks. Left out: no evaluation."""
    stop: StopSpec = Field(default_factory=StopSpec)
    """What ends the job before its last step."""
    watchdog: WatchdogSpec = Field(default_factory=WatchdogSpec)
    """What happens when the run makes no progress."""
    resources: ResourceSpec = Field(default_factory=ResourceSpec)
    """What the job needs in order to be placed."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of everything random that the job itself decides: task order, episode seeds, order of updates."""
    metadata: dict[str, str] = Field(default_factory=dict)
    """Labels for people and scripts, at most 16; they change nothing."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        checks = (_metadata_refusals(self.metadata), _schedule_refusals(self), _learner_refusals(self), _mixed(self))
        for refused in chain(*checks, _objective_refusals(self)):
            raise ValueError(refused)
        return self

    def episode_limits(self, environment: int, author: Mapping[str, JSON] | None = None) -> EpisodeLimits:
        """The bounds of an episode of environment number `environment`, whose author asks for `author`."""
        layers = Limits.model_validate(author or {}), self.limits, self.environments[environment].limits
        return EpisodeLimits.resolve(*layers)

    @property
    def is_of_agents(self) -> bool:
        """Whether agents play its episodes; a job is wholly of agents or wholly of environments."""
        return self.environments[0].agent is not None

    @property
    def evaluation_temperature(self) -> float:
        """At which evaluation episodes are sampled."""
        given = self.evaluation.temperature if self.evaluation else None
        return self.sampling.temperature if given is None else given

    @property
    def training_objective(self) -> ObjectiveConfig:
        """The objective with what follows from other sections filled in: the staleness cap."""
        return self.objective.model_copy(update={"staleness_cap": self.rollout.staleness_cap})


def spec_warnings(spec: JobSpec) -> list[str]:
    """What is legal but known to be wrong or easily misunderstood, one sentence each, naming the key."""
    warnings = [f"objective.{warning}" for warning in config_warnings(spec.objective)]
    if spec.rollout.max_staleness > 0 and spec.objective.correction == "none" and spec.objective.anchor == "proximal":
        warnings.append(
            f"objective.correction: none leaves up to {spec.rollout.staleness_cap} steps of staleness uncorrected; "
            "set rollout.max_staleness to 0, or choose a correction"
        )
    episode_tokens = spec.limits.max_episode_tokens
    if episode_tokens is not None and episode_tokens < spec.sampling.max_new_tokens:
        warnings.append(
            f"limits.max_episode_tokens: {episode_tokens} for a whole episode is less than sampling.max_new_tokens "
            f"({spec.sampling.max_new_tokens}) for one turn"
        )
    return warnings


def _metadata_refusals(metadata: Mapping[str, str]) -> Iterator[str]:
    pairs, key_length, value_length = MAX_METADATA
    if len(metadata) > pairs:
        yield f"metadata: at most {pairs} labels, not {len(metadata)}"
    if any(len(key) > key_length or len(value) > value_length for key, value in metadata.items()):
        yield f"metadata: a key may have at most {key_length} characters, a value at most {value_length}"


def _schedule_refusals(spec: JobSpec) -> Iterator[str]:
    optimizer = spec.optimizer
    if optimizer.schedule != "constant" and (optimizer.decay_steps or spec.steps) <= optimizer.warmup_steps:
        yield (
            f"optimizer.warmup_steps: {optimizer.warmup_steps} leaves none of the {spec.steps} steps for the schedule "
            f"{optimizer.schedule}"
        )


def _mixed(spec: JobSpec) -> Iterator[str]:
    """Rollout workers play environments and gateways agents; no episode of a job waits for the other kind."""
    differing = [place for place, one in enumerate(spec.environments) if (one.agent is not None) != spec.is_of_agents]
    if differing:
        has, lacks = ("environments[0]", f"environments[{differing[0]}]")[:: 1 if spec.is_of_agents else -1]
        yield (
            f"environments: {has} has an agent, but {lacks} has none; a job is wholly of agents or wholly of "
            "environments: submit two jobs"
        )


def _learner_refusals(spec: JobSpec) -> Iterator[str]:
    objective = spec.objective
    if spec.learner.routing_replay and (objective.anchor == "behavior" or objective.minibatches == 1):
        yield (
            "learner.routing_replay: reuses the experts of the proximal forward pass, which runs only with "
            "objective.anchor: proximal and objective.minibatches above 1; remove it"
        )


def _objective_refusals(spec: JobSpec) -> Iterator[str]:
    yield from (f"objective.{refusal}" for refusal in config_refusals(spec.objective))
    if spec.objective.staleness_cap not in (None, spec.rollout.staleness_cap):
        yield (
            f"objective.staleness_cap: {spec.objective.staleness_cap} contradicts rollout.staleness_cap "
            f"({spec.rollout.staleness_cap}); set it only there"
        )
    longest = max(spec.episode_limits(place).max_episode_tokens for place in range(len(spec.environments)))
    if spec.objective.correction.startswith("product") and longest > spec.objective.product_max_tokens:
        yield (
            f"objective.correction: {spec.objective.correction} refuses episodes of more than "
            f"{spec.objective.product_max_tokens} sampled tokens (objective.product_max_tokens), but this job allows "
            f"{longest}; set limits.max_episode_tokens to at most {spec.objective.product_max_tokens}"
        )
    if spec.objective.advantage.min_group_size > spec.rollout.min_group_size:
        yield (
            f"objective.advantage.min_group_size: {spec.objective.advantage.min_group_size} is more than the "
            f"{spec.rollout.min_group_size} members that a group may have under rollout: every advantage could be 0"
        )
