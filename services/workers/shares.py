"""Divides the places of a worker between jobs.

Rule: by priority, and no wanted place stays empty: places that one job does not need go to the others. Every job that
wants any gets at least one, while there are enough; else the most important ones that have anything to play do, and
equals take turns. It takes nothing back from a job that holds too many.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Want:
    priority: float
    num_places: int
    """The most that it can use now."""
    is_idle: bool = False
    """It wants them for what may come."""


def divide(num_places: int, wants: Mapping[str, Want], turn: int = 0) -> dict[str, int]:
    """Places for each job; together no more than ``num_places``, and no more than it wants. ``turn``: whose it is."""
    hungry = [job for job, want in wants.items() if want.num_places > 0]
    given = dict.fromkeys(wants, 0)
    if num_places < len(hungry):
        ranked = sorted((job for job in _in_turn(wants, turn) if job in hungry), key=lambda job: wants[job].is_idle)
        return given | dict.fromkeys(ranked[:num_places], 1)
    left, weight = num_places, sum(wants[job].priority for job in hungry)
    # A job that is owed less than one place gets one, before the rest is divided.
    for job in sorted(hungry, key=lambda job: (wants[job].priority, job)):
        if left > 0 and left * wants[job].priority < weight:
            given[job] = 1
            left -= 1
    # The job that needs least for its priority comes first, so that the others divide what it leaves.
    for job in sorted(hungry, key=lambda job: ((wants[job].num_places - given[job]) / wants[job].priority, job)):
        more = min(wants[job].num_places - given[job], round(left * wants[job].priority / weight), left)
        given[job] += more
        left, weight = left - more, weight - wants[job].priority
    return given


def _in_turn(wants: Mapping[str, Want], turn: int) -> list[str]:
    """The most important first, equals in an order that the turns move on, whoever wants any at the moment."""
    equals: dict[float, list[str]] = {}
    for job in sorted(wants):
        equals.setdefault(wants[job].priority, []).append(job)
    groups = (equals[priority] for priority in sorted(equals, reverse=True))
    return [job for group in groups for job in group[turn % len(group) :] + group[: turn % len(group)]]
