"""The whole of a training job, as its user writes it.

One rule: what a job does is written here and nowhere else. Unknown keys are refused, every default is visible, and the
docstring under a field is the only description of it (the JSON schema and the OpenAPI text are made from it).

It reads no file and no environment variable (`gspo_core.spec_file` reads files), resolves no model and runs no
environment. What is legal but known to be wrong is not refused; `spec_warnings` names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from gspo_core.documented import Documented, FreeForm
from gspo_core.environment_spec import Count, EnvironmentSpec, EpisodeLimits, Limits, PositiveInt, Seconds, is_none
from gspo_core.json_value import JSON
from gspo_core.learner_config import LearnerOptions, OptimizerConfig, with_named_bounds
from gspo_core.objective_config import Name, ObjectiveConfig, config_refusals, config_warnings, default_name
from gspo_core.stop_spec import StopSpec, WatchdogSpec
from gspo_core.types import MAX_EVIDENCE_BYTES

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Temperature = Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)]
# Pairs, lengths of keys and of values: generous for labels, too small to keep data in.
MAX_METADATA = (16, 64, 512)

# Beyond this staleness cap nothing is trained (as a multiple of the pace that admission keeps).
STALENESS_CAP_FACTOR = 4
# An hour of steps of 10 s, of which most wait: groups that wait hold memory in Redis, which has a budget of its own.
WAITING_FACTOR = 256


def _whole_vocabulary(top_p: float) -> float:
    if top_p != 1:
        raise ValueError(
            "only 1 can be trained: engines report log-probs over the whole vocabulary, so every ratio would be off "
            "by the probability mass that is cut away"
        )
    return top_p


def _is_default(section: Documented) -> bool:
    return section == type(section)()


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
    weight_transport: Literal["disk", "group", "delta", "adapter"] = "disk"
    """How new weights reach the engines: `disk` has engines read them from a volume that they and the trainer mount at
    the same path, `group` sends the tensors over the network (gloo, or NCCL from a trainer with a GPU), once to all
    engines, `delta` has engines that can read from the volume only what changed since the version they hold, bit for
    bit, `adapter` publishes the low-rank additions of `learner.lora` alone, and engines that can add them to the base
    model."""
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


# A reward is waited for in Redis, with all tokens of its group, and the key of its episode has to live as long.
MAX_REWARD_DEADLINE_S = 14 * 24 * 3600.0


EVIDENCE_BYTES = 16_384


class RewardsSpec(Documented):
    """Rewards that come after the agent's end (by `POST /v1/episode/reward` with the reward key of the episode), and
    what is kept of how rewards came about."""

    deadline_s: Annotated[float, Field(gt=0, le=MAX_REWARD_DEADLINE_S, allow_inf_nan=False)] | None = None
    """How long after its end an episode waits for its reward; after that it has none (`no_reward`) and is not trained.
    Left out: an agent that ends without a reward has failed. For jobs of agents."""
    on_late_reward: Literal["train", "mask", "drop"] = "mask"
    """What happens to a group that waited for rewards until it has tokens beyond `rollout.staleness_cap`: `train`
    trains them all the same (gates and corrections act on them), `mask` withholds them and keeps the rewards in the
    baseline, `drop` drops the group. A group that is younger is trained like any other."""
    max_waiting_groups: PositiveInt | None = None
    """Groups that wait for nothing but rewards make room for others, up to this many; more count as being played.
    Left out: 256 times `groups_per_step`."""
    evidence_bytes: Annotated[int, Field(ge=0, le=MAX_EVIDENCE_BYTES)] = Field(
        default=EVIDENCE_BYTES, exclude_if=lambda size: size == EVIDENCE_BYTES
    )
    """What an episode's reward was made from (the task, the state in which the world ended, what an agent returned,
    what a judge answered) is kept with the episode, up to so many bytes, for `gspo rescore`; what does not fit is left
    out by name. 0 keeps nothing."""


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
    calls: Literal["auto", "hermes", "qwen_xml", "glm_xml", "llama_json", "none"] = "auto"
    """The syntax in which the model writes tool calls, where its own template is used: `qwen_xml` for Qwen3-Coder and
    Qwen3.5, `glm_xml` for GLM-4.5 and later, `llama_json` for Llama 3. `auto` goes by what the template tells the
    model."""
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


ARCHIVE_BYTES = 16 * 2**30
MOST_WITHOUT = 1024


class CheckpointSpec(Documented):
    """What is kept on disk."""

    keep: PositiveInt = 2
    """Number of newest checkpoints to keep."""
    keep_versions: PositiveInt = 4
    """Number of newest published weight versions to keep."""
    keep_batches: PositiveInt = 200
    """Number of newest batch logs to keep, for inspection; logs that a kept checkpoint needs are kept as well."""
    archive: Literal["none", "all"] = Field(default="none", exclude_if=lambda archive: archive == "none")
    """`all`: batch logs beyond `keep_batches` are compressed and kept, so that every step of the job can be trained
    again, from its first on."""
    archive_bytes: PositiveInt = Field(default=ARCHIVE_BYTES, exclude_if=lambda size: size == ARCHIVE_BYTES)
    """Once the compressed logs have so many bytes no more are added; the first steps stay. Left out: 16 GiB."""
    keep_every: PositiveInt | None = Field(default=None, exclude_if=is_none)
    """The checkpoint of every step that this number divides is made and kept for good, beside the newest `keep`: with
    the logs that are kept, a replay or fork of any step is then fewer steps away. Left out: none, for each is weights
    and two moments."""

    def is_for_good(self, step: int) -> bool:
        """Whether the checkpoint after ``step`` is one that no newer ones push out."""
        return self.keep_every is not None and step % self.keep_every == 0


LeftOut = Annotated[str, StringConstraints(min_length=1, max_length=128)]
"""A group, an episode or a part of the reward."""


class ParentSpec(Documented):
    """The job that a job was forked from, and where. What it needs of the parent's files is brought along."""

    job: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    """Its id."""
    step: Count
    """It begins with the weights, moments and random state after this step, and counts its steps on from there."""
    same_batches: bool = False
    """It is first trained on the batches that the parent was trained on after this step, as far as they are kept."""
    last: PositiveInt | None = Field(default=None, exclude_if=is_none)
    """The step whose batch is the last of these. Left out: as far as they are kept."""
    without: tuple[LeftOut, ...] = Field(default=(), max_length=MOST_WITHOUT, exclude_if=lambda without: not without)
    """What these batches lack: groups (`130`), episodes (`130/4`), parts of the reward by their name."""
    rewards: Digest | None = Field(default=None, exclude_if=is_none)
    """Digest of the rewards that episodes in these batches were given in place of their own. The service sets it."""


class RecordedSpec(Documented):
    """Episodes that another job has played. A job is trained on them and on nothing else: it needs no engine and no
    rollout worker, and ends with them."""

    job: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    """The id of that job."""
    first: PositiveInt | None = None
    """The step of that job whose batch is the first. Left out: the oldest that is kept."""
    last: PositiveInt | None = None
    """The step whose batch is the last. Left out: the newest."""
    traces: bool = False
    """They are conversations that a gateway recorded (`POST /v1/jobs/{id}/retrain`)."""
    rewards: Digest | None = None
    """Digest of the rewards that they were given in place of their own. The service sets it."""


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
    rewards: RewardsSpec = Field(default_factory=RewardsSpec, exclude_if=_is_default)
    """Rewards that come late, and what is kept of how rewards came about."""
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
    parent: ParentSpec | None = Field(default=None, exclude_if=is_none)
    """The job that it was forked from. Left out: it begins with the model."""
    recorded: RecordedSpec | None = Field(default=None, exclude_if=is_none)
    """Recorded episodes to train on. Left out: it plays its own."""
    metadata: dict[str, str] = Field(default_factory=dict)
    """Labels for people and scripts, at most 16; they change nothing."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        checks = (_metadata_refusals(self.metadata), _schedule_refusals(self), _learner_refusals(self), _mixed(self))
        for refused in chain(*checks, _reward_refusals(self), _objective_refusals(self)):
            raise ValueError(refused)
        return self

    def episode_limits(self, environment: int, author: Mapping[str, JSON] | None = None) -> EpisodeLimits:
        """The bounds of an episode of environment number `environment`, whose author asks for `author`."""
        layers = Limits.model_validate(author or {}), self.limits, self.environments[environment].limits
        return EpisodeLimits.resolve(*layers)

    def has_checkpoint(self, step: int) -> bool:
        """Whether one is made after ``step`` because of its number."""
        return step % self.checkpoint_every == 0 or self.checkpoints.is_for_good(step)

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence that it can make."""
        return max(self.episode_limits(place).max_context_tokens for place in range(len(self.environments)))

    @property
    def is_of_agents(self) -> bool:
        """Whether agents play its episodes; a job is wholly of agents or wholly of environments."""
        return self.environments[0].agent is not None

    @property
    def max_waiting_groups(self) -> int:
        """Groups that may wait for rewards beside those that are played."""
        given = self.rewards.max_waiting_groups
        if self.rewards.deadline_s is None:
            return 0
        return WAITING_FACTOR * self.groups_per_step if given is None else given

    @property
    def evaluation_temperature(self) -> float:
        """At which evaluation episodes are sampled."""
        given = self.evaluation.temperature if self.evaluation else None
        return self.sampling.temperature if given is None else given

    @property
    def training_objective(self) -> ObjectiveConfig:
        """The objective with what follows from other sections filled in: the staleness cap."""
        return self.objective.model_copy(update={"staleness_cap": self.rollout.staleness_cap})

    @property
    def training_optimizer(self) -> OptimizerConfig:
        """The optimizer with what follows from the objective's name filled in."""
        return with_named_bounds(self.optimizer, self.objective.name)

    def as_submitted(self) -> Self:
        """As a new submission: with the name that its objective has by default, and with a rate that follows the signal
        for GSPO on old data. A job with the past of another one stays as it is."""
        if self.parent is not None or self.recorded is not None:
            return self
        named = self.with_name(default_name(self.objective))
        return named.with_signal_scaling(True) if named.wants_signal_scaling else named

    @property
    def wants_signal_scaling(self) -> bool:
        """Whether it says nothing of `signal_scaling`, and runs like it were seen to fall less often with it
        (docs/staleness.md). A pull to a reference acts without any signal, so its rate does not follow one."""
        objective, is_silent = self.objective, self.optimizer.signal_scaling is None
        is_shaken = objective.name == "gspo" and not objective.kl_coef and self.rollout.max_staleness >= OLD_DATA
        return is_silent and is_shaken

    def with_name(self, name: Name | None) -> Self:
        """With this name of its objective; the rest stays as it is."""
        return self.model_copy(update={"objective": self.objective.model_copy(update={"name": name})})

    def with_signal_scaling(self, scaling: bool | None) -> Self:
        """With this one of its optimizer; the rest stays as it is."""
        return self.model_copy(update={"optimizer": self.optimizer.model_copy(update={"signal_scaling": scaling})})


# At this pace runs were seen to fall, and not at 4, the default; nothing between was tried.
OLD_DATA = 16


def spec_warnings(spec: JobSpec) -> list[str]:
    """What is legal but known to be wrong or easily misunderstood, one sentence each, naming the key."""
    warnings = [f"objective.{warning}" for warning in config_warnings(spec.objective)]
    if spec.rollout.max_staleness > 0 and spec.objective.correction == "none" and spec.objective.anchor == "proximal":
        warnings.append(
            f"objective.correction: none leaves up to {spec.rollout.staleness_cap} steps of staleness uncorrected; "
            "set rollout.max_staleness to 0, or choose a correction"
        )
    if spec.rollout.max_staleness >= OLD_DATA and not spec.training_optimizer.max_grad_growth:
        warnings.append(
            f"optimizer.max_grad_growth: not set, with data up to {spec.rollout.max_staleness} steps old: one long "
            "gradient behind short ones can undo such a run; 1 bounds it by the usual length"
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


def _reward_refusals(spec: JobSpec) -> Iterator[str]:
    rewards = spec.rewards
    if rewards.deadline_s is not None and not spec.is_of_agents:
        yield (
            "rewards.deadline_s: only agents have a key by which a reward can come late; environments are judged at "
            "their end. Remove it"
        )
    defaults = RewardsSpec()
    names = ("on_late_reward", "max_waiting_groups")
    idle = [name for name in names if getattr(rewards, name) != getattr(defaults, name)]
    if rewards.deadline_s is None and idle:
        yield f"rewards.{idle[0]}: acts only on rewards that come late; set rewards.deadline_s or remove it"


def _learner_refusals(spec: JobSpec) -> Iterator[str]:
    objective = spec.objective
    if spec.rollout.weight_transport == "adapter" and spec.learner.lora is None:
        yield (
            "rollout.weight_transport: adapter publishes low-rank additions, and this job trains whole weights; set "
            "learner.lora, or use disk"
        )
    if spec.watchdog.on_fall != "tell" and spec.evaluation is None:
        yield f"watchdog.on_fall: {spec.watchdog.on_fall} follows from held-out rewards, but there is no evaluation"
    if spec.recorded is not None and spec.parent is not None:
        yield "recorded: a fork is fed its parent's batches (parent.same_batches); give one of parent and recorded"
    if spec.recorded is not None and spec.evaluation is not None:
        yield "evaluation: a job that is trained on recorded episodes plays none; measure it with `gspo eval`"
    if spec.parent is not None:
        yield from _fed_refusals(spec.parent)
    if spec.parent is not None and spec.steps <= spec.parent.step:
        yield f"steps: {spec.steps} are over at the step {spec.parent.step} that the job is forked from"
    if spec.learner.routing_replay and (objective.anchor == "behavior" or objective.minibatches == 1):
        yield (
            "learner.routing_replay: reuses the experts of the proximal forward pass, which runs only with "
            "objective.anchor: proximal and objective.minibatches above 1; remove it"
        )


def _fed_refusals(parent: ParentSpec) -> Iterator[str]:
    named = [name for name in ("last", "without") if getattr(parent, name)]
    if named and not parent.same_batches:
        yield f"parent.{named[0]}: is of the batches that a fork is fed; set parent.same_batches"
    if parent.last is not None and parent.last <= parent.step:
        yield f"parent.last: {parent.last} is not after the step {parent.step} that the job is forked from"


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
