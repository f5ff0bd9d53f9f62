"""The jobs of a run: small, alike, and different in what a fault can hurt: world, staleness, pieces, checkpoints,
learner.

The rule kept here: a few jobs in a row are of every kind that there is, so that a run on a slow machine has them all.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.chaos.model import PLAIN, WITH_DROPOUT
from tests.chaos.players import AGENTS
from tests.chaos.worlds import WORLDS

ON_STALE = ("mask", "drop", "wait")
LORA: dict[str, Any] = {"lora": {"rank": 4, "alpha": 8.0}}
LEARNERS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": (PLAIN, LORA),
    "dropout": (WITH_DROPOUT, {}),
    "plain": (PLAIN, {}),
}
"""Name -> folder of the model, options of the learner."""
TRANSPORTS = ("disk", "group")
MAX_CALL_TOKENS = 48
PLAYERS = ("worlds", "agents", "both")
AGENTS_EVERY, AGENTS_FIRST = 4, 1
"""Where both play: so many jobs in a row have one of agents, the first of which comes early."""
NUM_KINDS = 1 + max(len(WORLDS), len(ON_STALE), len(LEARNERS))
"""So many jobs in a row are of every kind."""

WORLD_NAMES = tuple([world.__name__ for world in WORLDS])


def job_spec(
    number: int,
    work: Path,
    steps: int,
    seed: int,
    worlds: Sequence[str] = WORLD_NAMES,
    transports: Sequence[str] = TRANSPORTS[:1],
    players: str = PLAYERS[0],
    agent_url: str = "",
    on_stale: Sequence[str] = ON_STALE,
) -> dict[str, Any]:
    """The ``number``-th job of a run; a function of its arguments."""
    rng = random.Random(f"{seed}/{number}")
    model, learner = LEARNERS[_learner(number, seed)]
    max_staleness = rng.choice([0, 1, 1, 2])
    return {
        "name": f"chaos-{number}",
        "model": str(work / model),
        "environments": _agents(number, work, agent_url, rng)
        if _is_of_agents(number, players)
        else _environments(number, work, worlds, rng),
        "rollout": {
            "group_size": 3,
            "max_staleness": max_staleness,
            "staleness_cap": max_staleness + rng.choice([0, 1, 4]),
            "on_stale": on_stale[(number + seed) % len(on_stale)],
            "stale_wait_s": 10,
            "chunk_tokens": rng.choice([8, 12, 64]),
            # The scripted engine is no model: what it says has nothing to do with what the learner computes.
            "max_engine_k3": 1e30,
            "weight_transport": transports[number % len(transports)],
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
        **({"learner": learner} if learner else {}),
    }


def _learner(number: int, seed: int) -> str:
    # Out of step with worlds and staleness: other seeds pair other kinds.
    return list(LEARNERS)[(number + seed // len(ON_STALE)) % len(LEARNERS)]


def _environments(number: int, work: Path, worlds: Sequence[str], rng: random.Random) -> list[dict[str, Any]]:
    """Two worlds of a row in one job, one of them more often; where there is one world, that alone."""
    chosen = list(dict.fromkeys(worlds[(number + place) % len(worlds)] for place in range(2)))
    return [
        {
            "ref": f"tests.chaos.worlds:{world}",
            "config": {"ledger": str(work / f"ledger-{number}-{place}")},
            "weight": float(rng.choice([1, 1, 2])),
        }
        for place, world in enumerate(chosen)
    ]


def _is_of_agents(number: int, players: str) -> bool:
    return players == "agents" or (players == "both" and number % AGENTS_EVERY == AGENTS_FIRST)


def _agents(number: int, work: Path, url: str, rng: random.Random) -> list[dict[str, Any]]:
    """Every kind of agent, one of them more often."""
    return [
        {
            "ref": ref,
            # They post with the key that samples, since one program plays all kinds.
            "agent": {"rewards": "posted"} | ({"url": url} if ref.endswith(":Elsewhere") else {}),
            "config": {"ledger": str(work / f"ledger-{number}-{place}")},
            "weight": float(rng.choice([1, 1, 2])),
        }
        for place, ref in enumerate(AGENTS)
    ]


def kinds_of(spec: dict[str, Any]) -> set[str]:
    """What a report calls the job's kinds."""
    worlds = {kind_of_player(one["ref"]) for one in spec["environments"]}
    here = (Path(spec["model"]).name, spec.get("learner", {}))
    learners = {f"learner {name}" for name, one in LEARNERS.items() if one == here}
    rollout = spec["rollout"]
    return worlds | learners | {f"stale {rollout['on_stale']}", f"weights by {rollout['weight_transport']}"}


def kind_of_player(ref: str) -> str:
    module, _, name = ref.removeprefix("tests.chaos.").rpartition(":")
    if ref in AGENTS:
        return f"agent {name.lower() if name != 'run' else module.removeprefix('agent_')}"
    return f"world {name}"
