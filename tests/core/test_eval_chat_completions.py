"""A policy behind an API: what it is sent, how its answers are read, and what becomes of its refusals."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest

from gspo_core.env import CallStatus, Start
from gspo_core.evaluation import chat_completions
from gspo_core.evaluation.chat_completions import Api, ChatCompletions, only_model, read_answer
from gspo_core.evaluation.policy import PolicyFailed, PolicyTurn, PolicyUnusable
from gspo_core.messages import ToolSchema
from gspo_core.spec import EpisodeLimits
from gspo_core.types import StopReason

TOOL: ToolSchema = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
START = Start([{"role": "user", "content": "Go."}], [TOOL])


def completion(content: Any, finish: str = "stop", **message: Any) -> dict[str, Any]:
    choice = {"message": {"role": "assistant", "content": content, **message}, "finish_reason": finish}
    return {"choices": [choice], "usage": {"completion_tokens": 7}}


def a_call(arguments: str, name: str = "add", id: str = "c1") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


class Server:
    """Answers in the order given; keeps what it was sent."""

    def __init__(self, *answers: httpx.Response | Mapping[str, Any]) -> None:
        self.sent: list[dict[str, Any]] = []
        self._answers = list(answers)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.sent.append(json.loads(request.content) if request.content else {"path": request.url.path})
        answer = self._answers.pop(0)
        return answer if isinstance(answer, httpx.Response) else httpx.Response(200, json=answer)


def policy_of(server: Callable[[httpx.Request], httpx.Response], **api: Any) -> ChatCompletions:
    ticks = iter(range(1000))
    client = httpx.AsyncClient(transport=httpx.MockTransport(server))
    return ChatCompletions(Api("http://x/v1", "m", **api), client, lambda: float(next(ticks)))


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_completions, "_PAUSE_S", (0.0, 0.0))


async def test_a_tool_cycle_over_chat_completions() -> None:
    said = completion(None, "tool_calls", tool_calls=[a_call('{"x": 1}'), a_call('{"x": 2}', id="c2")], reasoning="Hm.")
    server = Server(said, completion("Three."))
    conversation = policy_of(server, body={"temperature": 0.5}).converse("0/0", 1, EpisodeLimits())
    assert conversation.begin(START) is None
    turn = await conversation.answer(100)
    assert isinstance(turn, PolicyTurn)
    assert [(call.name, call.arguments, call.status) for call in turn.parsed.calls] == [
        ("add", {"x": 1}, CallStatus.OK),
        ("add", {"x": 2}, CallStatus.OK),
    ]
    assert (turn.num_tokens, turn.parsed.reasoning, turn.stop) == (7, "Hm.", None)
    results = [{"role": "tool", "content": str(number), "name": "add", "tool_call_id": "call_0"} for number in (1, 2)]
    assert conversation.read(turn, results) is None  # type: ignore[arg-type]
    last = await conversation.answer(100)
    assert isinstance(last, PolicyTurn)
    assert last.parsed.text == "Three."
    first, second = server.sent
    assert (first["model"], first["temperature"], first["tools"]) == ("m", 0.5, [TOOL])
    assert "max_tokens" not in first
    _user, assistant, *tools = second["messages"]
    assert assistant == {"role": "assistant", "content": "", "tool_calls": said["choices"][0]["message"]["tool_calls"]}
    assert [(one["tool_call_id"], one["content"]) for one in tools] == [("c1", "1"), ("c2", "2")]


def test_calls_that_cannot_be_read_are_attempts() -> None:
    answer = completion("", "tool_calls", tool_calls=[a_call("{bad"), a_call("{}", "fly"), a_call("")])
    parsed = read_answer(answer, {"add"}).parsed
    assert [call.status for call in parsed.calls] == [CallStatus.INVALID_JSON, CallStatus.UNKNOWN_TOOL, CallStatus.OK]


def test_an_answer_that_was_cut_off_is_not_complete() -> None:
    turn = read_answer(completion("And so", "length"), set())
    assert (turn.parsed.complete, turn.stop) == (False, StopReason.MAX_TOKENS)


def test_a_content_in_parts_is_their_text_and_what_was_thought() -> None:
    thinking = [{"type": "thinking", "thinking": [{"type": "text", "text": "Hm. "}]}]
    parts = [*thinking, {"type": "thinking", "thinking": "So."}, *({"type": "text", "text": one} for one in "ab")]
    turn = read_answer(completion(parts), set())
    assert (turn.parsed.text, turn.parsed.reasoning) == ("ab", "Hm. So.")
    assert turn.message == {"role": "assistant", "content": "ab", "reasoning_content": "Hm. So."}


@pytest.mark.parametrize("content", [[{"type": "image_url", "image_url": {}}], ["a"], [{"type": "text"}], {}, 7])
def test_a_content_of_another_kind_is_a_failure(content: Any) -> None:
    with pytest.raises(PolicyFailed, match="its content is no text"):
        read_answer(completion(content), set())


@pytest.mark.parametrize("answer", [{}, {"choices": []}, {"choices": [{"message": None}]}])
def test_an_answer_of_another_shape_is_a_failure(answer: dict[str, Any]) -> None:
    with pytest.raises(PolicyFailed, match="no chat completion"):
        read_answer(answer, set())


def test_an_answer_that_was_withheld_is_a_failure() -> None:
    with pytest.raises(PolicyFailed, match="content filter"):
        read_answer(completion("", "content_filter"), set())


async def asked(server: Callable[[httpx.Request], httpx.Response], **api: Any) -> PolicyTurn | StopReason:
    conversation = policy_of(server, **api).converse("0/0", 1, EpisodeLimits())
    conversation.begin(START)
    return await conversation.answer(100)


async def test_a_request_that_may_succeed_later_is_sent_again() -> None:
    server = Server(httpx.Response(429, headers={"retry-after": "0"}), httpx.Response(503), completion("Yes."))
    answer = await asked(server)
    assert isinstance(answer, PolicyTurn)
    assert (answer.parsed.text, len(server.sent)) == ("Yes.", 3)


async def test_half_a_character_is_neither_kept_nor_sent() -> None:
    half = httpx.Response(200, content=json.dumps(completion("It is \ud83d.")))
    server = Server(half, completion("Yes."))
    conversation = policy_of(server).converse("0/0", 1, EpisodeLimits())
    conversation.begin(START)
    turn = await conversation.answer(100)
    assert isinstance(turn, PolicyTurn)
    assert turn.parsed.text == turn.message["content"] == "It is ?."
    assert conversation.read(turn, [{"role": "user", "content": "a tool read \udc00"}]) is None
    await conversation.answer(100)
    assert [one["content"] for one in server.sent[1]["messages"]] == ["Go.", "It is ?.", "a tool read ?"]


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(200, headers={"content-encoding": "gzip"}, stream=httpx.ByteStream(b"no gzip")),
        httpx.Response(200, content="[" * 100_000),
    ],
)
async def test_an_answer_that_cannot_be_read_fails_its_episode_alone(answer: httpx.Response) -> None:
    with pytest.raises(PolicyFailed, match=r"DecodingError|is not JSON"):
        await asked(Server(answer))


async def test_patience_ends() -> None:
    def away(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with pytest.raises(PolicyFailed, match="no answer for 3s: ConnectError"):
        await asked(away, patience_s=3.0)


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_request_that_never_will_ends_the_evaluation(status: int) -> None:
    with pytest.raises(PolicyUnusable, match=f"status {status}: no"):
        await asked(Server(httpx.Response(status, text="no")))


async def test_an_api_may_say_itself_whether_to_send_a_request_again() -> None:
    with pytest.raises(PolicyFailed, match="status 409: over"):
        await asked(Server(httpx.Response(409, text="over", headers={"x-should-retry": "false"})))
    later = httpx.Response(423, headers={"x-should-retry": "true"})
    assert isinstance(await asked(Server(later, completion("Yes."))), PolicyTurn)


async def test_a_refused_request_fails_its_episode_alone() -> None:
    with pytest.raises(PolicyFailed, match="status 422: strange"):
        await asked(Server(httpx.Response(422, text="strange")))


async def test_a_conversation_that_is_too_long_has_ended_as_in_training() -> None:
    body = {"error": {"message": "This model's maximum context length is 10 tokens", "code": "context_length_exceeded"}}
    assert await asked(Server(httpx.Response(400, json=body))) is StopReason.CONTEXT_OVERFLOW


async def test_the_only_model_need_not_be_named() -> None:
    async with httpx.AsyncClient(transport=httpx.MockTransport(Server({"data": [{"id": "one"}]}))) as client:
        assert await only_model("http://x/v1", client) == "one"
    several = Server({"data": [{"id": "one"}, {"id": "two"}]})
    async with httpx.AsyncClient(transport=httpx.MockTransport(several)) as client:
        with pytest.raises(PolicyUnusable, match="2 models, such as one, two: write http://x/v1#MODEL"):
            await only_model("http://x/v1", client)


def test_a_key_is_not_shown() -> None:
    assert "secret" not in repr(Api("http://x/v1", "m", "secret"))
