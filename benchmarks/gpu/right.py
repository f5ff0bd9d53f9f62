"""Does a device compute what it should? Attention, the head, every loss and its gradients, whole steps, resuming.

Losses and their steps are compared with float64 on the CPU, computed by a model of transformers that sees each sequence
alone. On a CPU all of this runs too, so what is compared is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from benchmarks.gpu.check import Check, Found, Place, largest, require_close
from gspo_core.batch import TrainSequence
from gspo_core.batch.packing import pack
from gspo_core.learner import Learner
from gspo_core.learner.attention import packed_attention
from gspo_core.learner.logprobs import chosen_logprobs
from gspo_core.learner_config import LearnerConfig, LoraConfig, OptimizerConfig
from gspo_core.objective import loss_denominators, policy_loss
from gspo_core.objective_config import ObjectiveConfig
from tests.core.learner_support import (
    GATED,
    LINEAR,
    MIXTURE,
    largest_difference,
    make_sequences,
    with_behavior,
    write_model,
)

# bfloat16 has 8 bits: sums of products of normal numbers end up within some 1/64 of each other.
HALF_BOUND = 0.03
# Sums of float32 in another order, in units of what two steps have moved.
FLOAT_BOUND = 1e-3
# The same sums of bfloat16 once more, in units of a step.
AGAIN_BOUND = 0.01
HEADS, KEY_HEADS, WIDTH = 8, 2, 64


def attention(place: Place) -> str:
    """The kernel for packed rows, forward and backward, with shared beginnings and with a window."""
    found: list[float] = []
    for share in (False, True):
        for window in (None, 33):
            half = _attention(torch.device(place.device), torch.bfloat16, share=share, window=window)
            wide = _attention(torch.device("cpu"), torch.float32, share=share, window=window)
            found += [_apart(one, two) for one, two in zip(half, wide, strict=True)]
    return require_close(largest(found), HALF_BOUND, "results and gradients, of their largest")


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
    return require_close(largest(_apart(one, two) for one, two in pairs), HALF_BOUND, "log-probs and gradients")


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

    def from_alone(device: str, dtype: str) -> float:
        return largest_difference(alone, two_steps(directory, device, dtype)) / moved

    rounded = TIMES_THE_CPU * from_alone("cpu", "bfloat16") + FLOAT_BOUND
    said = [
        require_close(from_alone(place.device, dtype), bound, f"{dtype}, of what two steps moved")
        for dtype, bound in (("float32", FLOAT_BOUND), ("bfloat16", rounded))
    ]
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


# --- losses against float64

MODELS: dict[str, tuple[str, dict[str, Any]]] = {"dense": ("Qwen3", {}), "mixture": ("Qwen3Moe", MIXTURE)}
LOSSES: tuple[str, ...] = get_args(ObjectiveConfig.model_fields["loss"].annotation)
LAYOUTS = ("packed", "shared")
# Of the loss, and of the length of a step, in float32.
BOUND = 1e-3
# Half precision chooses other experts, and long products of ratios grow with what each token is off: so a device may be
# so many times as far from float64 as a CPU's bfloat16 is.
TIMES_THE_CPU = 2.0
DTYPES = ("float32", "bfloat16")
OPEN = {"k3_gate": None, "outlier_gate": None, "off_policy_gate": None}


def objective_of(loss: str) -> ObjectiveConfig:
    """Ratios are to the sampler, which is a little off; nothing lies near where a rounded value would be cut off."""
    more = {"dppo_delta": 0.9} if loss.startswith("dppo") else {"clip": [0.9, 9.0]} if loss == "clip" else {}
    return ObjectiveConfig.model_validate({"loss": loss, "minibatches": 1, "anchor": "behavior", **OPEN, **more})


@dataclass(frozen=True)
class Step:
    loss: float
    moved: dict[str, torch.Tensor]
    """What a step added to each parameter."""


def step_in_float64(directory: Path, objective: ObjectiveConfig, sequences: Sequence[TrainSequence]) -> Step:
    """By a model of transformers, a sequence at a time, and the update written out."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    rows = [scored for one in sequences if (scored := _scored(model, one)) is not None]
    acting = [one for one in sequences if one.num_actions]
    num_sequences, num_tokens = loss_denominators(
        [one.action_mask for one in sequences], [one.weight for one in sequences]
    )
    loss, _ = policy_loss(
        objective,
        torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
        _table([np.ones(one.num_actions, bool) for one in acting]),
        torch.tensor([float(np.asarray(one.advantages)) for one in acting], dtype=torch.float64),
        behavior_logprobs_BT=_table([_of_actions(one, one.behavior_logprobs) for one in acting]).double(),
        turn_ids_BT=_table([_of_actions(one, one.turn_ids) for one in acting]),
        staleness_BT=_table([_of_actions(one, one.staleness) for one in acting]),
        sequence_weights_B=torch.tensor([one.weight for one in acting], dtype=torch.float64),
        num_sequences=num_sequences,
        num_tokens=num_tokens,
    )
    loss.backward()  # type: ignore[no-untyped-call]
    moved = {}
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        moved[name] = -LINEAR.lr * gradient / (gradient.abs() + LINEAR.eps)
    return Step(float(loss.detach()), moved)


def _scored(model: torch.nn.Module, one: TrainSequence) -> torch.Tensor | None:
    """Log-probs of its actions at the temperature that they were sampled with."""
    if not one.num_actions:
        return None
    ids = torch.from_numpy(one.token_ids.astype(np.int64))
    logits = model(ids[None]).logits[0, :-1] / one.temperature
    found: torch.Tensor = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    return found[torch.from_numpy(one.action_mask[1:])]


def _of_actions(one: TrainSequence, values: Any) -> Any:
    return np.asarray(values)[one.action_mask]


def _table(values: Sequence[Any]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.from_numpy(one) for one in values], batch_first=True)


def step_here(
    directory: Path, objective: ObjectiveConfig, sequences: list[TrainSequence], device: str, **config: Any
) -> Step:
    learner = Learner(directory, LearnerConfig(optimizer=LINEAR, **config), objective, seed=0, device=device)
    before = learner.parameters()
    metrics = learner.step(sequences)
    moved = {name: tensor.double() - before[name].double() for name, tensor in learner.parameters().items()}
    return Step(float(metrics["gspo/loss"]), moved)


def apart(found: Step, wanted: Step) -> tuple[float, float]:
    """Of the losses, in units of 1; of the steps, in units of the wanted one's length."""
    moved = {
        name.removeprefix("model."): tensor for name, tensor in found.moved.items()
    }  # the policy's own name for it
    if moved.keys() != wanted.moved.keys():
        raise RuntimeError(f"not the same parameters: {sorted(moved.keys() ^ wanted.moved.keys())[:3]}")
    difference = sum(float((tensor - wanted.moved[name]).square().sum()) for name, tensor in moved.items())
    length = sum(float(tensor.square().sum()) for tensor in wanted.moved.values())
    return abs(found.loss - wanted.loss), (difference / length) ** 0.5


def losses(model: str, dtype: str) -> Check:
    """Every loss, in both layouts."""

    def run(place: Place) -> Found:
        family, changes = MODELS[model]
        directory = write_model(place.folder / f"losses-{model}", family, **changes)
        sequences = make_sequences(9 if place.is_toy else 14)
        with_behavior(Learner(directory, LearnerConfig(), GATED, seed=0), sequences, noise=0.02)
        worst: dict[str, float] = {}
        for loss in LOSSES:
            objective = objective_of(loss)
            wanted = step_in_float64(directory, objective, sequences)
            for layout in LAYOUTS:
                options = {"dtype": dtype, "layout": layout, "micro_batch_tokens": 200}
                found = apart(step_here(directory, objective, sequences, place.device, **options), wanted)
                bounds = (BOUND, BOUND)
                if dtype == "bfloat16":
                    rounded = apart(step_here(directory, objective, sequences, "cpu", **options), wanted)
                    bounds = (TIMES_THE_CPU * rounded[0] + BOUND, TIMES_THE_CPU * rounded[1] + BOUND)
                for value, bound, what in zip(found, bounds, ("loss", "step"), strict=True):
                    require_close(value, bound, f"{loss}, {layout}: the {what}")
                worst[loss] = max(worst.get(loss, 0.0), found[1])
        furthest = max(worst, key=worst.__getitem__)
        said = f"{len(LOSSES)} losses in {len(LAYOUTS)} layouts: steps at most {worst[furthest]:.2g} apart ({furthest})"
        return Found(said, worst)

    return Check(f"losses of a {model} model in {dtype}, against float64", run)


VARIANTS: dict[str, dict[str, Any]] = {
    "low rank": {"lora": LoraConfig(rank=2, alpha=4)},
    "recomputed": {"activation_checkpointing": True},
    "attention kept": {"activation_checkpointing": "keep_attention"},
    "8-bit moments": {"optimizer": LINEAR.model_copy(update={"moments": "8bit"})},
    "moments on the host": {"offload_moments": True},
    "fused": {"fused_optimizer": True},
}


def variants(place: Place) -> Found:
    """What a learner may be told besides, against the same on the CPU in float32."""
    directory = write_model(place.folder / "variants")
    sequences = make_sequences(9 if place.is_toy else 13)
    with_behavior(Learner(directory, LearnerConfig(), GATED, seed=0), sequences)
    worst: dict[str, float] = {}
    for name, options in VARIANTS.items():
        here, there = (
            _moved(directory, sequences, device, {"dtype": "float32", "micro_batch_tokens": 300, **options})
            for device in (place.device, "cpu")
        )
        length = max(float(one.abs().max()) for one in there.values())
        worst[name] = largest_difference(here, there) / length
        require_close(worst[name], 0.02 if "8-bit" in name else FLOAT_BOUND, name)
    return Found(f"{len(VARIANTS)} of them, at most {max(worst.values()):.2g} of a step apart", worst)


RECOMPUTED = ("recomputed", "attention kept")


def recomputed(place: Place) -> str:
    """In bfloat16, where packed rows have a kernel of their own, what is computed twice is computed alike."""
    directory = write_model(place.folder / "recomputed")
    sequences = make_sequences(9 if place.is_toy else 13)
    with_behavior(Learner(directory, LearnerConfig(), GATED, seed=0), sequences)
    half = {"dtype": "bfloat16", "micro_batch_tokens": 300}
    plain = _moved(directory, sequences, place.device, half)
    length = max(float(one.abs().max()) for one in plain.values())
    found = [
        largest_difference(plain, _moved(directory, sequences, place.device, {**half, **VARIANTS[name]})) / length
        for name in RECOMPUTED
    ]
    return require_close(largest(found), AGAIN_BOUND, "of a step in bfloat16")


def _moved(
    directory: Path, sequences: list[TrainSequence], device: str, options: dict[str, Any]
) -> dict[str, torch.Tensor]:
    config = LearnerConfig(**{"optimizer": LINEAR, **options})
    learner = Learner(directory, config, GATED, seed=0, device=device)
    before = learner.parameters()
    learner.step(sequences)
    return {name: tensor - before[name] for name, tensor in learner.parameters().items()}


CHECKS = (
    Check("attention of packed rows", attention),
    Check("head", head),
    *(losses(model, dtype) for dtype in DTYPES for model in MODELS),
    Check("what else a learner may be told", variants),
    Check("layers computed twice", recomputed),
    Check("two steps", steps),
    Check("resuming", resuming),
)
