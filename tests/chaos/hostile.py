"""A job beside the others whose world attacks (`attacking`), from the first fault to the last, and is then given up.

The rule kept here: it has a trainer and an engine of its own, so that what honest jobs lose they lose to its world. One
that is over sooner is followed by another.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.hosts.walls.tiers import WALLS, Tier
from tests.chaos.attacking import ATTACKS, HOST
from tests.chaos.users import Users
from tests.chaos.watch import Watch

FIRST_HOSTILE = 20_000
"""Numbers of hostile jobs begin here."""
REF = "tests.chaos.worlds:Hostile"
LOOK_S = 0.2
PROMISED = frozenset(f"attack {name}" for name in ATTACKS)


def is_possible() -> bool:
    """Without a wall it would do what it tries."""
    return WALLS[Tier.WALL].refusal() is None


def made_hostile(spec: dict[str, Any], number: int, work: Path) -> dict[str, Any]:
    """A job of the run with the hostile world; it has more steps than there is time for."""
    environment = {"ref": REF, "config": {"ledger": str(work / f"ledger-{number}-0")}, "host": {**HOST, "tier": "wall"}}
    return {**spec, "name": f"hostile-{number}", "environments": [environment], "steps": 10_000}


async def keep_hostile(users: Users, watch: Watch, is_calm: Callable[[], bool], seed: int) -> None:
    rng, number = random.Random(f"{seed}/hostile"), FIRST_HOSTILE
    while not is_calm():
        job = await users.submit(number, is_raced=False)
        number += 1
        while not watch.jobs[job].is_over and not is_calm():
            await asyncio.sleep(LOOK_S)
        await users.give_up(job, rng)
