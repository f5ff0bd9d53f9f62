"""Plays jobs that chaos runs have none of, for ``benchmarks.replays``: a mixture of experts, all of it trained, with
routing replay and as low-rank additions. ``python -m benchmarks.replays_played FOLDER [--steps 40]`` leaves them in
FOLDER/data.

Real processes with scripted engines, as in ``tests.releases``; the model has random weights. Tokens are up to two steps
old, and the trainer is killed once in the middle and started again.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import transformers
from transformers.utils import logging as transformers_logging

from tests.chaos.talk import CONTEXT_TOKENS, VOCABULARY, write_tokenizer
from tests.releases.installation import API, ENGINE, TRAINER, WORKER, Installation, installed
from tests.releases.make import WORLD

ENDED_S = 900.0
LEARNERS: tuple[dict[str, Any], ...] = ({}, {"routing_replay": True}, {"lora": {"rank": 4, "alpha": 8.0}})


def write_mixture(directory: Path) -> None:
    import torch

    torch.manual_seed(0)
    transformers_logging.disable_progress_bar()
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=12,
        num_experts=6,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(directory)
    write_tokenizer(directory)


def spec_of(model: Path, world: Path, steps: int, learner: dict[str, Any], seed: int) -> dict[str, Any]:
    return {
        "model": str(model),
        "environments": [{"ref": f"{world}:Sums"}],
        "rollout": {"group_size": 3, "max_staleness": 2, "chunk_tokens": 12, "max_engine_k3": 1e30},
        "sampling": {"max_new_tokens": 48},
        "limits": {"max_turns": 8, "max_context_tokens": 900},
        "groups_per_step": 2,
        "steps": steps,
        "checkpoint_every": 7,
        "checkpoints": {"keep": 3, "keep_batches": 1_000_000},
        "optimizer": {"lr": 1e-3},
        # What the scripted engine says has nothing to do with what the learner computes: gates would withhold it all.
        "objective": {"minibatches": 2, "k3_gate": None, "outlier_gate": None, "off_policy_gate": None},
        "resources": {"device": "cpu"},
        "learner": learner,
        "seed": seed,
    }


def play(folder: Path, steps: int) -> None:
    model, world = folder / "model", folder / "world.py"
    write_mixture(model)
    world.write_text(WORLD)
    with installed(folder) as here:
        here.start(ENGINE, API, TRAINER, WORKER)
        for seed, learner in enumerate(LEARNERS):
            job = here.post(spec_of(model, world, steps, learner, seed))
            here.wait_for("half of the steps", lambda job=job: here.job(job)["step"] >= steps // 2, ENDED_S)  # type: ignore[misc]
            here.kill(TRAINER)
            here.start(TRAINER)
            here.wait_for("the end", lambda job=job: is_over(here, job), ENDED_S)  # type: ignore[misc]
            print(f"{job}: {learner}, {here.job(job)['step']} steps", flush=True)


def is_over(here: Installation, job: str) -> bool:
    record = here.job(job)
    if record["status"] in ("failed", "cancelled"):
        raise RuntimeError(f"{job} {record['status']}: {record['status_reason']}")
    return bool(record["status"] == "succeeded")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="must not exist")
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    given.folder.mkdir(parents=True)
    play(given.folder.resolve(), given.steps)


if __name__ == "__main__":
    main()
