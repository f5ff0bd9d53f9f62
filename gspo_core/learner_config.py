"""What a user may set about the optimizer and the learner.

One rule: every key acts or is refused; nothing is guessed from the environment. It imports no torch, so a job
specification can hold these values on a laptop without it. It computes nothing.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from gspo_core.documented import Documented

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Momentum = Annotated[float, Field(ge=0, lt=1)]


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

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ValueError(f"decay_steps ({self.decay_steps}) must be above warmup_steps ({self.warmup_steps})")
        if self.schedule == "constant" and (self.decay_steps is not None or self.min_lr_ratio):
            raise ValueError("decay_steps and min_lr_ratio only act on the schedules linear and cosine; remove them")
        return self


class LoraConfig(Documented):
    """Train low-rank additions to the linear layers instead of the weights (needs the `lora` extra)."""

    rank: PositiveInt = 16
    """Rank of the additions."""
    alpha: PositiveFloat = 32.0
    """The additions are scaled by alpha / rank."""
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Names of the layers that get an addition; `all-linear` is every linear layer except the head. The experts and the
    router of a mixture are not linear layers and stay as they are."""


class LearnerOptions(Documented):
    """How a batch becomes updates on this machine. Nothing here but `lora` and `routing_replay` changes what is
    learned."""

    micro_batch_tokens: PositiveInt = 16_384
    """Tokens that pass through the model at once. A longer sequence forms a micro-batch of its own."""
    layout: Literal["shared", "packed", "padded"] = "shared"
    """How sequences are laid out in a micro-batch. `shared`: end to end, with their common beginning (system prompt,
    question) once; `packed`: end to end; `padded`: side by side, for models whose attention cannot be
    replaced. All three compute the same."""
    logprob_chunk_tokens: PositiveInt | None = None
    """Rows of the head's output (each as long as the vocabulary) held at once. Unset: 64 MiB of them on a CPU,
    1 GiB on a GPU."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the forward and backward pass; `auto` is bfloat16 on a GPU and float32 on a CPU. The weights
    that the optimizer updates are float32 in either case."""
    activation_checkpointing: bool = False
    """Recompute the layers in the backward pass instead of keeping their activations."""
    routing_replay: bool = False
    """Mixture of experts: the updates use the experts that the proximal forward chose."""
    lora: LoraConfig | None = None
    """Train low-rank additions only."""


class LearnerConfig(LearnerOptions):
    """Everything that configures a learner besides its objective."""

    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    total_steps: PositiveInt | None = None
    """Steps of the whole job; a schedule without `decay_steps` ends there."""

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
