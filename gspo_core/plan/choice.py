"""What `auto` becomes: the settings under which a model fits a device, the fastest first.

One rule: a pure function of the model, the ranks and the device's memory, so every rank and every later attempt chooses
the same. On a CPU `auto` is always the first choice, because its memory is shared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar

from gspo_core.learner_config import Checkpointing, LearnerOptions
from gspo_core.plan.arrangement import arrangement_problem
from gspo_core.plan.machines import GIB
from gspo_core.plan.memory import PhaseMemory, peak, plan_memory
from gspo_core.plan.setting import Setting
from gspo_core.plan.shapes import ModelShape

FIRST_TOKENS, LEAST_TOKENS = 16_384, 1_024
MAX_RANKS = 1024
Options = TypeVar("Options", bound=LearnerOptions)
Layout = Literal["shared", "packed", "padded"]


@dataclass(frozen=True)
class LearnerPlace:
    """Where a learner runs, and what it is asked to do there."""

    num_ranks: int
    device: Literal["cpu", "cuda"]
    usable_bytes: int
    """On each rank's device; a plan for a CPU has no bound."""
    has_reference: bool = False
    longest: int | None = None
    """Tokens of the longest sequence; only `context_parallel` splits it."""
    has_small_moments: bool = False


@dataclass(frozen=True)
class LayoutChoice:
    """Settings, and what they take."""

    setting: Setting
    layout: Layout
    phases: tuple[PhaseMemory, ...]
    fits: bool

    @property
    def peak(self) -> PhaseMemory:
        return peak(self.phases)

    @property
    def micro_batch_tokens(self) -> int:
        return self.setting.tokens

    @property
    def activation_checkpointing(self) -> bool | Literal["keep_attention"]:
        return "keep_attention" if self.setting.keeps_attention else self.setting.is_checkpointed

    @property
    def offload_moments(self) -> bool:
        return self.setting.is_offloaded


def first_choice(options: Options) -> Options:
    """`auto` without a bound on memory."""
    tokens = (
        FIRST_TOKENS * options.context_parallel if options.micro_batch_tokens == "auto" else options.micro_batch_tokens
    )
    layout = "shared" if options.layout == "auto" else options.layout
    return options.model_copy(
        update={
            "micro_batch_tokens": tokens,
            "activation_checkpointing": _without_auto(options.activation_checkpointing),
            "layout": layout,
            "offload_moments": options.offload_moments is True,
        }
    )


def _without_auto(checkpointing: Checkpointing) -> Checkpointing:
    return False if checkpointing == "auto" else checkpointing


def choose(shape: ModelShape, options: LearnerOptions, place: LearnerPlace) -> LayoutChoice:
    """The first settings that fit; where none does, those that need least, marked so."""
    found = [_weigh(setting, options, place) for setting in _settings(shape, options, place)]
    fitting = [one for one in found if one.fits]
    return fitting[0] if fitting else min(found, key=lambda one: one.peak.device_total)


def _settings(shape: ModelShape, options: LearnerOptions, place: LearnerPlace) -> Iterator[Setting]:
    """What is offloaded is slow, so it comes last."""
    plain = _setting(shape, first_choice(options), place)
    yield from _sizes(plain, options, place)
    if options.offload_moments == "auto" and place.device != "cpu":
        yield from _sizes(dataclasses.replace(plain, is_offloaded=True), options, place)


def _sizes(plain: Setting, options: LearnerOptions, place: LearnerPlace) -> Iterator[Setting]:
    checkpointing = options.activation_checkpointing
    for is_checkpointed in (False, True) if checkpointing == "auto" else (bool(checkpointing),):
        tokens = plain.tokens
        # Without recomputing, small micro-batches cost more in gathering than recomputing does.
        floor = LEAST_TOKENS * options.context_parallel
        least = tokens // 4 if checkpointing == "auto" and not is_checkpointed else floor
        while True:
            yield dataclasses.replace(plain, tokens=max(tokens, place.longest or 0), is_checkpointed=is_checkpointed)
            if place.device == "cpu" or options.micro_batch_tokens != "auto" or tokens // 2 < least:
                break
            tokens //= 2


def _setting(shape: ModelShape, options: LearnerOptions, place: LearnerPlace) -> Setting:
    is_half = options.dtype == "bfloat16" or (options.dtype == "auto" and place.device == "cuda")
    assert isinstance(options.micro_batch_tokens, int)
    return Setting(
        shape=shape,
        num_ranks=place.num_ranks,
        context=options.context_parallel,
        replicas=options.replicas,
        device=place.device,
        is_half=is_half,
        tokens=options.micro_batch_tokens,
        has_reference=place.has_reference,
        lora_rank=None if options.lora is None else options.lora.rank,
        is_base_half=options.lora is not None and options.lora.base_dtype == "bfloat16",
        chunk_rows=options.logprob_chunk_tokens,
        keeps_attention=options.activation_checkpointing == "keep_attention",
        has_small_moments=place.has_small_moments,
        is_offloaded=options.offload_moments is True,
        is_fused=options.fused_optimizer,
        shares_beginnings=options.layout in ("auto", "shared"),
        has_expert_additions=options.lora is not None and options.lora.experts,
    )


def _weigh(setting: Setting, options: LearnerOptions, place: LearnerPlace) -> LayoutChoice:
    layout = "shared" if options.layout == "auto" else options.layout
    phases = tuple(plan_memory(setting))
    fits = place.device == "cpu" or peak(phases).device_total <= place.usable_bytes
    return LayoutChoice(setting, layout, phases, fits)


def fewest_ranks(shape: ModelShape, options: LearnerOptions, place: LearnerPlace) -> int | None:
    """The number of ranks, in powers of two, on which it would fit."""
    ranks = place.num_ranks
    while ranks < MAX_RANKS:
        ranks *= 2
        if choose(shape, options, dataclasses.replace(place, num_ranks=ranks)).fits:
            return ranks
    return None


def refusal(choice: LayoutChoice, options: LearnerOptions, place: LearnerPlace) -> str:
    """Why it does not fit, and what would."""
    worst = choice.peak
    largest = sorted(worst.on_device.items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest)
    need = f"{worst.device_total / GIB:.1f} GiB on each of {place.num_ranks} ranks ({worst.phase}: {parts})"
    ways = list(_ways_out(choice, options, place))
    return f"the model does not fit: it needs {need}, and {place.usable_bytes / GIB:.1f} can be used; {'; '.join(ways)}"


def _ways_out(choice: LayoutChoice, options: LearnerOptions, place: LearnerPlace) -> Iterator[str]:
    shape = choice.setting.shape
    if options.activation_checkpointing is False:
        yield "set learner.activation_checkpointing to auto"
    if options.micro_batch_tokens != "auto":
        yield "set learner.micro_batch_tokens to auto"
    if options.offload_moments is False and choose(shape, _offloaded(options), place).fits:
        yield "set learner.offload_moments to auto"
    ranks = fewest_ranks(shape, options, place)
    if ranks is not None:
        yield f"{ranks} ranks of this kind would do"
    if options.lora is None:
        yield "train low-rank additions (learner.lora)"
    if options.replicas > 1:
        yield "keep fewer copies of the model (learner.replicas)"
    if place.longest is None or place.longest <= LEAST_TOKENS:
        return
    shared = fewest_sharing(shape, options, place)
    if shared is not None:
        yield f"share each sequence among ranks (learner.context_parallel: {shared})"
    elif ranks is None:
        yield f"shorten limits.max_context_tokens ({place.longest})"


def _offloaded(options: LearnerOptions) -> LearnerOptions:
    return options.model_copy(update={"offload_moments": True})


def fewest_sharing(shape: ModelShape, options: LearnerOptions, place: LearnerPlace) -> int | None:
    """How many ranks would have to share each sequence, so that it fits on those that there are."""
    for number in range(options.context_parallel + 1, place.num_ranks + 1):
        tried = options.model_copy(update={"context_parallel": number})
        if arrangement_problem(tried, place.num_ranks, shape.num_heads) is None and choose(shape, tried, place).fits:
            return number
    return None
