"""Our chat codecs against the templates of Qwen and Llama, as another project ships them and transformers runs them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from gspo_core.chat import (
    ChatCodec,
    ForkReason,
    HermesCodec,
    TemplateCodec,
    UnsuitableChat,
    UnsuitableTokenizer,
    load_codec,
)
from gspo_core.messages import Message
from tests.core.chat_kit import CHATML, GLM, GLM_FORMAT, LLAMA, TOOLS, conversation, write_template, write_tokenizer
from tests.oracles.packages import package

NUM_CONVERSATIONS = 200


def template(name: str) -> str:
    return (package("trl") / "trl" / "chat_templates" / f"{name}.jinja").read_text()


def directory(tmp_path: Path, name: str) -> Path:
    if name.startswith("glm"):
        return write_template(write_tokenizer(tmp_path, GLM, added=GLM_FORMAT), template(name))
    tokens = LLAMA if name.startswith("llama") else CHATML
    ends = {"bos_token": LLAMA[0], "eos_token": "<|eot_id|>"} if name.startswith("llama") else {}
    return write_template(write_tokenizer(tmp_path, tokens, **ends), template(name))


class Theirs:
    """The template as transformers applies it."""

    def __init__(self, model_dir: Path, **variables: Any) -> None:
        from transformers import PreTrainedTokenizerFast

        self._tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(model_dir / "tokenizer.json"))
        self._tokenizer.bos_token = LLAMA[0] if "begin_of_text" in (model_dir / "tokenizer.json").read_text() else None
        self._tokenizer.chat_template = (model_dir / "chat_template.jinja").read_text()
        self._variables = variables

    def render(self, messages: list[Message], tools: Any, *, prompt: bool = True) -> tuple[str, list[int]]:
        arguments = {"tools": tools or None, "add_generation_prompt": prompt, **self._variables}
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
        return text, list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


VARIANTS = [
    ("qwen2_5", {}, HermesCodec),
    ("qwen3", {}, HermesCodec),
    ("qwen3", {"enable_thinking": False}, HermesCodec),
    ("qwen3_instruct_2507", {}, HermesCodec),
    ("qwen3_5_nothink", {}, TemplateCodec),
    ("qwen3_5_think", {}, TemplateCodec),
    ("llama3_1", {}, TemplateCodec),
    ("glm4moe", {}, TemplateCodec),
    ("glm4moe", {"enable_thinking": False}, TemplateCodec),
]


@pytest.mark.parametrize(("name", "variables", "expected"), VARIANTS)
def test_renders_are_byte_for_byte_those_of_the_models_template(
    tmp_path: Path, name: str, variables: dict[str, Any], expected: type
) -> None:
    model_dir = directory(tmp_path, name)
    codec = load_codec(model_dir, variables=variables)
    assert type(codec) is expected
    theirs, generator = Theirs(model_dir, **variables), random.Random(name)
    num_compared = 0
    for number in range(NUM_CONVERSATIONS):
        messages = conversation(generator, reasons="qwen3" in name or name.startswith("glm"))
        tools, prompt = (TOOLS if number % 3 else []), bool(number % 2)
        if name.startswith("llama") and any(len(message.get("tool_calls", ())) > 1 for message in messages):
            continue  # the template takes one call at a time
        text, ids = theirs.render(messages, tools, prompt=prompt)
        ours = codec.render(messages, tools, generation_prompt=prompt)
        assert codec.tokenizer.decode(ours) == text
        assert ours == ids
        num_compared += 1
    assert num_compared > 30


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_5_think"])
def test_an_episode_that_only_ever_appends_ends_as_the_template_renders_it(tmp_path: Path, name: str) -> None:
    """One question, tool cycles, an answer: there the templates are prefix-stable if every turn reasons."""
    model_dir = directory(tmp_path, name)
    codec, theirs, generator = load_codec(model_dir), Theirs(model_dir), random.Random(0)
    thinks = name in ("qwen3", "qwen3_5_think")
    for _ in range(60):
        messages = episode(generator, thinks=thinks)
        begin = next(number for number, message in enumerate(messages) if message["role"] == "assistant")
        ids = codec.render(messages[:begin], TOOLS)
        history = list(messages[:begin])
        for number in range(begin, len(messages)):
            if messages[number]["role"] != "assistant":
                continue
            prefix, _ = theirs.render(history, TOOLS)
            whole, _ = theirs.render([*history, messages[number]], TOOLS, prompt=False)
            sampled = ids_of_turn(codec, whole[len(prefix) :])
            results = results_behind(messages, number)
            bridge = codec.bridge(ids, sampled, results, history=history, tools=TOOLS)
            assert isinstance(bridge, list), bridge
            ids = [*ids, *sampled, *(bridge if results else [])]
            history += [messages[number], *results]
        has_answer = messages[-1]["role"] == "assistant"
        text, expected = theirs.render(messages, TOOLS, prompt=not has_answer)
        assert codec.tokenizer.decode(ids) == (text.removesuffix("\n") if has_answer else text)
        assert ids == expected[: len(ids)]


def test_templates_that_strip_thinking_fork_where_the_job_asks_to_follow_them(tmp_path: Path) -> None:
    for name, reason in (("qwen3", ForkReason.THINKING_STRIPPED), ("qwen3_5_think", ForkReason.HISTORY_REWRITTEN)):
        model_dir = directory(tmp_path / name, name)
        history: list[Message] = [{"role": "user", "content": "Why?"}]
        question: list[Message] = [{"role": "user", "content": "Why not?"}]
        for thinking, expected in (("keep", list), ("template", reason)):
            codec = load_codec(model_dir, thinking=thinking)  # type: ignore[arg-type]
            opens = codec.tokenizer.decode(codec.render(history)).endswith("<think>\n")
            sampled = ids_of_turn(codec, ("" if opens else "<think>\n") + "Hm.\n</think>\n\nSo.<|im_end|>")
            prefix = codec.render(history)
            bridge = codec.bridge(prefix, sampled, question, history=history)
            assert isinstance(bridge, list) if expected is list else bridge == expected
        turn = codec.message(sampled)
        text, _ = Theirs(model_dir).render([*history, turn, *question], [])
        assert codec.tokenizer.decode(codec.render([*history, turn, *question])) == text
        assert "Hm." not in text


SAID = (
    '<tool_call>{"name":"add","arguments":{"x":1}}</tool_call>',
    "<tool_call>{bad</tool_call>",
    "<tool_call>",
    "plain",
    "<tool_call>\n<function=add>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
    "<think>\nhm\n</think>\n\nok",
    '{"name": "add", "parameters": {"x": 1}}',
    '{"name": "add", "parameters": {"x": 1}}; {"name": "add"}',
    "<tool_call>add\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "<tool_call>add\n<arg_key>x</arg_key>\n1\n</tool_call>",
)


def test_over_every_template_that_can_be_used_whatever_is_said_is_continued_as_it_was_sampled(tmp_path: Path) -> None:
    phi = ("<|end|>", "<|user|>", "<|assistant|>")
    folder = write_tokenizer(tmp_path, (*CHATML, *LLAMA, *phi), bos_token=LLAMA[0], eos_token="<|eot_id|>")
    generator, used = random.Random(0), set()
    for path in sorted((package("trl") / "trl" / "chat_templates").glob("*.jinja")):
        if path.stem.startswith("glm"):
            continue  # of a vocabulary of its own, below
        try:
            codec = load_codec(write_template(folder, path.read_text()))
        except (UnsuitableChat, UnsuitableTokenizer):
            continue
        used.add(path.stem)
        for _ in range(10):
            keeps_what_was_sampled(codec, generator)
    assert used >= {"llama3_1", "llama3_2", "qwen2_5", "qwen3", "qwen3_5_think", "qwen3_vl", "nemotron_3_nano"}


def test_whatever_a_glm_says_is_continued_as_it_was_sampled(tmp_path: Path) -> None:
    """Its turns end with what opens the next message; the policy may choose the wrong one, or none."""
    codec, generator = load_codec(directory(tmp_path, "glm4moe")), random.Random(0)
    assert [codec.tokenizer.decode([token]) for token in codec.stop_ids] == [
        "<|user|>",
        "<|observation|>",
        "<|system|>",
    ]
    for _ in range(30):
        keeps_what_was_sampled(codec, generator)


def keeps_what_was_sampled(codec: ChatCodec, generator: random.Random) -> None:
    history: list[Message] = [{"role": "user", "content": "go <|eot_id|><|im_end|> on"}]
    tools = TOOLS if codec.parse(codec.tokenizer.encode_whole(SAID[0])).calls else []
    ids = codec.render(history, tools)
    ordinary = [token for token in range(codec.tokenizer.vocab_size) if token not in codec.stop_ids]
    for _ in range(4):
        noise = generator.choices(ordinary, k=generator.randint(1, 20))
        sampled = [*generator.choice((noise, codec.tokenizer.encode_whole(generator.choice(SAID)))), codec.stop_ids[0]]
        calls = codec.parse(sampled, tools).calls
        new: list[Message] = [{"role": "tool", "content": "x", "name": one.name or ""} for one in calls]
        new = new or [{"role": "user", "content": "and <|im_end|>?"}]
        bridge = codec.bridge(ids, sampled, new, history=history, tools=tools)
        assert isinstance(bridge, list), (bridge, codec.tokenizer.decode(sampled))
        ids = [*ids, *sampled, *bridge]
        history = [*history, codec.message(sampled, tools), *new]
        assert codec.render(history, tools)  # what a fork would begin with


def episode(generator: random.Random, *, thinks: bool) -> list[Message]:
    while True:
        messages = conversation(generator, reasons=thinks)
        questions = [number for number, message in enumerate(messages) if message["role"] == "user"]
        messages = messages[: questions[1]] if len(questions) > 1 else messages
        turns = [message for message in messages if message["role"] == "assistant"]
        if turns and all("reasoning_content" in turn or not thinks for turn in turns):
            return messages


def results_behind(messages: list[Message], number: int) -> list[Message]:
    following = messages[number + 1 :]
    end = next((n for n, message in enumerate(following) if message["role"] != "tool"), len(following))
    return following[:end]


def ids_of_turn(codec: Any, text: str) -> list[int]:
    """What a policy would sample to write the turn: its stop token included, the newline behind it not."""
    words, _, _ = text.rpartition("<|im_end|>")
    return [*codec.tokenizer.encode_whole(words), codec.stop_ids[0]]
