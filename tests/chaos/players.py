"""What agents are asked in a chaos run: numbers that no world has, and each kind of agent another number of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

REPLAYED, FRESH, ELSEWHERE = range(600, 614), range(700, 717), range(800, 819)
AGENTS: Mapping[str, Sequence[int]] = {
    "tests.chaos.agent_replayed:run": REPLAYED,
    "tests.chaos.agent_fresh:run": FRESH,
    "tests.chaos.players:Elsewhere": ELSEWHERE,
}
"""Reference -> the numbers of its tasks."""
HELD_OUT = 50
IN_HOSTS = {number + more for tasks in (REPLAYED, FRESH) for number in tasks for more in (0, HELD_OUT)}
"""The numbers of tasks whose agents are functions, which end with the gateway's hosts."""


def tasks_of(numbers: Iterable[int], **more: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """To train, and held out."""
    to_train = list(numbers)
    held_out = [number + HELD_OUT for number in to_train[:2]]
    made = [[{"number": number, **more} for number in chosen] for chosen in (to_train, held_out)]
    return made[0], made[1]


class Elsewhere:
    """Of the agent behind a URL, which outlives gateways. It pays its turns itself."""

    def __init__(self, ledger: str) -> None:
        self.tasks, self.eval_tasks = tasks_of(ELSEWHERE, ledger=ledger)
