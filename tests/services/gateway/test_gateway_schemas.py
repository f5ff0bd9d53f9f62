"""Everything that is answered, held to the types of the packages of those whose dialects it is: `make test-agents`."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from services.gateway.dialects.turns import Refusal, RefusalKind
from tests.services.gateway.fake_turns import KEY, FakeTurns, Scripted, call, serving
from tests.services.gateway.speakers import SPEAKERS, events
from tests.services.gateway.test_gateway_dialects import ADD, CASES, USER

SCRIPT = Path(__file__).with_name("sdks") / "schemas.py"
PYTHONS = Path(os.environ.get("GSPO_TEST_AGENTS", Path(__file__).parents[3] / ".make" / "agents"))
PACKAGES = {"chat": "openai", "responses": "openai", "messages": "anthropic", "gemini": "google-genai"}
pytestmark = [
    pytest.mark.third_party,
    pytest.mark.skipif(
        not all((PYTHONS / package / "bin" / "python").exists() for package in PACKAGES.values()),
        reason="the packages are not installed: make test-agents",
    ),
]
OURS = {"policy_version", "reasoning_content", "stop_reason"}
"""Which no package knows: versions, and what OpenAI's chat has no place for."""
UNTYPED = {"store", "frequency_penalty", "presence_penalty", "name"}
"""What OpenAI's own answers say too, and the types of its package do not; ``name`` is that of a call."""
BEARER = {"Authorization": f"Bearer {KEY}"}
COUNTS = {"messages": "/v1/messages/count_tokens", "gemini": "/v1beta/models/policy:countTokens"}


async def looked_at(package: str, answers: list[tuple[str, Any]]) -> list[tuple[str, list[str]]]:
    done = await asyncio.to_thread(
        subprocess.run,
        [PYTHONS / package / "bin" / "python", "-I", SCRIPT, package],
        input=json.dumps(answers),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[tuple[str, list[str]]] = json.loads(done.stdout)
    assert len(found) == len(answers)
    return found


async def assert_known(package: str, answers: list[tuple[str, Any]]) -> None:
    if package == "google-genai":  # whose types allow for no other names
        answers = [(kind, {name: answer[name] for name in answer if name not in OURS}) for kind, answer in answers]
    found = await looked_at(package, answers)
    for (kind, answer), (wrong, more) in zip(answers, found, strict=True):
        assert not wrong, (kind, answer, wrong)
        assert set(more) <= OURS | UNTYPED, (kind, answer, more)


@pytest.mark.parametrize("dialect", PACKAGES)
async def test_answers_and_each_event_of_streams_are_what_the_package_knows(dialect: str):
    speaker = SPEAKERS[dialect]
    objects = [case for case in CASES if all(isinstance(one.arguments, dict) for one in case.scripted.calls)]
    cases = [case for case in objects if speaker.has_stop or not case.stop]
    answers: list[tuple[str, Any]] = []
    async with serving(FakeTurns([case.scripted for case in cases for _ in range(2)])) as gateway:
        for case in cases:
            body = case.sent(speaker, speaker.body(case.messages, case.tools, case.max_tokens, case.stop, case.choice))
            whole = await gateway.http.post(speaker.url(body), json=body, headers=speaker.headers)
            answers.append((dialect, whole.json()))
            streamed = {**body, "stream": True}
            if dialect == "chat":
                streamed["stream_options"] = {"include_usage": True}
            stream = await gateway.http.post(speaker.url(streamed), json=streamed, headers=speaker.headers)
            answers += [(f"{dialect} event", event) for _, event in events(stream.text)]
    assert len(answers) >= 2 * len(cases)
    await assert_known(PACKAGES[dialect], answers)


async def test_models_and_counts_are_what_the_packages_know():
    anthropic, google = {**BEARER, "anthropic-version": "2023-06-01"}, {"x-goog-api-key": KEY}
    named = {"chat": BEARER, "messages": anthropic, "gemini": google}
    async with serving(FakeTurns([])) as gateway:
        for dialect, headers in named.items():
            prefix = "/v1beta/models" if dialect == "gemini" else "/v1/models"
            page = (await gateway.http.get(prefix, headers=headers)).json()
            listed = page["models" if dialect == "gemini" else "data"]
            assert listed
            one = (await gateway.http.get(f"{prefix}/policy", headers=headers)).json()
            for given in (*listed, one):
                given.pop("supportedGenerationMethods", None)  # under another name in Google's package
                await assert_known(PACKAGES[dialect], [("model", given)])
        for dialect, path in COUNTS.items():
            speaker = SPEAKERS[dialect]
            body = speaker.body([USER], [ADD])
            if dialect == "gemini":
                body = {"contents": body["contents"]}
            body.pop("max_tokens", None)
            count = await gateway.http.post(path, json=body, headers=speaker.headers)
            assert count.status_code == 200, count.text
            await assert_known(PACKAGES[dialect], [("count", count.json())])


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
async def test_errors_are_what_the_packages_know(dialect: str):
    """Google's package reads them without a type of their own."""
    speaker = SPEAKERS[dialect]
    refusals = [Scripted(refusal=Refusal(kind, "why", param="messages")) for kind in RefusalKind]
    answers: list[tuple[str, Any]] = []
    async with serving(FakeTurns(refusals)) as gateway:
        for _ in refusals:
            body = speaker.body([USER])
            told = await gateway.http.post(speaker.url(body), json=body, headers=speaker.headers)
            assert 400 <= told.status_code != 500
            answers.append(("error", told.json() if dialect == "messages" else told.json()["error"]))
    await assert_known(PACKAGES[dialect], answers)


async def test_what_is_wrong_is_found():
    """Of the checker: a type, a name that is missing, one that is unknown, a value that is none of those."""
    speaker = SPEAKERS["chat"]
    async with serving(FakeTurns([Scripted("5", (call("add", {"a": 2}),))])) as gateway:
        body = speaker.body([USER], [ADD])
        right = (await gateway.http.post(speaker.url(body), json=body, headers=speaker.headers)).json()
    spoilt = [{**right, "created": "now"}, {**right, "object": "chat"}, {**right, "odd": 1}, {**right}]
    del spoilt[-1]["id"]
    found = await looked_at("openai", [("chat", one) for one in [right, *spoilt]])
    assert [bool(wrong) for wrong, _ in found] == [False, True, True, False, True]
    assert "odd" in found[3][1]
