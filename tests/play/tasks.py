"""The tasks of a play: a seed and what happens in it. Of every ten episodes, each feature happens in one at least."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

Task = dict[str, Any]


# The turns that an episode has at least.
FEW, MANY = 6, 30
# Of what agents are told first, beside their tools.
SHORTEST, LONGEST = 20, 30_000


def tasks(seed: int, number: int, features: Sequence[str], **more: Any) -> list[Task]:
    """Features stand in a drawn order within each ten; the episodes left over have two of them each."""
    rng = random.Random(seed)
    drawn: list[Task] = []
    while len(drawn) < number:
        ten = [[one] for one in features] + [rng.sample(list(features), 2) for _ in range(10 - len(features))]
        rng.shuffle(ten)
        drawn += [
            {"number": len(drawn) + place, "features": one, "seed": rng.getrandbits(48), "turns": FEW, **more}
            for place, one in enumerate(ten)
        ]
    return drawn[:number]


def at_length(seed: int, given: Sequence[Task]) -> list[Task]:
    """The same of many turns, behind prompts of every size; the first two have the shortest and the longest."""
    rng = random.Random(seed)
    sizes = [SHORTEST, LONGEST] + [round(SHORTEST * (LONGEST / SHORTEST) ** rng.random()) for _ in given]
    return [task | {"turns": MANY, "prompt_tokens": size} for task, size in zip(given, sizes, strict=False)]
