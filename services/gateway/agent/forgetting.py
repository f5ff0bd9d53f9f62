"""Drops the traffic of talk keys that is older than is to be kept, also where a job is over or its keys are silent.

Rule: every gateway does, from time to time, whoever recorded it. What it cannot do now it does the next time.
"""

from __future__ import annotations

import asyncio

from services.process.telemetry import get_logger
from services.state.client import Away, RedisFault
from services.state.refusals import Refused
from services.state.talks import MOST_AT_ONCE, Talks, TrafficRetention

EVERY_S = 600.0


async def forget_for_ever(talks: Talks, keep: TrafficRetention, every_s: float = EVERY_S) -> None:
    while True:
        try:
            await forget(talks, keep)
        except (Away, RedisFault) as error:
            get_logger().warning("old traffic is dropped later", error=str(error))
        await asyncio.sleep(every_s)


async def forget(talks: Talks, keep: TrafficRetention) -> int:
    """How many segments are gone. Raises ``Away`` and ``RedisFault``."""
    count = 0
    for job in await talks.jobs():
        try:
            while (dropped := await talks.drop_old(job, keep)) > 0:
                count += dropped
                if dropped < MOST_AT_ONCE:
                    break
        except Refused as error:  # what others have to be forgotten is forgotten all the same
            get_logger().warning("old traffic of a job stays", job=job, error=str(error))
    if count:
        get_logger().info("old traffic dropped", segments=count, days=keep.days)
    return count
