"""Is what a learner holds what `gspo plan` says, and what is the longest sequence that fits?

Measured is what torch's allocator held at most during a step of two micro-batches, after a short one that made the
optimizer's moments.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.check import Check, Differs, Found, NotHere, Place
from benchmarks.gpu.models import model_at, sequences_of
from gspo_core.learner import Learner
from gspo_core.learner_config import LearnerConfig, LearnerOptions, LoraConfig
from gspo_core.objective_config import ObjectiveConfig
from gspo_core.plan import LayoutChoice, LearnerPlace, choose, read_shape, usable

MODELS: dict[str, tuple[str, LoraConfig | None]] = {
    "Qwen3-0.6B": ("Qwen3-0.6B", None),
    "Qwen3-1.7B": ("Qwen3-1.7B", None),
    "Qwen3-4B": ("Qwen3-4B", None),
    "Qwen3-8B, low rank": ("Qwen3-8B", LoraConfig(rank=16, base_dtype="bfloat16")),
}
LENGTHS, LONGEST = (2048, 8192), 32_768
"""The longest stands alone, behind all others: it takes most of the time."""
TOY_LENGTHS, TOY_LONGEST = (32, 64), 128
SHORT = 64
WITHIN = 0.1
GIB = 2**30
OPEN: dict[str, Any] = {"k3_gate": None, "outlier_gate": None, "off_policy_gate": None}


def plan_of(place: Place, options: LearnerOptions, directory: Path, length: int) -> LayoutChoice:
    total = 8 * GIB if place.device == "cpu" else torch.cuda.get_device_properties(0).total_memory
    where = LearnerPlace(1, "cuda", usable(total), longest=length)
    return choose(read_shape(directory), options, where)


def config_of(choice: LayoutChoice, lora: LoraConfig | None) -> LearnerConfig:
    """What was planned, said as a job would."""
    return LearnerConfig(
        dtype="bfloat16",
        lora=lora,
        micro_batch_tokens=choice.micro_batch_tokens,
        activation_checkpointing=choice.activation_checkpointing,
    )


@dataclass(frozen=True)
class Measured:
    length: int
    choice: LayoutChoice
    held: int | None
    """None where the device does not say."""

    @property
    def is_wrong(self) -> bool:
        return self.held is not None and abs(self.choice.peak.device_total / self.held - 1) > WITHIN

    def __str__(self) -> str:
        if not self.choice.fits:
            return f"{self.length}: does not fit by the plan"
        planned = f"{self.choice.peak.device_total / GIB:.2f} GiB planned"
        how = ", recomputed" if self.choice.activation_checkpointing else ""
        found = "nothing measured on a CPU" if self.held is None else f"{self.held / GIB:.2f} held"
        return f"{self.length} ({self.choice.micro_batch_tokens} at once{how}): {planned}, {found}"


def held_at_most(device: str) -> int | None:
    """Since `forget`."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else None


def forget(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measured(place: Place, directory: Path, lora: LoraConfig | None, length: int) -> Measured:
    choice = plan_of(place, LearnerOptions(dtype="bfloat16", lora=lora), directory, length)
    if not choice.fits:
        return Measured(length, choice, None)
    number = 2 if place.is_toy else max(2, 2 * choice.micro_batch_tokens // length)
    # Alone, so that micro-batches are as full as the plan takes them to be: a prompt that is shared would be held once.
    batch = sequences_of(number, length, read_shape(directory).vocabulary, prompt_share=0.0)
    objective = ObjectiveConfig(minibatches=1, **OPEN)
    learner = Learner(directory, config_of(choice, lora), objective, seed=0, device=place.device)
    try:
        learner.step(sequences_of(2, SHORT, read_shape(directory).vocabulary))
        forget(place.device)
        learner.step(batch)
        return Measured(length, choice, held_at_most(place.device))
    finally:
        learner.close()


def prepare(place: Place) -> None:
    for model, _ in MODELS.values():
        model_at(place, model)


def held(name: str, lengths: tuple[int, ...], toy_lengths: tuple[int, ...]) -> Check:
    model, lora = MODELS[name]

    def run(place: Place) -> Found:
        directory = model_at(place, model)
        found = []
        for length in toy_lengths if place.is_toy else lengths:
            found.append(measured(place, directory, lora, length))
            forget(place.device)
        said = "; ".join(map(str, found))
        if not any(one.choice.fits for one in found):
            raise NotHere(said)
        if place.device == "cuda" and all(one.held is None for one in found):
            raise Differs(f"nothing was measured: {said}")
        if any(one.is_wrong for one in found):
            raise Differs(f"more than {WITHIN:.0%} from the plan: {said}")
        numbers = {f"{one.length}: planned": float(one.choice.peak.device_total) for one in found if one.choice.fits}
        numbers |= {f"{one.length}: held": float(one.held) for one in found if one.held is not None}
        return Found(said, numbers)

    return Check(f"{name}, {' and '.join(map(str, lengths))} tokens", run)


CHECKS = (
    *(held(name, LENGTHS, TOY_LENGTHS) for name in MODELS),
    *(held(name, (LONGEST,), (TOY_LONGEST,)) for name in MODELS),
)
