"""Requests that are decided upon one after the other, in the order in which they came.

Rule: those of one name alone wait for each other, and nothing is kept of a name that nobody has or waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TypeAlias

Deciding: TypeAlias = dict[str, tuple[asyncio.Lock, int]]
"""By name, with the number of those who have it or wait for it."""


@contextlib.asynccontextmanager
async def in_turn(deciding: Deciding, name: str) -> AsyncIterator[None]:
    lock, num_waiting = deciding.get(name) or (asyncio.Lock(), 0)
    deciding[name] = lock, num_waiting + 1
    try:
        async with lock:
            yield
    finally:
        lock, num_waiting = deciding.pop(name)
        if num_waiting > 1:
            deciding[name] = lock, num_waiting - 1
