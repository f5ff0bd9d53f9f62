"""Who calls the engine is heard between any two steps, not once nothing runs any more."""

from __future__ import annotations

import asyncio

import torch

from services.engine.engine import EmbeddedEngine
from services.engine.model import Decoder
from services.engine.scheduler import GenerateRequest, Scheduler
from tests.services.engines.engine_kit import Models


def request(rid: str, num_tokens: int) -> GenerateRequest:
    done = asyncio.get_running_loop().create_future()
    return GenerateRequest(rid, [1, 2, 3], num_tokens, 1.0, frozenset(), 0, None, done)


async def test_a_short_request_is_answered_while_a_long_one_runs(models: Models) -> None:
    decoder = Decoder(models.paths[0], device=torch.device("cpu"), dtype=torch.float32, context_length=None)
    scheduler = Scheduler(decoder, max_concurrency=2, prefix_cache_bytes=0, label="default")
    engine = EmbeddedEngine(decoder, scheduler, models.paths[0])
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(engine.run())
        long = request("long", 300)
        answer = tasks.create_task(engine.generate(long))
        while not long.output_ids:
            await asyncio.sleep(0)
        short = request("short", 3)
        await engine.generate(short)
        assert len(short.output_ids) == 3
        assert len(long.output_ids) < 20
        await answer
        running.cancel()
