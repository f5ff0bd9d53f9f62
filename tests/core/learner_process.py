"""A learner in a process of its own: `learner_process.py WHAT DIRECTORY`. It holds no test.

`resume` trains to the last step, saving its state after every one, from wherever a killed process before it stopped.
The others are run by torchrun and write what the ranks learned.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from gspo_core.learner import Learner, context
from gspo_core.learner.state import MANIFEST
from gspo_core.learner_config import LearnerConfig, LoraConfig, OptimizerConfig
from gspo_core.objective_config import ObjectiveConfig
from gspo_core.replay.on_ranks import met
from tests.core.learner_support import GATED, LINEAR, make_learner, make_sequences, with_behavior

NUM_STEPS = 6
RESUMED = LearnerConfig(
    optimizer=OptimizerConfig(lr=1e-3, schedule="cosine", warmup_steps=2), total_steps=NUM_STEPS, micro_batch_tokens=300
)


def state_directory(root: Path, step: int) -> Path:
    return root / f"step-{step:03d}"


def resume(root: Path) -> None:
    learner = Learner(root / "model", RESUMED, ObjectiveConfig(minibatches=2), seed=3)
    done = [step for step in range(NUM_STEPS + 1) if (state_directory(root, step) / MANIFEST).exists()]
    if done:
        learner.load_state(state_directory(root, done[-1]))
    for step in range(learner.counters.num_steps, NUM_STEPS):
        sequences = make_sequences(8, seed=step)
        with_behavior(learner, sequences)
        learner.step(sequences)
        learner.save_state(state_directory(root, step + 1))


BOUNDED = OptimizerConfig(lr=1e-3, max_grad_norm=None, max_grad_growth=1.0)
HELD = OptimizerConfig(lr=1e-3, max_step_k3=1e-3, ess_scaling=True)
FED = GATED.model_copy(update={"min_kept_frac": 0.9, "m2_bound": 0.01, "clip_spread": 5.0})
# name: (objective, learner configuration, number of sequences); those named after a mixture train one
RANK_CASES: dict[str, tuple[ObjectiveConfig, dict[str, object], int]] = {
    "gspo": (GATED, {}, 13),
    "small micro-batches": (GATED, {"micro_batch_tokens": 100}, 13),
    "a rank without work": (ObjectiveConfig(minibatches=1), {}, 1),
    "low rank": (ObjectiveConfig(minibatches=2), {"lora": LoraConfig(rank=2, alpha=4)}, 13),
    "checkpointed": (GATED, {"activation_checkpointing": True}, 13),
    "mixture with replayed routes": (GATED, {"routing_replay": True, "activation_checkpointing": True}, 13),
    "reference beneath additions": (
        ObjectiveConfig(minibatches=2, kl_coef=0.1),
        {"lora": LoraConfig(rank=2, alpha=4)},
        13,
    ),
    "whole groups": (GATED, {"micro_batch_tokens": 100}, 13),
    "reference": (ObjectiveConfig(minibatches=2, kl_coef=0.1), {}, 13),
    "bfloat16": (GATED, {"dtype": "bfloat16"}, 13),
    "mixture in bfloat16": (GATED, {"dtype": "bfloat16"}, 13),
    "bounded by the usual gradient": (GATED, {"optimizer": BOUNDED}, 13),
    "held near where it began, by bounds of the batch": (FED, {"optimizer": HELD}, 13),
    "moments in the host's memory, fused": (
        GATED,
        {"optimizer": BOUNDED, "offload_moments": True, "fused_optimizer": True},
        13,
    ),
    "moments in eight bits": (GATED, {"optimizer": BOUNDED.model_copy(update={"moments": "8bit"})}, 13),
    "attention kept": (GATED, {"activation_checkpointing": "keep_attention"}, 13),
    "fused": (GATED, {"fused_optimizer": True}, 13),
    "mixture with additions to experts": (
        ObjectiveConfig(minibatches=2, kl_coef=0.1),
        {"lora": LoraConfig(rank=2, alpha=4, experts=True)},
        13,
    ),
    "sequences shared": (GATED, {"context_parallel": 2, "micro_batch_tokens": 150}, 13),
}


# Those whose parts are in other cases too, or are one rank's own business; these are slow.
RANK_CASES_LATER = (
    "small micro-batches",
    "checkpointed",
    "mixture in bfloat16",
    "bounded by the usual gradient",
    "fused",
)
RANK_CASES_SOON = tuple(name for name in RANK_CASES if name not in RANK_CASES_LATER)
MISTAKE = "gradients averaged where they should be summed"


def ranks(root: Path) -> None:
    with met():
        _run_cases(root, RANK_CASES_SOON)
        publish_adapter(root, root / "low rank", *RANK_CASES["low rank"][:2])
        Learner._backward = lambda self, loss: loss.backward()  # type: ignore[method-assign]
        run_case(root, root / MISTAKE, *RANK_CASES["gspo"])


def ranks_later(root: Path) -> None:
    with met():
        _run_cases(root, RANK_CASES_LATER)


def _run_cases(root: Path, names: tuple[str, ...]) -> None:
    for name in names:
        run_case(root, root / name, *RANK_CASES[name])


def publish_adapter(root: Path, out: Path, objective: ObjectiveConfig, config: dict[str, object]) -> None:
    """Of the weights that the case has published whole."""
    options: dict[str, Any] = {**config, "publishes_adapter": True}
    learner = make_learner(model_of(root, out.name), objective, **options)
    learner.load_state(out / "state")
    learner.save_weights(out / "adapter")


MANY = (
    "gspo",
    "whole groups",
    "low rank",
    "mixture with replayed routes",
    "reference",
    "bfloat16",
    "mixture with additions to experts",
)
# On eight ranks the weights are within their bound, and one maximum over few tokens was not (18 % apart, bound 15 %).
ON_FOUR = ("mixture in bfloat16",)


def cases_on(num_ranks: int) -> tuple[str, ...]:
    return MANY + (ON_FOUR if num_ranks == 4 else ())


def many(root: Path) -> None:
    """Some cases on whatever number of ranks, and one that goes on from the state of another number."""
    with met():
        _run_cases(root, cases_on(dist.get_world_size()))
        objective, config, number = RANK_CASES["gspo"]
        learner = make_learner(root / "model", objective, **config)
        learner.load_state(root / "two" / "state")
        sequences = make_sequences(number)
        learner.supervised_step(sequences)
        learner.save_weights(root / "from two")


# Nearly linear in the gradient: AdamW makes a long step of a gradient that is mere rounding.
HELD_LINEAR = LINEAR.model_copy(update={"max_step_k3": 1e-3, "ess_scaling": True})
PACKED = {"micro_batch_tokens": 150, "layout": "packed"}
ARRANGED: dict[str, tuple[ObjectiveConfig, dict[str, object], int]] = {
    "packed": (GATED, PACKED, 13),
    "shared": (GATED, {"micro_batch_tokens": 150}, 13),
    "a rank without work": (ObjectiveConfig(minibatches=1), {"layout": "packed"}, 1),
    "window": (GATED, PACKED, 13),
    "low rank": (ObjectiveConfig(minibatches=2, kl_coef=0.1), {**PACKED, "lora": LoraConfig(rank=2, alpha=4)}, 13),
    "mixture with replayed routes": (GATED, {**PACKED, "routing_replay": True, "activation_checkpointing": True}, 13),
    "reference": (ObjectiveConfig(minibatches=2, kl_coef=0.1), PACKED, 13),
    "held near where it began, by bounds of the batch": (FED, {**PACKED, "optimizer": HELD_LINEAR}, 13),
}
# name: (context_parallel, replicas), on four ranks
ARRANGEMENTS = {
    "sequences over two": (2, 1),
    "sequences over four": (4, 1),
    "two copies": (1, 2),
    "two copies, sequences over two": (2, 2),
}
# The rest is slow.
SOON = [
    ("sequences over four", "shared"),
    ("two copies", "packed"),
    ("two copies, sequences over two", "packed"),
]
LATER = [(arrangement, case) for arrangement in ARRANGEMENTS for case in ARRANGED]
LATER = [pair for pair in LATER if pair not in SOON]
DOUBLED = "gradients of a shared micro-batch added up"


def arranged(root: Path) -> None:
    """Some cases in some arrangements of the ranks; and one with a mistake that a test must notice."""
    with met():
        _arrange(root, SOON)
        context._Joined.backward = staticmethod(added_gradients)  # type: ignore[method-assign,assignment]
        run_case(root, root / DOUBLED / "packed", GATED, {**PACKED, "context_parallel": 2}, 13)


def rearranged(root: Path) -> None:
    """All the others."""
    with met():
        _arrange(root, LATER)


def _arrange(root: Path, pairs: list[tuple[str, str]]) -> None:
    for arrangement, name in pairs:
        (shared, copies), (objective, config, number) = ARRANGEMENTS[arrangement], ARRANGED[name]
        own = {**config, "context_parallel": shared, "replicas": copies}
        run_case(root, root / arrangement / name, objective, own, number)


def on_one_rank(config: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in config.items() if name not in ("context_parallel", "replicas")}


def added_gradients(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    (own,) = ctx.saved_tensors
    grad = grads[0].clone()
    dist.all_reduce(grad, group=ctx.group)
    return grad.index_select(0, own), None, None, None


def model_of(root: Path, case: str) -> Path:
    kind = case.split(" ", 1)[0]
    return root / (kind if kind in ("mixture", "window") else "model")


def run_case(
    root: Path, out: Path, objective: ObjectiveConfig, config: dict[str, object], number: int
) -> dict[str, float]:
    """One step, published; then a second one, which must be the same after saving and resuming."""
    model_dir = model_of(root, out.name)
    out.mkdir(parents=True, exist_ok=True)
    learner = make_learner(model_dir, objective, **config)
    sequences = make_sequences(number)
    if out.name == "whole groups":
        sequences = [dataclasses.replace(one, group=index % 4) for index, one in enumerate(sequences)]
    with_behavior(learner, sequences)
    np.save(out / "logprobs.npy", learner.logprobs(sequences[:1])[0])
    first = learner.step(sequences)
    learner.logprobs(sequences)  # as a trainer does between a step and what it saves of it
    learner.save_weights(out / "weights")
    learner.save_state(out / "state")
    supervised = learner.supervised_step(sequences)
    learner.save_weights(out / "supervised")
    resumed = make_learner(model_dir, objective, **config)
    resumed.load_state(out / "state")
    resumed.supervised_step(sequences)
    resumed.save_weights(out / "resumed")
    if not dist.is_initialized() or dist.get_rank() == 0:
        metrics = first | supervised
        (out / "metrics.json").write_text(json.dumps(metrics))
    return first


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    runs = (resume, ranks, ranks_later, many, arranged, rearranged)
    {one.__name__: one for one in runs}[sys.argv[1]](Path(sys.argv[2]))
