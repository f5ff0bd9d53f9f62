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

from gspo_core.chat import ChatCodec, HermesCodec, LlamaCalls, Tokenizer, load_codec, load_tokenizer
from gspo_core.chat.turns import TurnReader
from gspo_core.messages import CallStatus
from tests.core.chat_kit import GLM, GLM_FORMAT, LLAMA, TOOLS, call, conversation, write_template, write_tokenizer
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


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ChatCodec, Renderer]]:
    folder = write_tokenizer(tmp_path_factory.mktemp("glm"), GLM, added=GLM_FORMAT)
    write_template(folder, (package("trl") / "trl" / "chat_templates" / "glm4moe.jinja").read_text())
    renderer = Renderer(folder / "tokenizer.json", "glm-4.5")
    yield load_codec(folder), renderer
    renderer.close()


@pytest.mark.parametrize("end", ["<|observation|>", "<|user|>"])
def test_bridges_behind_random_words_of_glm_are_theirs(glm: tuple[ChatCodec, Renderer], end: str) -> None:
    """Also where it samples what opens another message than the one that comes."""
    codec, theirs = glm
    generator = random.Random(6)
    ordinary = [token for token in range(codec.tokenizer.vocab_size) if codec.tokenizer.decode([token]).isalpha()]
    history = [{"role": "user", "content": "go"}]
    (stop,) = codec.tokenizer.encode_whole(end)
    for _ in range(50):
        prefix = codec.render(history, TOOLS)  # type: ignore[arg-type]
        words = codec.tokenizer.encode_whole("\n<think>Hm.</think>\n")
        called = codec.tokenizer.encode_whole("\n<tool_call>stop\n</tool_call>")
        sampled = [*words, *generator.choices(ordinary, k=generator.randint(1, 40)), *called, stop]
        results = [{"role": "tool", "content": "2"}, {"role": "tool", "content": "ü"}]
        bridge = codec.bridge(prefix, sampled, results, history=history, tools=TOOLS)  # type: ignore[arg-type]
        assert isinstance(bridge, list), bridge
        assert [*prefix, *sampled, *bridge] == theirs.ask("bridge", prefix=prefix, sampled=sampled, messages=results)


GLM_BODIES = (
    *("add", "fly", " and ", "\n", "<arg_key>x</arg_key>", "<arg_key>", "<arg_value>2</arg_value>", "<arg_value>"),
    *("<arg_key>text</arg_key>\n<arg_value>a b</arg_value>\n", "add\n<arg_key>x</arg_key>\n<arg_value>2</arg_value>\n"),
)


def test_calls_of_glm_are_read_as_they_read_them(glm: tuple[ChatCodec, Renderer]) -> None:
    codec, theirs = glm
    generator = random.Random(7)
    num_ok = 0
    for _ in range(800):
        bodies = ["".join(generator.choices(GLM_BODIES, k=generator.randint(0, 3))) for _ in range(2)]
        text = "\n<think></think>\nHello." + "".join(f"\n<tool_call>{body}</tool_call>" for body in bodies)
        sampled = [*codec.tokenizer.encode_whole(text), codec.stop_ids[0]]
        ours, given = codec.parse(sampled, TOOLS), theirs.ask("parse", sampled=sampled)
        # They also read some bodies as calls that have words between or behind the arguments.
        readable = [place for place, one in enumerate(ours.calls) if one.status is CallStatus.OK]
        found = [[ours.calls[place].name, ours.calls[place].arguments] for place in readable]
        assert found == [[given["calls"][place][1], given["calls"][place][2] or {}] for place in readable], text
        num_ok += len(found)
    assert num_ok > 50


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
