"""The unmodified `google-genai` package, in an environment of its own: `make test-agents`."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from services.gateway.dialects.turns import Piece, Refusal, RefusalKind
from services.gateway.http.streams import Pace
from tests.patience import HANG_S
from tests.services.gateway.fake_turns import KEY, FakeTurns, Scripted, call, serving, texts

SCRIPT = Path(__file__).with_name("sdks") / "genai.py"
PYTHONS = Path(os.environ.get("GSPO_TEST_AGENTS", Path(__file__).parents[3] / ".make" / "agents"))
PYTHON = PYTHONS / "google-genai" / "bin" / "python"
pytestmark = [
    pytest.mark.third_party,
    pytest.mark.skipif(not PYTHON.exists(), reason="the package is not installed: make test-agents"),
]


async def run(url: str, *ways: str) -> list[Any]:
    done = await asyncio.to_thread(
        subprocess.run,
        [PYTHON, "-I", SCRIPT, url, KEY],
        input=json.dumps(ways),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen: list[Any] = json.loads(done.stdout)
    return seen


def parts_of(answers: Sequence[Any]) -> list[Any]:
    return [part for one in answers for part in one["candidates"][0]["content"]["parts"]]


async def test_an_answer_is_read_whole_and_as_a_stream_as_it_was_meant():
    scripted = Scripted(
        "one two\u2028",
        (call("add", {"a": 2}),),
        reasoning="Hm.",
        pieces=(*texts(["Hm"], reasoning=True), *texts(["one"]), Piece(text=" t")),
        num_behind=2,
    )
    turns = FakeTurns([scripted] * 2)
    async with serving(turns) as gateway:
        whole, stream = await run(gateway.url, "whole", "stream")
    thought, before, made, behind = parts_of([whole[1]])
    assert (thought["text"], thought["thought"]) == ("Hm.", True)
    assert (before["text"], behind["text"]) == ("one tw", "o\u2028")
    assert made["functionCall"] == {"id": "call_0_0", "name": "add", "args": {"a": 2}}
    assert (whole[1]["responseId"], whole[1]["modelVersion"]) == ("turn_0", "policy")
    assert whole[1]["usageMetadata"]["totalTokenCount"] == 10
    parts = parts_of(stream[1])
    assert "".join(one.get("text", "") for one in parts if not one.get("thought")) == "one two\u2028"
    assert "".join(one["text"] for one in parts if one.get("thought")) == "Hm."
    assert [one["functionCall"]["name"] for one in parts if "functionCall" in one] == ["add"]
    assert [one["candidates"][0].get("finishReason") for one in stream[1]][-2:] == [None, "STOP"]
    ask = turns.asks[0]
    assert [one["content"] for one in ask.messages] == ["Be brief.", "x"]
    assert (ask.max_tokens, ask.stop, ask.seed) == (9, ("END",), 7)
    assert ask.tools[0]["function"]["parameters"] == {"type": "object", "properties": {"a": {"type": "number"}}}


@pytest.mark.parametrize("way", ["by_hand", "chat", "chat_stream"])
async def test_what_the_package_sends_back_is_what_it_was_given(way: str):
    turn = [
        Scripted("Let me see.", (call("add", {"a": 2}), call("add", {"a": 3.5})), pieces=texts(["Let", " me"])),
        Scripted(calls=(call("add", {"a": 4}),)),
        Scripted("Done.", reasoning="Hm.", pieces=texts(["Hm."], reasoning=True) + texts(["Done."])),
        Scripted("Yes."),
    ]
    turns = FakeTurns(turn)
    async with serving(turns) as gateway:
        ((kind, said),) = await run(gateway.url, way)
    told = {"by_hand": "Done.", "chat": ["Done.", "Yes."], "chat_stream": ["Let me see.Done.", "Yes."]}
    assert (kind, said) == ("ok", told[way])
    last = turns.asks[-1].messages
    assert [one["role"] for one in last][:6] == ["user", "assistant", "tool", "tool", "assistant", "tool"]
    results = [str(one["content"]).removesuffix(".0") for one in last if one["role"] == "tool"]
    assert results == ["result of 2", "result of 3.5", "result of 4"]
    assert last[1]["content"] == "Let me see."
    if way != "by_hand":
        assert [(one["role"], one.get("content")) for one in last[6:]] == [("assistant", "Done."), ("user", "y")]
    for before, after in zip(turns.asks, turns.asks[1:], strict=False):
        assert after.messages[: len(before.messages)] == before.messages


async def test_errors_are_those_of_the_package():
    kinds = (RefusalKind.OVER_BUDGET, RefusalKind.ENDED, RefusalKind.TOO_LONG, RefusalKind.AWAY)
    away, over = Refusal(RefusalKind.AWAY, "not now"), Refusal(RefusalKind.ENDED, "it is over")
    script = [Refusal(kind, f"because {kind}") for kind in kinds]
    turns = FakeTurns([*script, Scripted(pieces=texts(["Well"]), refusal=over), away, Scripted("x")])
    async with serving(turns) as gateway:
        ways = ("whole", "stream", "whole", "whole", "stream", "retried", "wrong_key", "candidates")
        seen = await run(gateway.url, *ways, "count", "models", "model")
    assert [one[:3] for one in seen[:5]] == [
        ["ClientError", 400, "FAILED_PRECONDITION"],
        ["ClientError", 409, "ABORTED"],
        ["ClientError", 400, "INVALID_ARGUMENT"],
        ["ServerError", 503, "UNAVAILABLE"],
        ["ClientError", 409, "ABORTED"],
    ]
    assert [one[3] for one in seen[:2]] == ["because over_budget", "because ended"]
    assert (seen[4][3], seen[5][0]) == ("it is over", "ok")
    assert [one[:3] for one in seen[6:8]] == [
        ["ClientError", 401, "UNAUTHENTICATED"],
        ["ClientError", 400, "INVALID_ARGUMENT"],
    ]
    assert seen[8:] == [["ok", 10], ["ok", ["models/policy", "models/base"]], ["ok", "models/base"]]


async def test_a_held_stream_is_read_to_its_end():
    gate = asyncio.Event()
    turns = FakeTurns([Scripted("one two", pieces=texts(["one"]), gate=gate)])
    async with serving(turns, Pace(commit_after_s=0.0, alive_every_s=0.02)) as gateway:
        playing = asyncio.create_task(run(gateway.url, "stream"))
        async with asyncio.timeout(HANG_S):
            while not turns.answerings or turns.answerings[0].num_taken == 0:
                await asyncio.sleep(0.05)
        gate.set()
        ((kind, chunks),) = await playing
    assert (kind, "".join(one["text"] for one in parts_of(chunks))) == ("ok", "one two")
