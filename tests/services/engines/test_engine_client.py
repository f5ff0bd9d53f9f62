"""The client believes no answer unchecked, and the type of its errors says what may be done next."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from services.engines.keys import KeyPair
from services.engines.protocol import (
    EngineDirty,
    EngineProtocolError,
    EngineRejected,
    EngineUnavailable,
    Generation,
    LabelledSpan,
)
from services.engines.sglang import EngineClient
from services.engines.sglang_versions import EngineProfile

URL = "http://engine"


def answer(rid: str) -> dict[str, Any]:
    """What a correct engine says; each test spoils one thing. No engine that runs here would lie like this."""
    return {
        "text": "",
        "output_ids": [5, 6, 7],
        "meta_info": {
            "id": rid,
            "finish_reason": {"type": "stop", "matched": 7},
            "weight_version": "j/0/2",
            "output_token_logprobs": [[-1.5, 5, None], [-0.0, 6, None], [-2.0, 7, None]],
            "output_token_logprobs_length": 3,
            "completion_tokens": 3,
            "cached_tokens": 4,
            "num_retractions": 1,
            "weight_versions": [
                {"version": "j/0/1", "start": 0, "end": 1},
                {"version": "j/0/2", "start": 1, "end": 3},
            ],
        },
    }


async def generate_with(spoil: Callable[[dict[str, Any]], object]) -> Generation:
    def respond(request: httpx.Request) -> httpx.Response:
        body = copy.deepcopy(answer(msgspec.json.decode(request.content)["rid"]))
        spoil(body)
        return httpx.Response(200, content=msgspec.json.encode(body))

    async with httpx.AsyncClient(transport=httpx.MockTransport(respond)) as http:
        client = EngineClient(URL, http)
        return await client.generate([1, 2], max_new_tokens=5, temperature=1.0, stop_token_ids=[7], vocab_size=10)


async def test_a_correct_answer_is_read() -> None:
    generation = await generate_with(lambda body: None)
    assert generation.output_ids == [5, 6, 7]
    assert generation.logprobs == [-1.5, 0.0, -2.0]
    assert generation.spans == (LabelledSpan("j/0/1", 0, 1), LabelledSpan("j/0/2", 1, 3))
    assert (generation.finish_reason, generation.cached_tokens, generation.num_retractions) == ("stop", 4, 1)
    assert len(generation.rid) == 32
    assert int(generation.rid, 16)


def spoil_meta(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda body: body["meta_info"].update(changes)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (spoil_meta(id="another"), "rid"),
        (spoil_meta(completion_tokens=2), "completion_tokens"),
        (lambda body: body.update(output_ids=[5, 6, 8]), "different ids"),
        (lambda body: body.update(output_ids=[5, 6]), "completion_tokens"),
        (lambda body: body["meta_info"]["output_token_logprobs"].pop(), "different ids"),
        (spoil_meta(output_token_logprobs=[[0.5, 5, None], [-1, 6, None], [-1, 7, None]]), "out of range"),
        (spoil_meta(output_token_logprobs=[[None, 5, None], [-1, 6, None], [-1, 7, None]]), "0.5.19"),
        (lambda body: body["meta_info"].pop("output_token_logprobs"), "0.5.19"),
        (lambda body: body["meta_info"].pop("weight_versions"), "0.5.19"),
        (spoil_meta(weight_versions=[{"version": "a", "start": 0, "end": 2}]), "spans"),
        (spoil_meta(weight_versions=[{"version": "a", "start": 1, "end": 3}]), "spans"),
        (
            spoil_meta(
                weight_versions=[{"version": "a", "start": 0, "end": 2}, {"version": "b", "start": 1, "end": 3}]
            ),
            "spans",
        ),
        (spoil_meta(finish_reason={"type": "weird"}), "weird"),
    ],
)
async def test_an_answer_that_breaks_a_rule_is_refused_whole(
    spoil: Callable[[dict[str, Any]], object], complaint: str
) -> None:
    with pytest.raises(EngineProtocolError, match=complaint):
        await generate_with(spoil)


async def test_ids_outside_of_the_vocabulary_are_refused() -> None:
    def spoil(body: dict[str, Any]) -> None:
        body["output_ids"][2] = body["meta_info"]["output_token_logprobs"][2][1] = 10

    with pytest.raises(EngineProtocolError, match="vocabulary"):
        await generate_with(spoil)


async def test_more_tokens_than_asked_for_are_refused() -> None:
    def spoil(body: dict[str, Any]) -> None:
        body["output_ids"] *= 2
        body["meta_info"]["output_token_logprobs"] *= 2
        body["meta_info"]["completion_tokens"] = 6
        body["meta_info"]["weight_versions"][1]["end"] = 6

    with pytest.raises(EngineProtocolError, match="5 were requested"):
        await generate_with(spoil)


@pytest.mark.parametrize("input_ids", [[], [[]], [1, 10], [-1], [1.0]])
async def test_input_that_would_kill_a_real_engine_is_never_sent(input_ids: Any) -> None:
    def respond(_request: httpx.Request) -> httpx.Response:
        pytest.fail("it was sent")

    async with httpx.AsyncClient(transport=httpx.MockTransport(respond)) as http:
        client = EngineClient(URL, http)
        with pytest.raises((ValueError, TypeError, EngineRejected)):
            await client.generate(input_ids, max_new_tokens=5, temperature=1.0, stop_token_ids=[], vocab_size=10)


@pytest.mark.parametrize(
    ("response", "error", "text"),
    [
        (httpx.Response(400, json={"error": {"message": "too long"}}), EngineRejected, "too long"),
        (httpx.Response(400, json={"error": "unknown field `x`"}), EngineRejected, "unknown field `x`"),
        (httpx.Response(400, json={"object": "error", "message": "bad body"}), EngineRejected, "bad body"),
        (httpx.Response(404, json={"detail": "Not Found"}), EngineRejected, "Not Found"),
        (httpx.Response(500, text="oops"), EngineUnavailable, "oops"),
        (httpx.Response(503), EngineUnavailable, "503"),
    ],
)
async def test_refusals_and_failures_differ(response: httpx.Response, error: type[Exception], text: str) -> None:
    async with httpx.AsyncClient(transport=httpx.MockTransport(lambda _: response)) as http:
        client = EngineClient(URL, http)
        with pytest.raises(error, match=text):
            await client.generate([1], max_new_tokens=1, temperature=1.0, stop_token_ids=[])


async def test_a_lost_or_cancelled_call_is_aborted_by_its_own_id() -> None:
    seen: list[tuple[str, str]] = []

    async def respond(request: httpx.Request) -> httpx.Response:
        body = msgspec.json.decode(request.content)
        seen.append((request.url.path, body["rid"]))
        if request.url.path == "/generate":
            if len(seen) > 1:
                await asyncio.Event().wait()
            raise httpx.ReadError("cut")
        return httpx.Response(200)

    async with httpx.AsyncClient(transport=httpx.MockTransport(respond)) as http:
        client = EngineClient(URL, http)
        with pytest.raises(EngineUnavailable):
            await client.generate([1], max_new_tokens=1, temperature=1.0, stop_token_ids=[])
        call = asyncio.create_task(client.generate([1], max_new_tokens=1, temperature=1.0, stop_token_ids=[]))
        while len(seen) < 3:
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert [path for path, _ in seen] == ["/generate", "/abort_request"] * 2
    assert seen[0][1] == seen[1][1] != seen[2][1] == seen[3][1]


@pytest.mark.parametrize(
    ("update", "held", "error"),
    [
        (httpx.Response(200, json={"success": True}), "j/0/0", EngineDirty),  # an update without a label: spans lie
        (httpx.Response(400, json={"success": False, "message": "half of it"}), "j/0/0", EngineDirty),
        (httpx.ReadError("cut"), "j/0/0", EngineDirty),
        (httpx.ConnectError("refused"), "j/0/0", EngineUnavailable),
        (
            httpx.Response(400, json={"message": "Failed to get weights iterator: no such folder"}),
            "j/0/0",
            EngineRejected,
        ),
    ],
)
async def test_what_a_failed_weight_load_leaves_behind(
    update: httpx.Response | Exception, held: str, error: type[Exception]
) -> None:
    def respond(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/model_info":
            return httpx.Response(200, json={"weight_version": held})
        if isinstance(update, Exception):
            raise update
        return update

    async with httpx.AsyncClient(transport=httpx.MockTransport(respond)) as http:
        with pytest.raises(error):
            await EngineClient(URL, http).load_weights(Path("v1"), "j/0/1")


def test_a_profile_is_read_from_the_version_that_an_engine_names() -> None:
    known = {text: EngineProfile.parse(text) for text in ("0.5.18", "0.5.19.post1", "0.5.20", "0.5.23", "0.6.0")}
    assert [one.names_versions for one in known.values()] == [False, True, True, True, True]
    assert [one.has_ready for one in known.values()] == [False, False, True, True, True]
    assert [one.has_weight_sessions for one in known.values()] == [False, False, False, True, True]
    assert str(known["0.5.19.post1"]) == "0.5.19"
    assert [EngineProfile.parse(text).version for text in ("0.5", "0.4.post1")] == [(0, 5, 0), (0, 4, 0)]
    for text in ("None", "0.1.dev7+g1234567"):
        with pytest.raises(EngineProtocolError, match=r"like 0\.5\.23"):
            EngineProfile.parse(text)


@pytest.mark.parametrize(
    ("said", "longest"),
    [
        ({"context_length": None, "max_req_input_len": 4090}, 4090),
        ({"context_length": 4096, "max_req_input_len": 4090}, 4090),
        ({"context_length": 4096}, 4096),
        ({}, 0),
    ],
)
async def test_the_longest_sequence_of_an_engine_is_what_it_would_not_refuse(said: Any, longest: int) -> None:
    told = {"version": "0.5.23", "tp_size": 1, "dp_size": 1, "pp_size": 1, **said}
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=told))
    async with httpx.AsyncClient(transport=transport) as http:
        assert (await EngineClient("http://127.0.0.1:1", http).capabilities()).context_tokens == longest


async def test_keys_go_where_they_belong() -> None:
    seen: dict[str, str | None] = {}

    def respond(request: httpx.Request) -> httpx.Response:
        seen[request.url.path] = request.headers.get("Authorization")
        return httpx.Response(200, json={})

    async with httpx.AsyncClient(transport=httpx.MockTransport(respond)) as http:
        client = EngineClient(URL, http, KeyPair("user", "admin"))
        await client.model_info()
        await client.pause()
        await EngineClient(URL, http).abort("x")
    assert seen == {
        "/model_info": "Bearer user",
        "/pause_generation": "Bearer admin",
        "/abort_request": None,
    }
