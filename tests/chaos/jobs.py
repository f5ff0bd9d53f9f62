"""The jobs of a run: small, alike, and different in what a fault can hurt: world, staleness, pieces, checkpoints."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.chaos.worlds import WORLDS

ON_STALE = ("mask", "drop", "wait")
MAX_CALL_TOKENS = 48


def job_spec(
    number: int, work: Path, steps: int, seed: int, worlds: Sequence[str] = tuple(world.__name__ for world in WORLDS)
) -> dict[str, Any]:
    """The ``number``-th job of a run; a function of its arguments."""
    rng = random.Random(f"{seed}/{number}")
    world = worlds[number % len(worlds)]
    max_staleness = rng.choice([0, 1, 1, 2])
    return {
        "name": f"chaos-{number}",
        "model": str(work / "model"),
        "environments": [
            {
                "ref": f"tests.chaos.worlds:{world}",
                "config": {"ledger": str(work / f"ledger-{number}")},
            }
        ],
        "rollout": {
            "group_size": 3,
            "max_staleness": max_staleness,
            "staleness_cap": max_staleness + rng.choice([0, 1, 4]),
            "on_stale": ON_STALE[(number // 2) % len(ON_STALE)],
            "stale_wait_s": 10,
            "chunk_tokens": rng.choice([8, 12, 64]),
            # The scripted engine is no model: what it says has nothing to do with what the learner computes.
            "max_engine_k3": 1e30,
        },
        "sampling": {"max_new_tokens": MAX_CALL_TOKENS},
        "limits": {"max_turns": 8, "max_context_tokens": 900},
        "groups_per_step": 2,
        "steps": steps,
        "checkpoint_every": rng.choice([2, 3, 5]),
        "checkpoints": {"keep": rng.choice([1, 2, 3]), "keep_batches": 1_000_000},
        "evaluation": {"tasks": 2, "every": max(2, steps // 3)},
        "optimizer": {"lr": 1e-3},
        # Gates would withhold everything, for the same reason.
        "objective": {"minibatches": 2, "k3_gate": None, "outlier_gate": None, "off_policy_gate": None},
        "resources": {"device": "cpu"},
        "seed": rng.randrange(1 << 30),
    }
