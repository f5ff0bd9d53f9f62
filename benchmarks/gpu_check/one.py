"""Checks of one device against a CPU: attention, the head, whole steps, resuming, and the plan's memory.

All but the last work on a CPU too, where they compare it with itself; so what they compute is tested without a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_check.check import Differs, Place, require_close
from gspo_core.batch.packing import pack
from gspo_core.learner import Learner
from gspo_core.learner.attention import packed_attention
from gspo_core.learner.logprobs import chosen_logprobs
from gspo_core.learner_config import LearnerConfig, OptimizerConfig
from gspo_core.objective_config import ObjectiveConfig
from tests.core.learner_support import GATED, LINEAR, largest_difference, make_sequences, with_behavior, write_model

# bfloat16 has 8 bits: sums of products of normal numbers end up within some 1/64 of each other.
HALF_BOUND = 0.03
# Sums of float32 in another order, in units of what two steps have moved.
FLOAT_BOUND, HALF_STEPS_BOUND = 1e-3, 0.1
HEADS, KEY_HEADS, WIDTH = 8, 2, 64


def attention(place: Place) -> str:
    """The kernel for packed rows, forward and backward, with shared beginnings and with a window."""
    worst = 0.0
    for share in (False, True):
        for window in (None, 33):
            half = _attention(torch.device(place.device), torch.bfloat16, share=share, window=window)
            wide = _attention(torch.device("cpu"), torch.float32, share=share, window=window)
            worst = max(worst, *(_apart(one, two) for one, two in zip(half, wide, strict=True)))
    return require_close(worst, HALF_BOUND, "results and gradients, of their largest")


def _attention(device: torch.device, dtype: torch.dtype, *, share: bool, window: int | None) -> list[torch.Tensor]:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 99, 70)
    packing = pack([np.concatenate([prompt, rng.integers(0, 99, 20 + 40 * i)]) for i in range(5)], share=share)
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, packing.num_tokens, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    states = [torch.randn(shape, generator=generator).bfloat16().to(device, dtype).requires_grad_() for shape in shapes]
    query, key, value = states
    output, _ = packed_attention(
        torch.nn.Identity(), query, key, value, None, packing=packing, scaling=WIDTH**-0.5, sliding_window=window
    )
    output.float().square().sum().backward()  # type: ignore[no-untyped-call]
    return [output.detach(), *(state.grad for state in states if state.grad is not None)]


def _apart(first: torch.Tensor, second: torch.Tensor) -> float:
    one, two = first.detach().float().cpu(), second.detach().float().cpu()
    return float((one - two).abs().max() / two.abs().max())


def head(place: Place) -> str:
    """Log-probs of tokens and their gradients from bfloat16 hidden states, against float64."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn((300, 256), generator=generator).bfloat16()
    matrix = (torch.randn((5000, 256), generator=generator) / 16).bfloat16()
    targets = torch.randint(0, 5000, (300,), generator=generator)

    def computed(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        states, weights = (one.to(device, dtype, copy=True).requires_grad_() for one in (hidden, matrix))
        temperatures = torch.full((300,), 0.7, device=device)
        found = chosen_logprobs(states, weights, targets.to(device), temperatures, chunk_tokens=128)
        found.sum().backward()  # type: ignore[no-untyped-call]
        return [found, *(one.grad for one in (states, weights) if one.grad is not None)]

    pairs = zip(computed(place.device, torch.bfloat16), computed("cpu", torch.float64), strict=True)
    return require_close(max(_apart(one, two) for one, two in pairs), HALF_BOUND, "log-probs and gradients")


def two_steps(directory: Path, device: str, dtype: str, *, optimizer: OptimizerConfig = LINEAR) -> dict[str, Any]:
    """The weights that two steps lead to, on the CPU."""
    config = LearnerConfig(optimizer=optimizer, dtype=dtype, micro_batch_tokens=300)
    learner = Learner(directory, config, GATED, seed=0, device=device)
    sequences = make_sequences(13)
    with_behavior(learner, sequences)
    for _ in range(2):
        learner.step(sequences)
    return learner.parameters()


def steps(place: Place) -> str:
    """Two steps in float32 lead where they lead on a CPU; in bfloat16 near it."""
    directory = write_model(place.folder / "small")
    start = Learner(directory, LearnerConfig(), GATED, seed=0).parameters()
    alone = two_steps(directory, "cpu", "float32")
    moved = largest_difference(start, alone)
    said = []
    for dtype, bound in (("float32", FLOAT_BOUND), ("bfloat16", HALF_STEPS_BOUND)):
        apart = largest_difference(alone, two_steps(directory, place.device, dtype)) / moved
        said.append(require_close(apart, bound, f"{dtype}, of what two steps moved"))
    return "; ".join(said)


def resuming(place: Place) -> str:
    """A state that is saved and loaded again leads to the same next step."""
    directory = write_model(place.folder / "resumed")
    config = LearnerConfig(optimizer=OptimizerConfig(lr=1e-3), dtype="float32")
    sequences = make_sequences(8)
    first, second = (Learner(directory, config, ObjectiveConfig(), seed=0, device=place.device) for _ in range(2))
    with_behavior(first, sequences)
    first.step(sequences)
    first.save_state(place.folder / "state")
    second.load_state(place.folder / "state")
    for learner in (first, second):
        learner.step(sequences)
    apart = largest_difference(first.parameters(), second.parameters())
    return require_close(apart, 0.0 if place.device == "cpu" else 1e-5, "weights after the next step")


def memory(place: Place) -> str:
    """What the allocator held at most during a step, beside the plan."""
    from gspo_core.plan import Place as PlanPlace
    from gspo_core.plan import choose, read_shape

    directory = write_model(place.folder / "planned", **MIDDLE)
    said = []
    for recomputed in (False, True):
        config = LearnerConfig(micro_batch_tokens=4096, activation_checkpointing=recomputed, dtype="bfloat16")
        learner = Learner(directory, config, ObjectiveConfig(minibatches=1), seed=0, device=place.device)
        sequences = make_sequences(64, longest=256)
        learner.step(sequences)
        torch.cuda.reset_peak_memory_stats()
        learner.step(sequences)
        found = torch.cuda.max_memory_allocated()
        planned = choose(read_shape(directory), config, PlanPlace(1, "cuda", 2**60)).peak.device_total
        del learner
        ratio = planned / found
        if not 0.9 <= ratio <= 1.3:
            raise Differs(f"{found / 2**20:.0f} MiB were held, {planned / 2**20:.0f} planned")
        said.append(f"{'recomputed ' if recomputed else ''}{found / 2**20:.0f} MiB held, {planned / 2**20:.0f} planned")
    return "; ".join(said)


MIDDLE: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "initializer_range": 0.02,
}
