"""Does recomputing layers save on several ranks what `gspo plan` says?

    python -m benchmarks.learner_recomputed [--tokens 512] [--ranks 2,4]

A model whose activations are larger than its weights takes two steps on gloo ranks, with and without recomputing, in
float32 and in bfloat16. What the first rank needed is its highest resident size (the kernel's own high-water mark) in
the second step, over what it had after it had trained a tiny model of the same kind.
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

from benchmarks.learner_memory import (
    ENVIRONMENT,
    MIB,
    NUM_MICRO_BATCHES,
    conditions,
    make_learner,
    reset_high_water,
    resident,
    sequences,
)

VOCABULARY = 4096
SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "initializer_range": 0.02,
}
LENGTH = 256


def run_rank(folder: Path, tokens: int, dtype: str, *, is_checkpointed: bool) -> None:
    import torch
    import torch.distributed as dist

    from gspo_core.plan import Setting, plan_memory, read_shape

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    num_ranks = dist.get_world_size()
    options = {"micro_batch_tokens": tokens, "activation_checkpointing": is_checkpointed, "dtype": dtype}
    make_learner(folder / "tiny", options, 0.0).step(sequences(512 * num_ranks, 64, 64))
    before = resident("VmRSS")
    learner = make_learner(folder / "model", options, 0.0)
    batch = sequences(NUM_MICRO_BATCHES * tokens * num_ranks, LENGTH, VOCABULARY)
    for _ in range(2):  # from the second step on there are moments
        reset_high_water()
        learner.step(batch)
    setting = Setting(
        read_shape(folder / "model"),
        num_ranks=num_ranks,
        device="cpu",
        is_half=dtype == "bfloat16",
        tokens=tokens,
        is_checkpointed=is_checkpointed,
    )
    planned = max(one.device_total for one in plan_memory(setting)[1:3])
    if dist.get_rank() == 0:
        print(json.dumps([resident() - before, planned]))
    dist.destroy_process_group()


def row(folder: Path, num_ranks: int, tokens: int, dtype: str, *, is_checkpointed: bool) -> str:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks), "-m"),
        *("benchmarks.learner_recomputed", "--rank", str(folder), "--tokens", str(tokens), "--dtype", dtype),
        *(["--recomputed"] if is_checkpointed else []),
    ]
    done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False)
    asked = f"| {num_ranks} | {tokens} | {dtype} | {'yes' if is_checkpointed else 'no'} |"
    if done.returncode:
        return f"{asked} failed: {done.stderr.strip().splitlines()[-1][:200]} | | |"
    needed, planned = json.loads(done.stdout.splitlines()[-1])
    return f"{asked} {needed / MIB:.0f} | {planned / MIB:.0f} | {planned / needed:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    parser.add_argument("--recomputed", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        run_rank(arguments.rank, arguments.tokens, arguments.dtype, is_checkpointed=arguments.recomputed)
        return
    from tests.core.learner_support import write_model

    print(conditions(), "\n")
    print("| ranks | tokens | precision | recomputed | needed, MiB | planned, MiB | planned/needed |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "tiny", vocab_size=64, head_dim=64)
        write_model(folder / "model", **SHAPE)
        for num_ranks in map(int, arguments.ranks.split(",")):
            for dtype in ("float32", "bfloat16"):
                for is_checkpointed in (True, False):
                    print(row(folder, num_ranks, arguments.tokens, dtype, is_checkpointed=is_checkpointed), flush=True)


if __name__ == "__main__":
    main()
