"""The tasks of the job: which harness plays an episode, in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Rota:
    """``each``: how many tasks each harness has."""

    reward_range = (0.0, 1.0)

    def __init__(self, each: dict[str, int]) -> None:
        self.tasks = rota(each)
        self.eval_tasks = self.tasks[:1]


def rota(each: dict[str, int]) -> Sequence[dict[str, Any]]:
    """As even as it goes: who has more tasks comes more often."""
    places = [((number + 0.5) / most, name, number) for name, most in each.items() for number in range(most)]
    return [{"harness": name, "number": number} for _, name, number in sorted(places)]
