"""Our codecs against the `renderers` package (Prime Intellect) where it covers the model: renders, bridges, parses."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gspo_core.chat import HermesCodec, LlamaCalls, Tokenizer, load_tokenizer
from gspo_core.chat.turns import TurnReader
from gspo_core.messages import CallStatus
from tests.core.chat_kit import LLAMA, TOOLS, call, conversation, write_tokenizer
from tests.oracles.packages import package

PROCESS = Path(__file__).with_name("renderers_process.py")


class Renderer:
    def __init__(self, tokenizer_file: Path, name: str) -> None:
        command = [sys.executable, str(PROCESS), str(package("renderers")), str(tokenizer_file), name]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, do: str, **request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, "tools": TOOLS, **request}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the renderers process ended"
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[HermesCodec, Renderer]]:
    folder = write_tokenizer(tmp_path_factory.mktemp("qwen3"))
    renderer = Renderer(folder / "tokenizer.json", "qwen3")
    yield HermesCodec(load_tokenizer(folder), reasons=True), renderer
    renderer.close()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Tokenizer, Renderer]]:
    folder = write_tokenizer(tmp_path_factory.mktemp("llama"), LLAMA)
    renderer = Renderer(folder / "tokenizer.json", "llama-3")
    yield load_tokenizer(folder), renderer
    renderer.close()


def test_renders_are_theirs(qwen3: tuple[HermesCodec, Renderer]) -> None:
    codec, theirs = qwen3
    generator = random.Random(1)
    for _ in range(200):
        messages = conversation(generator, reasons=True)
        assert codec.render(messages, TOOLS) == theirs.ask("render", messages=messages)


def test_bridges_behind_random_tokens_are_theirs(qwen3: tuple[HermesCodec, Renderer]) -> None:
    codec, theirs = qwen3
    generator = random.Random(2)
    ordinary = [token for token in range(codec.tokenizer.vocab_size) if token not in codec.stop_ids]
    results = [{"role": "tool", "content": "2"}, {"role": "tool", "content": "ü"}]
    for _ in range(100):
        prefix = codec.render([{"role": "user", "content": "go"}], TOOLS)
        sampled = [*generator.choices(ordinary, k=generator.randint(0, 40)), codec.stop_ids[0]]
        bridge = codec.bridge(prefix, sampled, results)
        assert isinstance(bridge, list)
        assert [*prefix, *sampled, *bridge] == theirs.ask("bridge", prefix=prefix, sampled=sampled, messages=results)


FRAGMENTS = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "add", "arguments": {"x": 2}}', " and ", "\n"),
    *("<tool_call>[1]</tool_call>", '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"name": "a"}</tool_call>'),
    *('{"name": "add"}', '{"arguments": {}}', "[1]", "{", '{"name": "fly", "arguments": null}', "Hello.", '"add"'),
)


def test_random_fragments_are_read_as_they_read_them(qwen3: tuple[HermesCodec, Renderer]) -> None:
    codec, theirs = qwen3
    generator = random.Random(3)
    statuses = set()
    for _ in range(1000):
        text = "".join(generator.choices(FRAGMENTS, k=generator.randint(1, 7)))
        sampled = [*codec.tokenizer.encode_whole(text), codec.stop_ids[0]]
        ours, given = codec.parse(sampled), theirs.ask("parse", sampled=sampled)
        # They leave out a second <think> inside the reasoning.
        reasoning = ours.reasoning.replace("<think>", "").strip()
        assert (ours.text, reasoning) == (given["text"], given["reasoning"].strip()), text
        calls = [[str(one.status), one.name, one.arguments or None, [one.start, one.end]] for one in ours.calls]
        assert calls == [[status, name, value or None, span] for status, name, value, span in given["calls"]], text
        statuses |= {one.status for one in ours.calls}
    assert len(statuses) >= 4


def test_calls_of_llama_3_are_read_as_they_read_them(llama: tuple[Tokenizer, Renderer]) -> None:
    tokenizer, theirs = llama
    stop = tokenizer.token_id("<|eot_id|>")
    assert stop is not None
    reader, generator = TurnReader(tokenizer, (stop,), LlamaCalls(tokenizer)), random.Random(4)
    for _ in range(100):
        function = call(generator)["function"]
        text = json.dumps({"name": function["name"], "parameters": function["arguments"]}, ensure_ascii=False)
        sampled = [*tokenizer.encode_whole(generator.choice(("", "\n", " ")) + text), stop]
        (ours,) = reader.read(sampled, TOOLS).calls
        (given,) = theirs.ask("parse", sampled=sampled)["calls"]
        assert [str(ours.status), ours.name, ours.arguments, [ours.start, ours.end]] == given
        assert ours.status is CallStatus.OK
    for text in ("Hello.", '{"x": 1}', "[1]"):
        sampled = [*tokenizer.encode_whole(text), stop]
        assert (reader.read(sampled, TOOLS).calls, theirs.ask("parse", sampled=sampled)["calls"]) == ((), [])
