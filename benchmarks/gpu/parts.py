"""The parts of the check, in the order in which they are worth having: what is wrong is known before what is slow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from benchmarks.gpu import memory, overlap, right, several, speed, system
from benchmarks.gpu.check import Check, Place

LIMIT_S = 100.0
"""A part that needs more is gone on with by the next run."""


@dataclass(frozen=True)
class Part:
    name: str
    """One word: it is typed."""
    words: str
    checks: tuple[Check, ...]
    limit_s: float = LIMIT_S
    prepare: Callable[[Place], None] | None = None
    """Makes what it needs to begin. It runs while the part before it does, and finds what it made before."""
    around: Callable[[Place], AbstractContextManager[Place]] = contextlib.nullcontext


PARTS = (
    Part("right", "does it compute what the CPU computes in float64?", right.CHECKS, 60.0),
    Part(
        "system",
        "does the whole service learn, and tell the truth?",
        system.CHECKS,
        prepare=system.prepare,
        around=system.serving,
    ),
    Part(
        "killed",
        "does it survive its trainer?",
        system.KILLED_CHECKS,
        80.0,
        prepare=system.prepare,
        around=system.serving,
    ),
    Part("group", "can an engine in bfloat16 be sent its weights?", system.GROUP_CHECKS, 60.0, prepare=system.prepare),
    Part("memory", "is the plan's memory what is held?", memory.CHECKS, 90.0, prepare=memory.prepare),
    Part("speed", "how much of the device's rate is used?", speed.CHECKS, 90.0, prepare=speed.prepare),
    Part("overlap", "does the device wait for anything?", overlap.CHECKS, 60.0, prepare=overlap.prepare),
    Part("several", "do several of them learn what one learns?", several.CHECKS, 2 * LIMIT_S),
)
