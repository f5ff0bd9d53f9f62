"""Checks of some GPUs together (nccl): sharded, sharing sequences, as copies of the model, each against one of them.

    python -m torch.distributed.run --standalone --nproc-per-node N -m benchmarks.gpu.several FOLDER DEVICE JSON

is one rank of such a check. On a CPU the ranks are gloo's, and the same is tested without a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.check import Check, Differs, Place, require_close
from benchmarks.gpu.right import FLOAT_BOUND, two_steps
from benchmarks.gpu.sending import sending
from gspo_core.learner import Learner
from gspo_core.learner_config import LearnerConfig
from tests.core.learner_support import (
    GATED,
    LINEAR,
    largest_difference,
    load_weights,
    make_sequences,
    with_behavior,
    write_model,
)

_TIMEOUT_S = 600
# The launcher says 2,000 behind the words of the rank that failed first, and the others' may stand between.
_MOST_CHARS = 20_000


def arranged(num_ranks: int, **options: Any) -> Callable[[Place], str]:
    """So many ranks, divided by these keys of a learner, take two steps."""

    def run(place: Place) -> str:
        name = "-".join([str(num_ranks), *(f"{key}{value}" for key, value in options.items())])
        folder = place.folder / name
        model = write_model(folder / "model")
        start = Learner(model, LearnerConfig(), GATED, seed=0).parameters()
        alone = two_steps(model, place.device, "float32")
        _launch(folder, num_ranks, place.device, options)
        together = load_weights(folder / "weights")
        plain = {name.removeprefix("model."): tensor for name, tensor in alone.items()}
        apart = largest_difference(plain, together) / largest_difference(start, alone)
        return require_close(apart, FLOAT_BOUND, "float32, of what two steps moved")

    return run


def _launch(folder: Path, num_ranks: int, device: str, options: dict[str, Any]) -> None:
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks))
    command = [sys.executable, "-m", *launcher, "-m", __spec__.name, str(folder), device, json.dumps(options)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if device == "cpu":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=_TIMEOUT_S)
    if done.returncode:
        raise Differs(f"the ranks ended with {done.returncode}: {done.stderr.strip()[-_MOST_CHARS:]}")


def rank(folder: Path, device: str, options: dict[str, Any]) -> None:
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
    try:
        config = LearnerConfig(optimizer=LINEAR, dtype="float32", micro_batch_tokens=300, **options)
        learner = Learner(folder / "model", config, GATED, seed=0, device=device)
        sequences = make_sequences(13)
        with_behavior(learner, sequences)
        for _ in range(2):
            learner.step(sequences)
        learner.save_weights(folder / "weights")
    finally:
        dist.destroy_process_group()


CHECKS = (
    Check("weights sent to an engine on another", sending, 2),
    Check("two ranks", arranged(2), 2),
    Check("two ranks share sequences", arranged(2, context_parallel=2), 2),
    Check("four ranks share sequences", arranged(4, context_parallel=4), 4),
    Check("two copies on four ranks", arranged(4, replicas=2), 4),
)


if __name__ == "__main__":
    rank(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
