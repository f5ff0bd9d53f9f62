"""What a user may set about the optimizer and the learner.

One rule: every key acts or is refused; nothing is guessed from the environment. It imports no torch, so a job
specification can hold these values on a laptop without it. It computes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from gspo_core.documented import Documented

# What computes a model and its gradients, by name: the module with its `load_policy`. Another is a file and a line.
POLICIES: dict[str, str] = {"transformers": "gspo_core.learner.policy_model"}


def _is_auto(value: object) -> bool:
    return value == "auto"


def _is_off(value: object) -> bool:
    return value is False


PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Momentum = Annotated[float, Field(ge=0, lt=1)]
Growth = Literal[0] | Annotated[float, Field(ge=1, allow_inf_nan=False)]


Checkpointing = bool | Literal["auto", "keep_attention"]


class OptimizerConfig(Documented):
    """AdamW, its learning-rate schedule and the clipping of the gradient."""

    lr: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-6
    """The highest learning rate of the schedule. 0 trains nothing, as a control."""
    betas: tuple[Momentum, Momentum] = (0.9, 0.999)
    """Decay of the running mean of the gradient and of its square."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the running mean of squares."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Decoupled; acts on matrices, never on biases and norms."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after the warm-up: not at all, linearly or along half a cosine."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises linearly. All updates of one step share one learning rate."""
    decay_steps: PositiveInt | None = None
    """The step at which the decay ends, counted from the start of the job. Unset: the last step of the job."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Where the decay ends, as a share of `lr`."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Longer gradients (Euclidean norm over all parameters) are scaled down to it. Null: never."""
    # Release 0.2.0 does not know the key and refuses a job with it, so a job that does not use it is stored without.
    max_grad_growth: Growth | None = Field(default=None, exclude_if=lambda growth: growth is None)
    """Gradients longer than this many times the root mean square of the earlier ones, as AdamW remembers them, are
    scaled down to that: AdamW divides by what it remembers, so behind many short gradients a long one is a far step.
    0: never. Null: as `objective.name` says, else never."""
    max_step_k3: PositiveFloat | None = Field(default=None, exclude_if=lambda bound: bound is None)
    """The farthest that one step may move the policy from where the step began: mean k3 over the sampled tokens of its
    batch. Of a step that went farther only the first part of the way is kept, in the weights and in AdamW's first
    moments. Costs two passes without gradient over the batch. Null: any distance."""
    ess_scaling: bool = Field(default=False, exclude_if=lambda scales: not scales)
    """Scale the learning rate of a step by the root of the effective sample size of its sequences as a share of their
    number, by the product of their tokens' importance weights (after VCPO)."""
    # A new job is stored with the value it is trained with, so that releases may choose differently.
    signal_scaling: bool | None = Field(default=None, exclude_if=lambda scales: scales is None)
    """Scale the learning rate of a step by the share of its sequences that teach, whose group's rewards differ: a
    gradient shrinks with that share, and AdamW, which divides by what is usual, would make up for it. Groups that
    fail as a whole teach nothing either: it may keep a run that has fallen where it is. Null: false, but a new job of
    the objective `gspo`, with `rollout.max_staleness` of 16 or more and no `kl_coef`, is stored with true."""
    moments: Literal["float32", "8bit"] = Field(default="float32", exclude_if=lambda kind: kind == "float32")
    """How the running means are kept between updates. `8bit` takes a quarter of the memory and changes what is learned
    a little: the means of a matrix are rounded, up or down in turn, to 8 bits beside a scale for 256 numbers."""

    @model_validator(mode="after")
    def _check_moments(self) -> Self:
        if self.moments == "8bit" and self.max_step_k3 is not None:
            raise ValueError("max_step_k3 takes a step back exactly, which moments: 8bit cannot; leave one of them out")
        return self

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ValueError(f"decay_steps ({self.decay_steps}) must be above warmup_steps ({self.warmup_steps})")
        if self.schedule == "constant" and (self.decay_steps is not None or self.min_lr_ratio):
            raise ValueError("decay_steps and min_lr_ratio only act on the schedules linear and cosine; remove them")
        return self


# Where a job says nothing, by the name of its objective. A job that is stored with a name goes on with what the name
# says here, so a value never changes; another one needs a key that says so. Why these: docs/baselines.md, "Runs that
# fall".
NAMED_BOUNDS: Mapping[str, Mapping[str, float]] = {"gspo": {"max_grad_growth": 1.0}}


def with_named_bounds(optimizer: OptimizerConfig, name: str | None) -> OptimizerConfig:
    """The optimizer of a job whose objective has this name, if any."""
    unset = {key: value for key, value in NAMED_BOUNDS.get(name or "", {}).items() if getattr(optimizer, key) is None}
    return optimizer.model_copy(update=unset)


LIVE_RATES = (
    "lr",
    "min_lr_ratio",
    "decay_steps",
    "max_grad_norm",
    "max_grad_growth",
    "max_step_k3",
    "ess_scaling",
    "signal_scaling",
)
"""Settings of the optimizer that may change between two steps."""


class LoraConfig(Documented):
    """Train low-rank additions to the linear layers instead of the weights (needs the `lora` extra)."""

    rank: PositiveInt = 16
    """Rank of the additions."""
    alpha: PositiveFloat = 32.0
    """The additions are scaled by alpha / rank."""
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Names of the layers that get an addition; `all-linear` is every linear layer except the head. The experts and the
    router of a mixture are not linear layers and stay as they are, but for `experts`."""
    # Release 0.2.0 does not know this key and the next.
    experts: bool = Field(default=False, exclude_if=lambda are_added: not are_added)
    """The experts of a mixture get additions too, each of their projections its own."""
    base_dtype: Literal["float32", "bfloat16"] = Field(default="float32", exclude_if=lambda dtype: dtype == "float32")
    """How the frozen weights are kept. `bfloat16` takes half the memory, and is exact for models that are published
    in it."""


class LearnerOptions(Documented):
    """How a batch becomes updates on this machine. Nothing here but `lora` and `routing_replay` changes what is
    learned."""

    # Release 0.2.0 does not know `auto`, so a job that leaves the key alone is stored without, and read there with that
    # release's default.
    micro_batch_tokens: PositiveInt | Literal["auto"] = Field(default="auto", exclude_if=_is_auto)
    """Tokens that pass through the model at once. A longer sequence forms a micro-batch of its own. `auto`: 16,384
    for each rank that shares them, or as many as fit the GPU (`gspo plan` says how many)."""
    layout: Literal["auto", "shared", "packed", "padded"] = "shared"
    """How sequences are laid out in a micro-batch. `shared`: end to end, with their common beginning (system prompt,
    question) once; `packed`: end to end; `padded`: side by side, for models whose attention cannot be
    replaced. All three compute the same. `auto` is `shared` today."""
    logprob_chunk_tokens: PositiveInt | None = None
    """Rows of the head's output (each as long as the vocabulary) held at once. Unset: 64 MiB of them on a CPU,
    1 GiB on a GPU."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the forward and backward pass; `auto` is bfloat16 on a GPU and float32 on a CPU. The weights
    that the optimizer updates are float32 in either case."""
    activation_checkpointing: Checkpointing = Field(default="auto", exclude_if=_is_auto)
    """Recompute the layers in the backward pass instead of keeping their activations. `auto`: where they would not fit
    the GPU otherwise; never on a CPU. `keep_attention`: recompute all but attention, whose results are kept."""
    # Release 0.2.0 does not know this key and the next.
    context_parallel: PositiveInt = Field(default=1, exclude_if=lambda number: number == 1)
    """Ranks that share each micro-batch, for sequences too long for one GPU: each computes its part of the tokens, and
    attention over all of them for some of the heads. It divides the number of ranks and that of heads; the layout
    is `shared` or `packed`."""
    replicas: PositiveInt = Field(default=1, exclude_if=lambda number: number == 1)
    """Copies of the model, each sharded over its part of the ranks: with one copy on each machine, weights are gathered
    within a machine, and only gradients cross between them. It divides the number of ranks."""
    routing_replay: bool = False
    """Mixture of experts: the updates use the experts that the proximal forward chose."""
    lora: LoraConfig | None = None
    """Train low-rank additions only."""
    # Release 0.2.0 does not know this key and those after it.
    policy: str = Field(default="transformers", exclude_if=lambda name: name == "transformers")
    """What computes the model and its gradients: `transformers`, or another that the installation has."""
    fused_optimizer: bool = Field(default=False, exclude_if=_is_off)
    """AdamW in one kernel, without the roots of the second moments beside them; its rounding differs in last bits."""
    offload_moments: bool | Literal["auto"] = Field(default=False, exclude_if=_is_off)
    """Keep the moments in the host's memory, and bring those of some parameters to the device for each update: 8 bytes
    for each parameter less on the device. Changes no bit. `auto`: where the job would not fit the GPU otherwise."""
    compile_layers: bool = Field(default=False, exclude_if=_is_off)
    """Compile the layers (`torch.compile`), but for attention: fewer, larger kernels. Needs a compiler, takes time at
    the start of each attempt, and rounds otherwise in last bits. On one rank only in float32."""

    @field_validator("policy")
    @classmethod
    def _check_policy(cls, name: str) -> str:
        if name not in POLICIES:
            raise ValueError(f"there is no policy {name} here, but {', '.join(POLICIES)}")
        return name

    @model_validator(mode="after")
    def _check_split(self) -> Self:
        if self.context_parallel > 1 and self.layout == "padded":
            raise ValueError("context_parallel splits the layouts shared and packed, not padded")
        return self


class LearnerConfig(LearnerOptions):
    """Everything that configures a learner besides its objective."""

    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    total_steps: PositiveInt | None = None
    """Steps of the whole job; a schedule without `decay_steps` ends there."""
    longest_sequence: PositiveInt | None = None
    """Tokens of the longest sequence that the job can make, which `auto` must leave memory for."""
    publishes_adapter: bool = False
    """What is published are the low-rank additions alone, not the model that they make."""

    @model_validator(mode="after")
    def _check_published(self) -> Self:
        if self.publishes_adapter and self.lora is None:
            raise ValueError("publishes_adapter: there are no low-rank additions without lora")
        return self

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        optimizer = self.optimizer
        if optimizer.schedule == "constant":
            return self
        end = optimizer.decay_steps or self.total_steps
        if end is None:
            raise ValueError(f"the schedule {optimizer.schedule} needs optimizer.decay_steps or total_steps")
        if end <= optimizer.warmup_steps:
            raise ValueError(f"the schedule ends at step {end}, within the warm-up of {optimizer.warmup_steps} steps")
        return self
