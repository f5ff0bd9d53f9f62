"""The gateway over HTTP: keys, errors in each dialect's shape, broken connections, answers that take their time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from typing import Any

import httpx
import pytest
from starlette.types import Message, Send
from structlog.testing import capture_logs

from services.gateway.dialects.turns import Refusal, RefusalKind, TurnRequest
from services.gateway.http.app import build_app
from services.gateway.http.bodies import MAX_BODY_BYTES, Seats
from services.gateway.http.streams import Pace
from tests.patience import HANG_S
from tests.services.gateway.fake_turns import KEY, FakeTurns, Gateway, Scripted, serving, texts
from tests.services.gateway.speakers import SPEAKERS, Speaker, Wire, events

# Nothing is sent before there is something to say, nor signs of life.
PATIENT = Pace(commit_after_s=100, alive_every_s=100)
HASTY = Pace(commit_after_s=0.01, alive_every_s=0.01)
BEARER = {"authorization": f"Bearer {KEY}"}
EVERY = pytest.mark.parametrize("speaker", SPEAKERS.values(), ids=SPEAKERS)
# In Gemini's, whose statuses are OpenAI's.
OF_GEMINI: dict[RefusalKind, str] = {
    RefusalKind.INVALID: "INVALID_ARGUMENT",
    RefusalKind.UNKNOWN_KEY: "UNAUTHENTICATED",
    RefusalKind.OVER_BUDGET: "FAILED_PRECONDITION",
    RefusalKind.ENDED: "ABORTED",
    RefusalKind.TOO_LONG: "INVALID_ARGUMENT",
    RefusalKind.TOO_MANY: "RESOURCE_EXHAUSTED",
    RefusalKind.AWAY: "UNAVAILABLE",
}
KINDS: dict[RefusalKind, tuple[int, int, str, str, str]] = {
    # status in OpenAI's dialects and in Anthropic's, type in the one and the other, whether to retry
    RefusalKind.INVALID: (400, 400, "invalid_request_error", "invalid_request_error", "false"),
    RefusalKind.UNKNOWN_KEY: (401, 401, "authentication_error", "authentication_error", "false"),
    RefusalKind.OVER_BUDGET: (400, 400, "invalid_request_error", "invalid_request_error", "false"),
    RefusalKind.ENDED: (409, 409, "conflict_error", "invalid_request_error", "false"),
    RefusalKind.TOO_LONG: (400, 400, "invalid_request_error", "invalid_request_error", "false"),
    RefusalKind.TOO_MANY: (429, 429, "rate_limit_error", "rate_limit_error", "true"),
    RefusalKind.AWAY: (503, 529, "unavailable_error", "overloaded_error", "true"),
}


def body_of(speaker: Speaker, **more: Any) -> Wire:
    return speaker.body([{"role": "user", "content": "x"}]) | more


async def until(happened: asyncio.Event) -> None:
    async with asyncio.timeout(HANG_S):
        await happened.wait()


async def test_one_key_has_so_many_requests_open_and_others_are_answered_meanwhile():
    gate = asyncio.Event()
    seats = Seats(most=2, most_of_one=1)
    body, path = {"model": "policy", "messages": [{"role": "user", "content": "x"}]}, "/v1/chat/completions"
    app = build_app(
        FakeTurns([Scripted("first", gate=gate), Scripted("second")]),
        is_ready=lambda: True,
        stopping=asyncio.Event(),
        pace=PATIENT,
        seats=seats,
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as http:
        first = asyncio.create_task(http.post(path, json=body, headers=BEARER))
        async with asyncio.timeout(HANG_S):
            while not seats._open:
                await asyncio.sleep(0)
        second = await http.post(path, json=body, headers=BEARER)
        assert (second.status_code, second.json()["error"]["code"]) == (429, "too_many_requests")
        assert second.headers["retry-after"] == "5"
        other = await http.post(path, json=body, headers={"authorization": "Bearer ep_another"})
        assert other.status_code == 401
        gate.set()
        assert (await first).status_code == 200
        assert (await http.get("/healthz")).status_code == 200


@EVERY
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_has_its_own_status_as_long_as_nothing_was_sent(speaker: Speaker, stream: bool):
    """Also where it comes from the turn itself, after it was begun."""
    refusals = [Refusal(kind, f"because {kind}") for kind in KINDS]
    turns = FakeTurns([one for refusal in refusals for one in (refusal, Scripted(refusal=refusal))])
    async with serving(turns, PATIENT) as gateway:
        for kind, (openai, anthropic, of_openai, of_anthropic, retry) in KINDS.items():
            is_anthropic = "messages" in speaker.path
            for _ in range(2):
                body = body_of(speaker, stream=stream)
                answer = await gateway.http.post(speaker.url(body), json=body, headers=speaker.headers)
                assert answer.status_code == (anthropic if is_anthropic else openai), kind
                assert f"because {kind}" in speaker.error(answer.json())
                error = answer.json()["error"]
                if speaker is SPEAKERS["gemini"]:
                    assert (error["code"], error["status"]) == (openai, OF_GEMINI[kind])
                else:
                    assert error["type"] == (of_anthropic if is_anthropic else of_openai)
                assert answer.headers["x-should-retry"] == retry
                assert ("retry-after" in answer.headers) == (retry == "true")
                assert answer.headers["x-request-id"] == answer.headers["request-id"]
    assert [one.fate for one in turns.answerings] == [["dropped"]] * len(KINDS)


async def test_a_conversation_that_is_too_long_is_called_what_clients_look_for():
    refusal = Refusal(RefusalKind.TOO_LONG, "300 tokens > 200 maximum", param="messages")
    async with serving(FakeTurns([refusal] * len(SPEAKERS))) as gateway:
        told = {}
        for name, speaker in SPEAKERS.items():
            answer = await gateway.http.post(
                speaker.url(body_of(speaker)), json=body_of(speaker), headers=speaker.headers
            )
            told[name] = answer.json()["error"]
    assert told["messages"]["message"] == "prompt is too long: 300 tokens > 200 maximum"
    assert told["gemini"]["message"].startswith("The input token count exceeds the maximum number of tokens allowed")
    assert told["chat"]["code"] == told["responses"]["code"] == "context_length_exceeded"
    assert (told["chat"]["param"], told["responses"]["param"]) == ("messages", "input")


@EVERY
async def test_an_error_after_the_beginning_of_a_stream_is_told_in_the_stream(speaker: Speaker):
    gate, refusal = asyncio.Event(), Refusal(RefusalKind.ENDED, "it is over", param="messages")
    turns = FakeTurns([Scripted(pieces=texts(["Well"]), gate=gate, refusal=refusal)])
    async with serving(turns, PATIENT) as gateway:
        body = body_of(speaker, stream=True)
        async with gateway.http.stream("POST", speaker.url(body), json=body, headers=speaker.headers) as answer:
            assert answer.status_code == 200
            read = ""
            async for text in answer.aiter_text():
                read += text
                if "Well" in read:
                    gate.set()
    *_, (name, last) = events(read)
    if speaker.path == "/v1/messages":
        assert name == "error"
        assert speaker.error(last) == "it is over"
    elif speaker.path == "/v1/responses":
        assert (name, last["response"]["status"]) == ("response.failed", "failed")
        assert last["response"]["error"] == {"code": "episode_ended", "message": "it is over"}
        assert (last["error"]["message"], last["error"]["param"]) == ("it is over", "input")
    else:
        assert speaker.error(last) == "it is over"
        assert "[DONE]" not in read
    assert turns.answerings[0].fate == ["dropped"]


@EVERY
async def test_a_stream_that_is_held_shows_signs_of_life_and_is_whole_in_the_end(speaker: Speaker):
    """While weights switch or engines are away: before anything of the answer, and in its middle."""
    for pieces in ((), texts(["on", "e"])):
        gate = asyncio.Event()
        scripted = Scripted("one two", pieces=pieces, gate=gate)
        async with serving(FakeTurns([scripted]), HASTY) as gateway:
            usage = {"stream_options": {"include_usage": True}} if "chat" in speaker.path else {}
            body, read = body_of(speaker, stream=True, **usage), ""
            async with gateway.http.stream("POST", speaker.url(body), json=body, headers=speaker.headers) as answer:
                async for text in answer.aiter_text():
                    read += text
                    if sum(read.count(sign) for sign in SIGNS) > 4:
                        gate.set()
        assert speaker.read_stream(read).text == "one two"


# Well-formed JSON, and no text: in a field that is told again in answers.
HALF = json.dumps({"model": "policy", "input": "x", "metadata": {"a": "\ud800"}}).encode()
SIGNS = (": waiting\n\n", "event: ping\n", "event: response.in_progress\n", "\n\n\n\n")


@EVERY
@pytest.mark.parametrize("stream", [False, True])
async def test_a_connection_that_breaks_is_no_delivery(speaker: Speaker, stream: bool):
    gate = asyncio.Event()
    turns = FakeTurns([Scripted("never read", pieces=texts(["never"]), gate=gate)])
    async with serving(turns, PATIENT) as gateway:
        body = body_of(speaker, stream=stream)
        request = asyncio.create_task(gateway.http.post(speaker.url(body), json=body, headers=speaker.headers))
        async with asyncio.timeout(HANG_S):
            while not turns.answerings:
                await asyncio.sleep(0.01)
        request.cancel()
        await asyncio.wait({request})
        await until(turns.answerings[0].ended)
        gate.set()
        assert turns.answerings[0].fate == ["dropped"]
        again = await gateway.http.post(speaker.url(body_of(speaker)), json=body_of(speaker), headers=speaker.headers)
        assert again.status_code == 200


@EVERY
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_counts_as_delivered_before_its_reader_can_ask_again(speaker: Speaker, stream: bool):
    """Else an equal request for a second answer would get the first one again. What reads requests is run by the event
    loop, so nothing may come between the last byte and the word that it was delivered."""
    turns = FakeTurns()
    fates: list[list[str]] = []

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body" and message["body"]:
            fate = turns.answerings[0].fate
            assert fate == []
            asyncio.get_running_loop().call_soon(lambda: fates.append([*fate]))

    await asked_directly(turns, speaker, body_of(speaker, stream=stream), send)
    assert fates[-1][:1] == ["delivered"]
    assert turns.answerings[0].fate == ["delivered", "dropped"]


@EVERY
async def test_an_answer_to_a_client_that_left_while_it_was_sampled_is_not_delivered(speaker: Speaker):
    """Although the answer is there and is written: its connection is known to be gone."""
    gate, gone = asyncio.Event(), asyncio.Event()
    turns = FakeTurns([Scripted("one two", pieces=texts(["one"]), gate=gate)])

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body" and b"one" in message["body"]:
            gone.set()
            gate.set()

    await asked_directly(turns, speaker, body_of(speaker, stream=True), send, gone)
    assert turns.answerings[0].fate == ["dropped"]


async def asked_directly(
    turns: FakeTurns, speaker: Speaker, body: Wire, send: Send, gone: asyncio.Event | None = None
) -> None:
    """A request without a server between. The client leaves when ``gone`` is set."""
    app = build_app(turns, is_ready=lambda: True, stopping=asyncio.Event(), pace=PATIENT)
    requests = iter([{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}])

    async def receive() -> Message:
        for request in requests:
            return request
        await (gone or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    headers = [(name.encode(), value.encode()) for name, value in speaker.headers.items()]
    path, _, query = speaker.url(body).partition("?")
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": query.encode()}
    await app(scope, receive, send)


async def test_who_waits_for_an_answer_when_the_gateway_leaves_is_sent_elsewhere():
    turns = FakeTurns([Scripted("x", gate=asyncio.Event()) for _ in SPEAKERS for _ in range(2)])
    async with serving(turns, PATIENT) as gateway:
        waiting = [
            asyncio.create_task(
                gateway.http.post(one.url({"stream": stream}), json=body_of(one, stream=stream), headers=one.headers),
                name=one.path,
            )
            for one in SPEAKERS.values()
            for stream in (False, True)
        ]
        async with asyncio.timeout(HANG_S):
            while len(turns.answerings) < len(waiting):
                await asyncio.sleep(0.01)
        assert (await gateway.http.get("/readyz")).status_code == 200
        gateway.stopping.set()
        answers = await asyncio.gather(*waiting)
        assert (await gateway.http.get("/readyz")).status_code == 503
    assert {one.status_code for one in answers} == {503, 529}
    assert {one.headers["x-should-retry"] for one in answers} == {"true"}
    assert [one.fate for one in turns.answerings] == [["dropped"]] * 2 * len(SPEAKERS)


@EVERY
async def test_retries_are_known_by_their_marks(speaker: Speaker):
    turns = FakeTurns()
    marks: tuple[dict[str, str], ...] = (
        {},
        {"x-stainless-retry-count": "0"},
        {"x-stainless-retry-count": "2"},
        {"Idempotency-Key": "mine"},
        {"x-stainless-retry-count": "many"},
    )
    async with serving(turns) as gateway:
        for mark in marks:
            await gateway.http.post(
                speaker.url(body_of(speaker)), json=body_of(speaker), headers=speaker.headers | mark
            )
        long = speaker.headers | {"Idempotency-Key": "x" * 257}
        refused = await gateway.http.post(speaker.url(body_of(speaker)), json=body_of(speaker), headers=long)
    assert refused.status_code == 400
    told = [(one.repeat_key, one.is_retry) for one in turns.asks]
    assert told == [("", False), ("", False), ("", True), ("mine", False), ("", False)]
    assert len({one.digest for one in turns.asks}) == 1


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (BEARER, 200),
        ({"x-api-key": KEY}, 200),
        ({"x-goog-api-key": KEY}, 200),
        ({"authorization": "Bearer sk-of-another", "x-api-key": KEY}, 200),
        ({"authorization": f"bearer {KEY}", "x-api-key": "sk-of-another"}, 200),
        ({}, 401),
        ({"authorization": f"Basic {KEY}"}, 401),
        ({"x-api-key": "wrong"}, 401),
    ],
)
async def test_a_key_is_taken_wherever_a_client_puts_it(headers: dict[str, str], status: int):
    async with serving(FakeTurns()) as gateway:
        for speaker in SPEAKERS.values():
            answer = await gateway.http.post(speaker.url(body_of(speaker)), json=body_of(speaker), headers=headers)
            assert answer.status_code == status
        assert (await gateway.http.get("/v1/models", headers=headers)).status_code == status
        for path in ("/v1/episode/reward", "/v1/episode/finish"):
            assert (await gateway.http.post(path, json={"reward": 1}, headers=headers)).status_code == status


async def test_no_key_and_no_foreign_path_is_logged(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
):
    caplog.set_level(logging.DEBUG)
    async with serving(FakeTurns([Scripted(refusal=Refusal(RefusalKind.AWAY, "x"))])) as gateway:
        for speaker in SPEAKERS.values():
            await gateway.http.post(speaker.url(body_of(speaker)), json=body_of(speaker), headers=speaker.headers)
        missing = await gateway.http.get(f"/episodes/{KEY}/v1/models", headers=BEARER)
        assert missing.status_code == 404
    output = capsys.readouterr()
    logged = "\n".join(record.getMessage() for record in caplog.records if record.name != "httpx")
    assert KEY not in logged + output.out + output.err


async def test_the_log_says_what_was_wrong_with_a_request_and_nothing_that_it_says():
    """An agent that catches its error tells nobody, and its job fails with no word of why."""
    speaker, secret = SPEAKERS["chat"], "my secret \n field"
    async with serving(FakeTurns()) as gateway:
        with capture_logs() as lines:
            for fields in ({"response_format": {"type": "json_object"}}, {secret: secret}):
                await gateway.http.post(speaker.path, json=body_of(speaker, **fields), headers=speaker.headers)
    told = [(one["status"], one["refused"], one["field"]) for one in lines if one["event"] == "request"]
    assert told == [(400, "invalid_request", "response_format"), (400, "invalid_request", "unknown")]
    assert "secret" not in str(lines)


@EVERY
async def test_bodies_that_are_no_requests_are_refused_in_the_same_shape(speaker: Speaker):
    turns = FakeTurns()
    async with serving(turns) as gateway:
        for body in (b"", b"{", b"[]", b'{"model": "a", "model": "b"}', b'{"n": NaN}', b"\xff", HALF):
            answer = await gateway.http.post(speaker.url({}), content=body, headers=speaker.headers)
            assert answer.status_code == 400, body
            assert speaker.error(answer.json())
        wrong = await gateway.http.get(speaker.url({}), headers=speaker.headers)
        assert wrong.status_code == 405
        assert speaker.error(wrong.json())
    assert turns.asks == []


@pytest.mark.parametrize("arguments", ['{"x": "\\ud83d"}', '{"\\udc00": 1}'])
async def test_arguments_with_half_a_character_are_the_text_that_they_are(arguments: str):
    turns, call = FakeTurns([]), {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    told = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "b"},
    ]
    body = {"model": "policy", "messages": told}
    async with serving(turns) as gateway:
        answer = await gateway.http.post("/v1/chat/completions", json=body, headers=BEARER)
    assert answer.status_code == 200
    assert turns.asks[0].messages[1]["tool_calls"][0]["function"]["arguments"] == arguments


async def test_a_pair_of_surrogates_is_one_character():
    speaker, turns = SPEAKERS["chat"], FakeTurns()
    async with serving(turns) as gateway:
        body = json.dumps(speaker.body([{"role": "user", "content": "\U0001f600"}])).encode()
        assert b"\\ud83d\\ude00" in body
        assert (await gateway.http.post(speaker.path, content=body, headers=speaker.headers)).status_code == 200
    assert turns.asks[0].messages[0]["content"] == "\U0001f600"


async def test_a_body_is_bounded_whether_it_says_its_size_or_not():
    """And large ones are read, which hold the output of tools."""
    speaker, turns = SPEAKERS["chat"], FakeTurns()

    async def endless() -> Any:
        for _ in range(MAX_BODY_BYTES // (1 << 20) + 2):
            yield b" " * (1 << 20)

    async with serving(turns) as gateway:
        for content in (endless(), b" " * (MAX_BODY_BYTES + 1)):
            try:
                answer = await gateway.http.post(speaker.path, content=content, headers=speaker.headers)
                assert answer.status_code == 413
                assert "at most" in speaker.error(answer.json())
            except httpx.WriteError:
                pass  # the answer came before the client was done
        large = speaker.body([{"role": "user", "content": "x" * (3 << 20)}])
        answer = await gateway.http.post(speaker.url(large), json=large, headers=speaker.headers)
        assert answer.status_code == 200
    assert len(turns.asks) == 1


async def test_models_are_listed_in_the_shape_of_who_asks():
    async with serving(FakeTurns()) as gateway:
        of_openai = (await gateway.http.get("/v1/models", headers=BEARER)).json()
        of_anthropic = (await gateway.http.get("/v1/models", headers=SPEAKERS["messages"].headers)).json()
    assert of_openai["object"] == "list"
    assert [one["id"] for one in of_openai["data"]] == ["policy", "base"]
    assert {one["object"] for one in of_openai["data"]} == {"model"}
    assert (of_anthropic["first_id"], of_anthropic["last_id"], of_anthropic["has_more"]) == ("policy", "base", False)
    assert {one["type"] for one in of_anthropic["data"]} == {"model"}


async def test_a_model_is_found_by_its_name_in_the_shape_of_who_asks():
    async with serving(FakeTurns()) as gateway:
        found = await gateway.http.get("/v1/models/policy", headers=BEARER)
        of_anthropic = await gateway.http.get("/v1/models/base", headers=SPEAKERS["messages"].headers)
        missing = await gateway.http.get("/v1/models/org/gpt", headers=BEARER)
        without_key = await gateway.http.get("/v1/models/policy")
    assert (found.json()["id"], found.json()["object"]) == ("policy", "model")
    assert (of_anthropic.json()["id"], of_anthropic.json()["type"]) == ("base", "model")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    assert without_key.status_code == 401


async def test_the_size_of_the_prompt_stands_at_the_beginning_of_a_stream():
    speaker = SPEAKERS["messages"]
    async with serving(FakeTurns()) as gateway:
        body = speaker.body([{"role": "user", "content": "x"}]) | {"stream": True}
        text = (await gateway.http.post(speaker.url(body), json=body, headers=speaker.headers)).text
    usage = json.loads(text.split("data: ", 2)[1].splitlines()[0])["message"]["usage"]
    assert sum(usage[name] for name in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")) > 0


async def test_prompts_are_counted_without_a_turn():
    speaker, turns = SPEAKERS["messages"], FakeTurns()
    body = body_of(speaker, temperature=1)
    del body["max_tokens"]
    async with serving(turns) as gateway:
        answer = await gateway.http.post("/v1/messages/count_tokens", json=body, headers=speaker.headers)
        refused = await gateway.http.post("/v1/messages/count_tokens", json={}, headers=speaker.headers)
    assert (answer.json(), answer.headers["x-gspo-ignored"]) == ({"input_tokens": 10}, "temperature")
    assert (refused.status_code, refused.json()["type"]) == (400, "error")
    assert (turns.asks, turns.num_counted) == ([], 1)


async def test_what_a_job_has_passed_over_is_handed_on_and_named():
    speaker, turns = SPEAKERS["chat"], FakeTurns([Scripted("yes")], says_unsupported=True)
    tool = {"type": "function", "surprise": 1, "function": {"name": "f", "wonder": 2}}
    body = body_of(speaker, temperature=1, n=2, tools=[tool])
    async with serving(turns) as gateway:
        answer = await gateway.http.post(speaker.url(body), json=body, headers=speaker.headers)
        vital = await gateway.http.post(speaker.path, json=body | {"functions": []}, headers=speaker.headers)
        strict = await gateway.http.post("/v1/episode/reward", json={"reward": 1, "more": 2}, headers=BEARER)
    assert answer.headers["x-gspo-ignored"] == "temperature,n,tools.surprise,tools.function.wonder"
    assert [one.param for one in turns.asks[0].unsupported] == ["n", "tools[0].surprise", "tools[0].function.wonder"]
    assert (vital.status_code, vital.json()["error"]["param"]) == (400, "functions")
    assert (strict.status_code, strict.json()["error"]["param"]) == (400, "more")


@pytest.mark.parametrize("name", ["web\nx", "日本", "a\r\nset-cookie: x", "x" * 100_000])
async def test_what_a_client_calls_a_field_never_stands_in_a_header_as_it_came(name: str):
    speaker, turns = SPEAKERS["chat"], FakeTurns([Scripted("yes")], says_unsupported=True)
    async with serving(turns) as gateway:
        answer = await gateway.http.post(speaker.path, json=body_of(speaker, **{name: 1}), headers=speaker.headers)
    assert (answer.status_code, answer.headers["x-gspo-ignored"]) == (200, "unknown")
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("speaker", SPEAKERS.values(), ids=SPEAKERS)
async def test_the_trace_of_a_conversation_is_named_in_a_header_and_an_episode_has_none(speaker: Speaker):
    away = Refusal(RefusalKind.AWAY, "the engines are away")
    script = [Scripted("yes", trace="11"), Scripted("yes", trace="11"), Scripted("yes")]
    turns = FakeTurns([*script, Scripted(refusal=away, trace="11")])
    async with serving(turns) as gateway:
        bodies = body_of(speaker), body_of(speaker, stream=True), body_of(speaker), body_of(speaker)
        answers = [await gateway.http.post(speaker.url(one), json=one, headers=speaker.headers) for one in bodies]
    assert [one.status_code == 200 for one in answers] == [True, True, True, False]
    assert [one.headers.get("x-gspo-trace") for one in answers] == ["11", "11", None, None]


async def test_many_fields_are_not_all_named():
    speaker, turns = SPEAKERS["chat"], FakeTurns([Scripted("yes")], says_unsupported=True)
    fields = {f"f{number}": 1 for number in range(64)}
    async with serving(turns) as gateway:
        body = body_of(speaker, **fields, temperature=1)
        answer = await gateway.http.post(speaker.path, json=body, headers=speaker.headers)
    assert answer.headers["x-gspo-ignored"].split(",")[-1] == "more"


async def test_of_two_keys_the_one_that_pays_is_taken_for_a_reward():
    """Others are taken where anything else is asked for."""

    class Listening(FakeTurns):
        async def reward(self, key: str, value: float, *, turn: str = "", token: str = "") -> None:
            heard.append(key)

    heard: list[str] = []
    async with serving(Listening()) as gateway:
        for headers in (
            {"authorization": "Bearer rw_b", "x-api-key": KEY},
            {"authorization": f"Bearer {KEY}", "x-api-key": "rw_b"},
        ):
            answer = await gateway.http.post("/v1/episode/reward", json={"reward": 1}, headers=headers)
            models = await gateway.http.get("/v1/models", headers=headers)
            assert (answer.status_code, models.status_code) == (200, 200)
    assert heard == ["rw_b", "rw_b"]


async def test_a_reward_of_four_hundred_digits_is_no_number():
    async with serving(FakeTurns()) as gateway:
        body = b'{"reward": 1' + b"0" * 400 + b"}"
        answer = await gateway.http.post("/v1/episode/reward", content=body, headers=BEARER)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "reward")


async def test_rewards_and_the_end_are_handed_on():
    turns = FakeTurns()
    async with serving(turns) as gateway:

        async def post(body: Wire, **headers: str) -> httpx.Response:
            return await gateway.http.post("/v1/episode/reward", json=body, headers=BEARER | headers)

        assert (await post({"reward": 1})).json() == {"reward": 1.0, "turn": None}
        assert (await post({"reward": -0.5, "turn": "turn_3", "token": "a"})).json()["turn"] == "turn_3"
        assert (await post({"reward": 0}, **{"idempotency-key": "b"})).status_code == 200
        for body in ({}, {"reward": "1"}, {"reward": True}, {"reward": None}, {"reward": 1, "of": "x"}):
            assert (await post(body)).status_code == 400, body
        infinite = await gateway.http.post("/v1/episode/reward", content=b'{"reward": 1e999}', headers=BEARER)
        assert infinite.status_code == 400
        assert (await gateway.http.post("/v1/episode/finish", headers=BEARER)).json() == {"finished": True}
    assert turns.rewards == [(1.0, "", ""), (-0.5, "turn_3", "a"), (0.0, "", "b")]
    assert turns.num_finished == 1


async def test_it_is_alive_and_ready_or_not():
    async with serving(FakeTurns()) as gateway:
        assert (await gateway.http.get("/healthz")).status_code == 200
        assert (await gateway.http.get("/readyz")).status_code == 200
        gateway.is_ready = False
        assert (await gateway.http.get("/readyz")).status_code == 503
        assert (await gateway.http.get("/healthz")).status_code == 200


class Broken(FakeTurns):
    async def model_names(self, key: str) -> tuple[str, ...]:
        raise RuntimeError(f"a fault of ours, with {key}")


@EVERY
async def test_a_fault_of_ours_is_told_in_the_same_shape_without_its_inside(
    speaker: Speaker, capsys: pytest.CaptureFixture[str]
):
    async with serving(Broken()) as gateway:
        answer = await gateway.http.post(speaker.url(body_of(speaker)), json=body_of(speaker), headers=speaker.headers)
    assert answer.status_code == 500
    assert "fault of ours" not in answer.text
    assert answer.headers["x-request-id"] in speaker.error(answer.json())
    assert "x-should-retry" not in answer.headers


async def raw_request(gateway: Gateway, path: str, body: Wire) -> bytes:
    """What comes before the connection is closed by this client's end of it."""
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {KEY}\r\ncontent-length: {len(content)}\r\n"
    writer.write(f"{head}connection: close\r\n\r\n".encode() + content)
    await writer.drain()
    answer = await reader.read()
    writer.close()
    return answer


async def test_a_stream_ends_whole_on_the_wire():
    async with serving(FakeTurns()) as gateway:
        answer = await raw_request(gateway, SPEAKERS["chat"].path, body_of(SPEAKERS["chat"], stream=True))
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert b"transfer-encoding: chunked" in head
    assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_waits_when_the_server_ends_is_told_to_ask_again(stream: bool) -> None:
    """And not that the gateway failed, which some clients take for the end."""

    class Waiting(FakeTurns):
        asked = asyncio.Event()

        async def ask(self, key: str, ask: TurnRequest) -> Any:
            self.asked.set()
            await asyncio.Event().wait()

    turns = Waiting([])
    turns.asked = asyncio.Event()
    async with contextlib.AsyncExitStack() as closing:
        gateway = await closing.enter_async_context(serving(turns))
        async with httpx.AsyncClient(base_url=gateway.url, timeout=HANG_S, trust_env=False) as http:
            body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
            headers = {"Authorization": f"Bearer {KEY}"}
            asking = asyncio.create_task(http.post("/v1/chat/completions", json=body, headers=headers))
            await turns.asked.wait()
            await closing.aclose()
            answer = await asking
    assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
