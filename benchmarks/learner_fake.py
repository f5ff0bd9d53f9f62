"""What a rank of a large model would need, by torch's own accountant, beside what `gspo plan` says.

    python -m benchmarks.learner_fake [--quick] [--layers 3]

The learner's own model, wrapped and sharded as for training, runs forward, backward and an update over tensors without
data (`FakeTensorMode`), as the first of 8 or 16 ranks whose collective calls go nowhere; `FSDPMemTracker` adds up what
lives. No GPU takes part, and attention is counted as the CPU's kernel keeps it, which is what the GPU's keeps too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.model_shapes import QWEN3

GIB = 2**30
CASES = [
    ("Qwen3-8B", 8, 16_384, False),
    ("Qwen3-8B", 8, 16_384, True),
    ("Qwen3-8B", 16, 16_384, True),
    ("Qwen3-32B", 8, 16_384, True),
    ("Qwen3-32B", 16, 16_384, True),
    ("Qwen3-30B-A3B", 8, 16_384, True),
    ("Qwen3-30B-A3B", 16, 16_384, True),
]
LENGTH = 4096
Peaks = dict[str, dict[str, float]]


def tracked(config: dict[str, Any], num_ranks: int, tokens: int, *, is_checkpointed: bool) -> Peaks:
    """Bytes at the highest point of each phase, by kind, of the model that `config` describes."""
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from gspo_core.learner.optimizer import build_adamw
    from gspo_core.learner.policy_model import _checkpoint_activations
    from gspo_core.learner_config import OptimizerConfig

    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        policy = _policy(config, num_ranks)
        with FakeTensorMode(allow_non_fake_inputs=True):
            policy.to_empty(device="cpu")
            if is_checkpointed:
                _checkpoint_activations(policy.model)
            optimizer = build_adamw(policy, OptimizerConfig())
            return {"forward and backward": _passes(policy, optimizer, tokens), "update": _update(policy)}
    finally:
        dist.destroy_process_group()


def _passes(policy: Any, optimizer: Any, tokens: int) -> dict[str, float]:
    """With the moments of an update before, and the gradients of a micro-batch before.

    The optimizer works outside of the accountant: it would count the whole tensors without data by which DTensor finds
    out how to shard the result of an operation, as if they were held.
    """
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    from gspo_core.batch import TrainSequence, collate

    length = min(LENGTH, tokens)
    zeros, acts = np.zeros(length, np.int32), np.arange(length) > 0
    one = TrainSequence(np.arange(length, dtype=np.int32) % 1000, acts, zeros.astype(np.float32), zeros, zeros, 1.0)
    micro_batch = collate([one] * (tokens // length), range(tokens // length), layout="packed", device="cpu")
    policy(micro_batch).sum().backward()
    optimizer.step()
    tracker = FSDPMemTracker(policy, optimizer)
    tracker.track_inputs((micro_batch,))
    with tracker:
        policy(micro_batch).sum().backward()
    return _peak(tracker)


def _update(policy: Any) -> dict[str, float]:
    """Of the rank's parts of all weights, as plain tensors."""
    import torch
    from torch.distributed._tools.mem_tracker import MemTracker

    from gspo_core.learner.optimizer import build_adamw
    from gspo_core.learner.ranks import local
    from gspo_core.learner_config import OptimizerConfig

    parts = torch.nn.ParameterList(torch.empty_like(local(one.detach())) for one in policy.parameters())
    for part in parts:
        part.grad = torch.empty_like(part)
    optimizer = build_adamw(parts, OptimizerConfig())
    optimizer.step()
    tracker = MemTracker()
    tracker.track_external(parts, optimizer)
    with tracker:
        optimizer.step()
    return _peak(tracker)


def _peak(tracker: Any) -> dict[str, float]:
    (found,) = tracker.get_tracker_snapshot("peak").values()
    return {getattr(kind, "name", str(kind)): float(size) for kind, size in found.items()}


def _policy(config: dict[str, Any], num_ranks: int) -> Any:
    import torch

    from gspo_core.learner.model_directory import ModelSource, make_skeleton
    from gspo_core.learner.policy_model import PolicyModel, _layers
    from gspo_core.learner.ranks import Ranks
    from gspo_core.plan import chunk_rows

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        files: Any = ()  # no weights: nothing is read
        model = make_skeleton(ModelSource(Path(folder), files), "packed").model
    rows = chunk_rows(config["vocab_size"], "cuda")
    policy = PolicyModel(model, dtype=torch.bfloat16, chunk_tokens=rows)
    Ranks(0, num_ranks).shard(policy, _layers(model), dtype=torch.bfloat16, device=torch.device("cpu"))
    return policy


def planned(config: dict[str, Any], num_ranks: int, tokens: int, *, is_checkpointed: bool) -> dict[str, int]:
    """As the CPU's kernels would have it, which multiply halves by widening them, with the rows of a GPU."""
    from gspo_core.plan import Setting, chunk_rows, plan_memory, shape_of

    setting = Setting(
        shape_of(config),
        num_ranks=num_ranks,
        device="cpu",
        tokens=tokens,
        is_checkpointed=is_checkpointed,
        chunk_rows=chunk_rows(config["vocab_size"], "cuda"),
    )
    return {one.phase: one.device_total for one in plan_memory(setting)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only the first case")
    parser.add_argument("--layers", type=int, help="of each model, instead of its own number")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case is not None:
        name, num_ranks, tokens, is_checkpointed = CASES[arguments.case]
        config = config_of(name, arguments.layers)
        print(json.dumps(tracked(config, num_ranks, tokens, is_checkpointed=is_checkpointed)))
        return
    print("| model | ranks | tokens | recomputed | phase | tracked, GiB | planned, GiB | planned/tracked |")
    print("|---|---|---|---|---|---|---|---|")
    for number in range(1 if arguments.quick else len(CASES)):
        print("\n".join(rows(number, arguments.layers)), flush=True)


def config_of(name: str, layers: int | None) -> dict[str, Any]:
    return QWEN3[name] if layers is None else QWEN3[name] | {"num_hidden_layers": layers}


def rows(number: int, layers: int | None) -> list[str]:
    name, num_ranks, tokens, is_checkpointed = CASES[number]
    command = [sys.executable, "-m", "benchmarks.learner_fake", "--case", str(number)]
    command += [] if layers is None else ["--layers", str(layers)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    model = name if layers is None else f"{name}, {layers} layers"
    asked = f"| {model} | {num_ranks} | {tokens} | {'yes' if is_checkpointed else 'no'} |"
    if done.returncode:
        return [f"{asked} failed: {done.stderr.strip().splitlines()[-1][:200]} | | | |"]
    plan = planned(config_of(name, layers), num_ranks, tokens, is_checkpointed=is_checkpointed)
    return [
        f"{asked} {phase} | {found['Total'] / GIB:.1f} | {plan[phase] / GIB:.1f} | {plan[phase] / found['Total']:.2f} |"
        for phase, found in json.loads(done.stdout.splitlines()[-1]).items()
    ]


if __name__ == "__main__":
    main()
