"""Which fault comes when: a function of the seed, the number of faults and what this machine can do."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass

WEIGHTS = {
    "kill worker": 8,
    "kill trainer": 6,
    "kill engine": 5,
    "kill api": 3,
    "kill redis": 4,
    "stop worker": 5,
    "stop trainer": 4,
    "stop engine": 3,
    "stop redis": 2,
    "flushall": 2,
    "cut redis": 16,
    "cut engine": 6,
    "lose request": 13,
    "lose reply": 20,
    "halve reply": 11,
    "lose engine reply": 5,
    "stall redis": 4,
    "disk full": 2,
    "torn checkpoint": 2,
    "clock jump": 2,
    "kill engine at pause": 1,
    "kill engine at load": 1,
    "kill engine at resume": 1,
    "kill engine at join": 1,
    "kill engine at begin": 1,
    "kill engine at send": 1,
    "kill engine at end": 1,
    "lie: another job": 2,
    "lie: no version": 2,
    "lie: improbable": 2,
    "turn bit": 2,
    "spoil episode": 2,
    "spoil group": 1,
    "ask to leave": 3,
    "change settings": 3,
    "hold job": 2,
    "give job up": 1,
    "lose all trainers": 1,
    "kill gateway": 5,
    "kill gateway in a stream": 3,
    "kill engine in a stream": 2,
    "kill hosts in a stream": 1,
    "kill hosts of agents": 2,
    "stop gateway": 2,
    "cut agents": 4,
    "lose agent's answer": 4,
}
OF_AGENTS = frozenset(list(WEIGHTS)[-8:])
"""Kinds that only strike where agents play."""
OVER_GROUP = {f"kill engine at {call}" for call in ("join", "begin", "send", "end")}
"""Kinds that only strike where weights are sent, and the one that only strikes where they are read from the disk."""
FROM_DISK = {"kill engine at load"}
AT_LEAST = 2
"""Of each kind, if there are faults enough."""


@dataclass(frozen=True)
class Fault:
    number: int
    kind: str
    at_s: float
    """Since the beginning."""
    seed: int
    """Of everything that is left to chance when it happens."""


def plan(seed: int, count: int, seconds: float, without: Collection[str] = ()) -> list[Fault]:
    """``count`` faults within ``seconds``, in shares of WEIGHTS, each kind some times, with gaps as of independent
    accidents."""
    if not count:
        return []
    rng = random.Random(seed)
    weights = {kind: weight for kind, weight in WEIGHTS.items() if kind not in without}
    if not weights:
        raise ValueError("none of the kinds of faults that are asked for is possible here")
    total = sum(weights.values())
    kinds = [kind for kind, weight in weights.items() for _ in range(max(AT_LEAST, round(weight * count / total)))]
    rng.shuffle(kinds)
    kinds = kinds[:count] + rng.choices(list(weights), list(weights.values()), k=max(0, count - len(kinds)))
    gaps = [rng.expovariate(1.0) for _ in kinds]
    scale, at_s, faults = seconds / sum(gaps), 0.0, []
    for number, (kind, gap) in enumerate(zip(kinds, gaps, strict=True)):
        at_s += gap * scale
        faults.append(Fault(number, kind, at_s, rng.getrandbits(48)))
    return faults
