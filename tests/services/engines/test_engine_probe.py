"""What a self-test finds when something between us and an engine drops what we say: each field once, and none."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from services.engines.probe import problem_of
from services.engines.sglang import EngineClient
from tests.apparatus.scripted_engine import ScriptedEngine, ScriptedTransport

Body = dict[str, Any]


class Router(ScriptedTransport):
    """Passes calls on, after ``change`` has had its way with them; control calls only where ``has_control``."""

    def __init__(self, engine: ScriptedEngine, change: Callable[[Body], None], *, has_control: bool = True) -> None:
        super().__init__({"engine": engine})
        self._change, self._has_control = change, has_control

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/generate":
            body = json.loads(await request.aread())
            self._change(body)
            request = httpx.Request("POST", request.url, content=json.dumps(body))
        elif not self._has_control:
            return httpx.Response(404, json={"detail": "Not Found"})
        return await super().handle_async_request(request)


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    made = ScriptedEngine("w0", tick_s=0.0)
    ticking = asyncio.create_task(made.run())
    yield made
    ticking.cancel()


async def found(transport: httpx.AsyncBaseTransport) -> str | None:
    async with httpx.AsyncClient(transport=transport) as http:
        return await problem_of(EngineClient("http://engine", http))


def dropping(name: str) -> Callable[[Body], None]:
    def drop(body: Body) -> None:
        body.pop(name, None)
        body["sampling_params"].pop(name, None)

    return drop


async def test_nothing_is_found_where_nothing_is_wrong(engine: ScriptedEngine) -> None:
    for _ in range(5):  # what it samples differs each time
        assert await found(Router(engine, lambda body: None)) is None


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("temperature", "not at the requested temperature"),
        ("extra_key", "ignores extra_key"),
        ("stop_token_ids", "ignores stop_token_ids"),
        ("rid", "fails the self-test: .*rid"),
        ("return_logprob", "fails the self-test"),
        ("max_new_tokens", "fails the self-test: .*tokens"),
        ("logprob_start_len", "fails the self-test"),
    ],
)
async def test_a_field_that_is_dropped_on_the_way_is_named(engine: ScriptedEngine, field: str, text: str) -> None:
    problem = await found(Router(engine, dropping(field)))
    assert problem is not None
    assert re.search(text, problem), problem


async def test_a_router_without_control_calls_is_refused(engine: ScriptedEngine) -> None:
    problem = await found(Router(engine, lambda body: None, has_control=False))
    assert problem is not None
    assert "not a router's" in problem


async def test_logprobs_of_another_temperature_are_found(engine: ScriptedEngine) -> None:
    """As SGLang answers with SGLANG_RETURN_ORIGINAL_LOGPROB set: sampled at the temperature, told at 1."""

    class Original(Router):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            asked = json.loads(await request.aread()) if request.url.path == "/generate" else {}
            response = await super().handle_async_request(request)
            if asked.get("sampling_params", {}).get("temperature") == 2.0:
                answer = json.loads(response.content)
                (token_id,) = answer["output_ids"]
                told = await engine.score([*asked["input_ids"], token_id])
                answer["meta_info"]["output_token_logprobs"] = [[told[-1], token_id, None]]
                return httpx.Response(200, json=answer)
            return response

    problem = await found(Original(engine, lambda body: None))
    assert problem is not None
    assert "SGLANG_RETURN_ORIGINAL_LOGPROB" in problem


class Switching(Router):
    """Gets new weights before each of the first ``times`` scorings: between what was sampled and what it is held to."""

    def __init__(self, engine: ScriptedEngine, times: int) -> None:
        super().__init__(engine, lambda body: None)
        self._engine, self.left = engine, times

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        is_scoring = request.url.path == "/generate" and json.loads(await request.aread())["logprob_start_len"] == 0
        if is_scoring and self.left > 0:
            self.left -= 1
            await self._engine.update(f"w{self.left + 1}", f"w{self.left + 1}", flush=True)
        return await super().handle_async_request(request)


async def test_an_engine_whose_weights_change_during_the_self_test_is_tested_again(engine: ScriptedEngine) -> None:
    for times in (1, 2):
        assert await found(Switching(engine, times)) is None


async def test_one_whose_weights_never_stay_is_refused_for_that(engine: ScriptedEngine) -> None:
    problem = await found(Switching(engine, 1000))
    assert problem == "its weights changed during each of 5 self-tests: is another trainer at it?"
