"""The unmodified packages that agents are written with, each in an environment of its own: `make test-agents`."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.agent_demo import agent_service
from gspo_core.messages import Message
from services.gateway.dialects import dialect as dialect_module
from services.gateway.dialects.fields import ANTHROPIC_MESSAGES, OPENAI_CHAT, OPENAI_RESPONSES
from services.gateway.dialects.turns import Refusal, RefusalKind
from services.gateway.http.streams import Pace
from services.process.ports import free_port
from tests.patience import HANG_S
from tests.services.gateway.fake_turns import KEY, FakeTurns, Gateway, Scripted, call, serving, texts
from tests.services.gateway.speakers import SPEAKERS, Said
from tests.services.gateway.test_gateway_dialects import CASES, Case, expected

SDKS = Path(__file__).with_name("sdks")
PYTHONS = Path(os.environ.get("GSPO_TEST_AGENTS", Path(__file__).parents[3] / ".make" / "agents"))
PACKAGES = {"openai": ("chat", "responses"), "anthropic": ("messages",)}
TOO_MANY = Refusal(RefusalKind.OVER_BUDGET, "rollout stopped: max_turns")
WAYS = ("whole", "events", "together")
EACH = pytest.mark.parametrize("package", PACKAGES)
pytestmark = [
    pytest.mark.third_party,
    pytest.mark.skipif(
        not (PYTHONS / "openai-agents" / "bin" / "python").exists(),
        reason="the packages are not installed: make test-agents",
    ),
]


async def run(package: str, script: str, *words: str, given: Any = None) -> Any:
    python = PYTHONS / package / "bin" / "python"
    done = await asyncio.to_thread(
        subprocess.run,
        [python, "-I", SDKS / script, *words],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@EACH
async def test_every_case_is_read_by_the_package_as_it_was_meant(package: str):
    """Whole, event by event, and put together from events by the package itself."""
    # The chat of the package puts together only calls of tools that it holds to their schema.
    ways = [(name, way) for name in PACKAGES[package] for way in WAYS if (name, way) != ("chat", "together")]
    plays = [(name, way, case) for name, way in ways for case in CASES if fits(name, way, case)]
    turns = FakeTurns([case.scripted for _, _, case in plays])
    requests = []
    for name, way, case in plays:
        body = SPEAKERS[name].body(case.messages, case.tools, case.max_tokens, case.stop, case.choice)
        usage = {"stream_options": {"include_usage": True}} if (name, way) == ("chat", "events") else {}
        requests.append({"way": f"{name} {way}", "body": body | usage})
    async with serving(turns) as gateway:
        answers = await run(package, "play.py", package, gateway.url, KEY, given=requests)
    for number, ((name, way, case), answer) in enumerate(zip(plays, answers, strict=True)):
        speaker = SPEAKERS[name]
        said = speaker.read_stream(answer) if way == "events" else read_whole(name, way, answer)
        meant = expected(case.scripted, number)
        if way == "together":
            said.versions = meant.versions
        assert said == meant, (name, way, case.name)
        assert list(turns.asks[number].messages) == list(case.messages)
    assert [one.fate for one in turns.answerings] == [["delivered", "dropped"]] * len(plays)


def fits(name: str, way: str, case: Case) -> bool:
    if case.stop and not SPEAKERS[name].has_stop:
        return False
    if way == "together" and name == "responses" and case.scripted.finish == "length":
        return False  # the package knows no end of these but a complete one
    # Put together from pieces, arguments that are no object are not what the package is made for.
    return not (way == "together" and any(not isinstance(one.arguments, dict) for one in case.scripted.calls))


def read_whole(name: str, way: str, answer: Any) -> Said:
    return SPEAKERS[name].read({"policy_version": []} | answer if way == "together" else answer)


@EACH
async def test_what_the_package_sends_back_is_what_it_was_given(package: str):
    """Else a conversation would not go on where it was, and its tokens would be encoded anew."""
    turn = [
        Scripted("Let me see.", (call("add", {"a": 2}), call("add", {"a": 3.5})), reasoning="Two calls."),
        Scripted(calls=(call("add", {"text": "é\n\"'"}),)),
        Scripted("5, and noon."),
    ]
    num_ways = 2 * len(PACKAGES[package])
    turns = FakeTurns(turn * num_ways)
    async with serving(turns) as gateway:
        assert await run(package, "loop.py", package, gateway.url, KEY) == ["5, and noon."] * num_ways
    for first in range(0, 3 * num_ways, 3):
        assert_one_conversation(turns, range(first, first + 3))
        results = [one for one in turns.asks[first + 2].messages if one["role"] == "tool"]
        assert [one["content"] for one in results] == [f"result of {one['tool_call_id']}" for one in results]
        assert len(results) == 3


def assert_one_conversation(turns: FakeTurns, numbers: range) -> None:
    """Each request begins with the one before and its answer, in its own words."""
    for before, after in pairwise(numbers):
        asked, answered, ask = turns.asks[before], turns.answerings[before].answer, turns.asks[after]
        message: Message = {"role": "assistant", "content": answered.text or None}
        if answered.reasoning:
            message["reasoning_content"] = answered.reasoning
        if answered.calls:
            message["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
                for call_id, one in zip(answered.call_ids, answered.calls, strict=True)
            ]
        assert list(ask.messages[: len(asked.messages) + 1]) == [*asked.messages, message]
        assert ask.tools == asked.tools


USAGE: dict[str, Any] = {"chat": {"stream_options": {"include_usage": True}}, "responses": {}, "messages": {}}
REFUSED = (
    (RefusalKind.INVALID, "BadRequestError", "BadRequestError"),
    (RefusalKind.OVER_BUDGET, "BadRequestError", "BadRequestError"),
    (RefusalKind.TOO_LONG, "BadRequestError", "BadRequestError"),
    (RefusalKind.ENDED, "ConflictError", "ConflictError"),
)


@EACH
async def test_errors_are_those_of_the_package_and_are_repeated_only_if_that_helps(package: str):
    names = [f"{name} {way}" for name in PACKAGES[package] for way in ("whole", "stream")]
    script = [Refusal(kind, f"because {kind}") for _ in names for kind, *_ in REFUSED]
    turns = FakeTurns([*script])
    async with serving(turns) as gateway:
        seen = await run(package, "errors.py", package, gateway.url, KEY, *[one for one in names for _ in REFUSED])
        assert len(turns.asks) == len(script)  # none was asked twice
        assert turns.script == []
        words = await edge_cases(package, gateway)
    wanted = [openai if package == "openai" else anthropic for _ in names for _, openai, anthropic in REFUSED]
    assert [one[0] for one in seen] == wanted
    assert all(refusal.message in one[2] for refusal, one in zip(script, seen, strict=True))
    assert words[0] == ["AuthenticationError", 401]
    assert words[1] == ["BadRequestError", 400]
    assert words[2] == ["ok", ["policy", "base"]]


async def edge_cases(package: str, gateway: Gateway) -> list[Any]:
    if package == "openai":
        ways = ["chat wrong key", "chat n", "models"]
    else:
        ways = ["messages wrong key", "messages choice", "models", "messages count", "messages token"]
    seen = await run(package, "errors.py", package, gateway.url, KEY, *ways)
    if package == "anthropic":
        assert seen.pop(3) == ["ok", 10]
        assert seen.pop(3) == ["ok", None]
    return [one[:2] for one in seen]


@EACH
async def test_what_is_away_is_asked_again_with_the_mark_of_a_retry(package: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dialect_module, "RETRY_AFTER_S", 1)
    names = [f"{name} {way}" for name in PACKAGES[package] for way in ("whole", "stream")]
    away = Refusal(RefusalKind.AWAY, "not now")
    turns = FakeTurns([one for _ in names for one in (away, Scripted("x"), Scripted(refusal=away), Scripted("x"))])
    async with serving(turns) as gateway:
        seen = await run(package, "errors.py", package, gateway.url, KEY, *[one for one in names for _ in range(2)])
    assert [one[0] for one in seen] == ["ok"] * 2 * len(names)
    assert [one.is_retry for one in turns.asks] == [False, True] * 2 * len(names)
    assert all(one.digest == turns.asks[0].digest for one in turns.asks[:4])


@EACH
async def test_an_error_in_the_middle_of_a_stream_is_an_error_of_the_package(package: str):
    names = [f"{name} stream" for name in PACKAGES[package]]
    refusal = Refusal(RefusalKind.ENDED, "it is over")
    turns = FakeTurns([Scripted(pieces=texts(["Well"]), refusal=refusal) for _ in names])
    async with serving(turns) as gateway:
        seen = await run(package, "errors.py", package, gateway.url, KEY, *names)
    assert all(one[0].endswith("Error") and "it is over" in one[2] for one in seen), seen
    assert len(turns.asks) == len(names)


@EACH
async def test_a_held_stream_is_read_to_its_end(package: str):
    """Signs of life come before the answer and in its middle."""
    requests = [
        {"way": f"{name} {way}", "body": SPEAKERS[name].body([{"role": "user", "content": "x"}]) | USAGE[name]}
        for name in PACKAGES[package]
        for way in ("events", "together")
        if (name, way) != ("chat", "together")
    ]
    gates = [asyncio.Event() for _ in requests]
    turns = FakeTurns([Scripted("one two", pieces=texts(["one"]), gate=gate) for gate in gates])
    async with serving(turns, Pace(commit_after_s=0.0, alive_every_s=0.02)) as gateway:
        playing = asyncio.create_task(run(package, "play.py", package, gateway.url, KEY, given=requests))
        for number, gate in enumerate(gates):
            async with asyncio.timeout(HANG_S):
                while len(turns.answerings) <= number or turns.answerings[number].num_taken == 0:
                    await asyncio.sleep(0.05)
            gate.set()
        answers = await playing
    for request, answer in zip(requests, answers, strict=True):
        name, _, way = str(request["way"]).partition(" ")
        speaker = SPEAKERS[name]
        said = speaker.read_stream(answer) if way == "events" else read_whole(name, way, answer)
        assert said.text == "one two"
    assert [one.fate for one in turns.answerings] == [["delivered", "dropped"]] * len(requests)


@EACH
async def test_every_field_that_the_package_can_send_stands_in_the_table(package: str):
    tables = {"chat": OPENAI_CHAT, "responses": OPENAI_RESPONSES, "messages": ANTHROPIC_MESSAGES}
    fields = await run(package, "fields.py", package)
    for dialect, places in fields.items():
        for place, names in places.items():
            assert set(names) <= set(tables[dialect][place]), (dialect, place)


async def test_openai_agents_plays_with_tools_and_hands_over():
    turn = [
        Scripted("Let me see.", (call("add", {"a": 2, "b": 3}), call("now", {}))),
        Scripted(calls=(call("transfer_to_poet", {}),)),
        Scripted("Five, alive."),
    ]
    turns = FakeTurns(turn * 4)
    async with serving(turns) as gateway:
        said = await run("openai-agents", "agents_session.py", gateway.url, KEY)
    assert said == ["Five, alive."] * 4
    for first in range(0, 12, 3):
        assert_one_conversation(turns, range(first, first + 2))
        results = [one["content"] for one in turns.asks[first + 1].messages if one["role"] == "tool"]
        assert results == ["5.0", "noon"]
        # The second agent has instructions of its own, and then the same conversation.
        clerk, poet = turns.asks[first + 1].messages, turns.asks[first + 2].messages
        assert (clerk[0]["content"], poet[0]["content"]) == ("Be brief.", "Answer in verse.")
        assert clerk[1:] == poet[1 : len(clerk)]
        assert turns.asks[first].tools == turns.asks[0].tools
    assert turns.asks[0].messages == turns.asks[6].messages


async def test_the_service_of_the_examples_plays_an_episode_once_however_often_it_is_started():
    calls = (call("calculate", {"expression": "6 * 7"}), call("calculate", {"expression": "("}))
    turns = FakeTurns([Scripted(calls=calls), Scripted(" 42"), Scripted(refusal=TOO_MANY)])
    port = free_port()
    async with serving(turns) as gateway, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        start = {"task": {"expression": "6 * 7"}, "base_url": f"{gateway.url}/v1", "api_key": KEY}

        async def begin(name: str) -> Any:
            return (await client.post("/", json=start, headers={"Idempotency-Key": name})).json()

        with agent_service(port):
            assert await asyncio.gather(begin("a"), begin("a")) == [{"answer": " 42"}] * 2
            assert await begin("a") == {"answer": " 42"}
            assert await begin("b") == {"answer": ""}
    *_, result, error = turns.asks[1].messages
    assert (result["content"], error["content"]) == ("42", "error: not an expression")
    assert len(turns.asks) == 3
