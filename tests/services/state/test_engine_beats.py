"""Engines are known to live for as long as they answer, whether a job uses them or not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import msgspec

from services.api.http.presence import Presence
from services.engines.protocol import info_calls
from services.engines.sglang import EngineClient
from services.process.cancelling import cancel_all
from services.state.engine_beats import ANSWER_S, EngineBeats
from services.state.store import Store
from tests.services.rollout.rollout_kit import until

LEASE_S = 1.0


class Answering:
    """An engine without a model."""

    alive = True

    def answer(self, request: httpx.Request) -> httpx.Response:
        if not self.alive:
            raise httpx.ConnectError("refused")
        return httpx.Response(200, content=msgspec.json.encode({"weight_version": "default", "api_key": "secret"}))


async def test_an_idle_engine_counts_as_alive_until_it_stops_answering(store: Store, tmp_path: Path) -> None:
    engine = Answering()
    async with httpx.AsyncClient(transport=httpx.MockTransport(engine.answer)) as http:
        beats = EngineBeats(store.fleet, info_calls([EngineClient("http://engine", http)], ANSWER_S), lease_s=LEASE_S)
        beating = asyncio.create_task(beats.run())
        presence = Presence(store, LEASE_S, asyncio.get_running_loop().time)

        async def alive() -> list[bool]:
            return [member.is_alive for member in await presence.members()]

        started = asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() - started < 2.5 * LEASE_S:  # idle for more than a lease
            assert False not in await alive()
            await asyncio.sleep(0.05)
        assert await alive() == [True]
        (record,) = await store.fleet.engines()
        assert record.weight_version == "default"
        assert b"secret" not in record.to_json()
        engine.alive = False

        async def found_gone() -> bool:
            return await alive() == [False]

        await until(found_gone)
        await cancel_all([beating], again_after_s=0.5)
