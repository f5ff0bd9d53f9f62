"""A learner in a process of its own: `python learner_process.py resume|ranks DIRECTORY`. It holds no test.

`resume` trains to the last step, saving its state after every one, from wherever a killed process before it stopped.
`ranks` is run by torchrun and writes what each rank learned.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from gspo_core.learner import Learner
from gspo_core.learner.state import MANIFEST
from gspo_core.learner_config import LearnerConfig, LoraConfig, OptimizerConfig
from gspo_core.objective_config import ObjectiveConfig
from tests.core.learner_support import GATED, make_learner, make_sequences, with_behavior

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


# name: (objective, learner configuration, number of sequences); those named after a mixture train one
RANK_CASES: dict[str, tuple[ObjectiveConfig, dict[str, object], int]] = {
    "gspo": (GATED, {}, 13),
    "small micro-batches": (GATED, {"micro_batch_tokens": 100}, 13),
    "a rank without work": (ObjectiveConfig(minibatches=1), {}, 1),
    "low rank": (ObjectiveConfig(minibatches=2), {"lora": LoraConfig(rank=2, alpha=4)}, 13),
    "checkpointed": (GATED, {"activation_checkpointing": True}, 13),
    "mixture with replayed routes": (GATED, {"routing_replay": True, "activation_checkpointing": True}, 13),
    "reference": (ObjectiveConfig(minibatches=2, kl_coef=0.1), {}, 13),
    "bfloat16": (GATED, {"dtype": "bfloat16"}, 13),
}


MISTAKE = "gradients averaged where they should be summed"


def ranks(root: Path) -> None:
    dist.init_process_group("gloo")
    try:
        for name, (objective, config, number) in RANK_CASES.items():
            run_case(root, root / name, objective, config, number)
        Learner._backward = lambda self, loss: loss.backward()  # type: ignore[method-assign]
        run_case(root, root / MISTAKE, *RANK_CASES["gspo"])
    finally:
        dist.destroy_process_group()


def model_of(root: Path, case: str) -> Path:
    return root / ("mixture" if case.startswith("mixture") else "model")


def run_case(
    root: Path, out: Path, objective: ObjectiveConfig, config: dict[str, object], number: int
) -> dict[str, float]:
    """One step, published; then a second one, which must be the same after saving and resuming."""
    model_dir = model_of(root, out.name)
    learner = make_learner(model_dir, objective, **config)
    sequences = make_sequences(number)
    with_behavior(learner, sequences)
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
    {"resume": resume, "ranks": ranks}[sys.argv[1]](Path(sys.argv[2]))
