"""Plays episodes with one package, before a queue of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from gspo_core.chat import HermesCodec, load_tokenizer
from services.state.client import connect
from services.state.server import RedisServer
from tests.core.qwen_vocabulary import qwen_vocabulary
from tests.play.outside import outside
from tests.play.packages import Package, python_of
from tests.play.stage import set_up
from tests.play.tasks import Task, at_length, tasks
from tests.play.verdict import Tally, tally


@cache
def qwen_codec() -> HermesCodec:
    return HermesCodec(load_tokenizer(qwen_vocabulary()))


def play(
    package: Package, seed: int, numbers: Sequence[int], at_once: int, folder: Path, *, is_long: bool = False
) -> Tally:
    """``numbers``: of the episodes of this seed. ``is_long``: they have many turns, and prompts of every size."""
    drawn = tasks(seed, max(numbers) + 1, package.features, wild=package.wild, huge=package.huge, ends=package.ends)
    drawn = at_length(seed, drawn) if is_long else drawn
    return asyncio.run(_play(package, seed, [drawn[number] for number in numbers], at_once, folder))


async def _play(package: Package, seed: int, given: list[Task], at_once: int, folder: Path) -> Tally:
    with RedisServer.spawn(folder) as server:
        redis = connect(server.url)
        async with (
            outside(python_of(package), package.script, str(at_once)) as player,
            set_up(redis, qwen_codec(), seed, player) as stage,
        ):
            parts = await stage.play(given, at_once)
        await redis.aclose()
        return tally(parts)
