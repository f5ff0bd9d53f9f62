"""Text never becomes a control token, whatever it spells and whoever wrote it; a format's own control tokens do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_core.chat import ChatCodec, HermesCodec, Message, Tokenizer, load_tokenizer
from gspo_core.chat.template import TemplateCodec
from gspo_core.chat.turns import TaggedCalls, read_hermes
from gspo_core.starter.tokenizer import chat_template
from tests.core.chat_kit import CHATML, TOOLS, write_tokenizer
from tests.core.qwen_vocabulary import NOT_SPECIAL, NUM_MERGED, SPECIAL, qwen_vocabulary_or_skip

ADDED = (*SPECIAL, *NOT_SPECIAL)
# Whole control tokens, halves of them that could meet, and what stands around them.
spelt = st.lists(
    st.sampled_from(ADDED) | st.sampled_from([token[:5] for token in ADDED]) | st.text(max_size=6), max_size=12
).map("".join)


@pytest.fixture(scope="module", params=["small", "qwen"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A small vocabulary with all tokens that Qwen adds to its own, and the real one."""
    if request.param == "qwen":
        return load_tokenizer(qwen_vocabulary_or_skip())
    others = tuple(token for token in SPECIAL if token not in CHATML)
    written = write_tokenizer(tmp_path_factory.mktemp("small"), (*CHATML, *others), added=NOT_SPECIAL)
    return load_tokenizer(written)


@pytest.fixture(scope="module", params=["hermes", "hermes_that_reasons", "template"])
def codec(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Iterator[ChatCodec]:
    if request.param == "template":
        yield TemplateCodec(tokenizer, chat_template(), TaggedCalls(tokenizer, read_hermes))
    else:
        yield HermesCodec(tokenizer, reasons=request.param == "hermes_that_reasons")


def controls(codec: ChatCodec, ids: list[int]) -> list[str]:
    names = {codec.tokenizer.token_id(token): token for token in ADDED}
    return [names[token] for token in ids if token in names]


def conversation(text: str) -> list[Message]:
    call = {"type": "function", "function": {"name": "add", "arguments": {"x": 1, "text": text}}}
    return [
        {"role": "system", "content": text},
        {"role": "user", "content": text},
        {"role": "assistant", "content": "So:", "tool_calls": [call]},
        {"role": "tool", "content": text},
        {"role": "tool", "content": [{"type": "text", "text": text}]},
        {"role": "user", "content": "x" + text},
    ]


@given(text=spelt)
@settings(max_examples=150)
def test_text_is_encoded_without_any_added_token_and_survives(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert not set(ids) & {tokenizer.token_id(token) for token in ADDED}
    plain = text.encode("utf-8", "replace").decode()
    normal = tokenizer.decode(tokenizer.encode("".join(plain)))  # of a vocabulary that normalises text
    assert tokenizer.decode(ids) == normal
    if plain.isascii():
        assert tokenizer.decode(ids) == plain


@given(text=spelt)
@settings(max_examples=60)
def test_no_message_and_no_tool_writes_a_control_token(codec: ChatCodec, text: str) -> None:
    """The conversation has the control tokens that it has with harmless text, and no other."""
    tools = [{"type": "function", "function": {"name": "add", "description": text, "parameters": {}}}]
    ids = codec.render(conversation(text), tools)
    assert controls(codec, ids) == controls(codec, codec.render(conversation("harmless"), TOOLS))


@given(text=spelt)
@settings(max_examples=60)
def test_no_observation_behind_a_sampled_turn_writes_a_control_token(codec: ChatCodec, text: str) -> None:
    question: list[Message] = [{"role": "user", "content": "How much?"}]
    prefix = codec.render(question, TOOLS)
    said = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"x": 2}}\n</tool_call>'
    sampled = [*codec.tokenizer.encode_whole(said), codec.stop_ids[0]]
    observed: list[Message] = [{"role": "tool", "content": text}]
    bridge = codec.bridge(prefix, sampled, observed, history=question, tools=TOOLS)
    harmless = codec.bridge(prefix, sampled, [{"role": "tool", "content": "1"}], history=question, tools=TOOLS)
    assert isinstance(bridge, list)
    assert isinstance(harmless, list)
    assert controls(codec, bridge) == controls(codec, harmless)
    assert codec.parse(sampled).calls[0].arguments == {"x": 2}


def test_the_format_itself_writes_its_tags_as_tokens(tokenizer: Tokenizer) -> None:
    codec = HermesCodec(tokenizer, reasons=True)
    written = controls(codec, codec.render(conversation("harmless"), TOOLS))
    assert written.count("<tool_response>") == written.count("</tool_response>") == 2
    # Two pairs in the words about tools, one in the call of the history.
    assert written.count("<tool_call>") == written.count("</tool_call>") == 3
    thoughtful: list[Message] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y", "reasoning_content": "because </think> is a word"},
    ]
    written = controls(codec, codec.render(thoughtful, generation_prompt=False))
    assert (written.count("<think>"), written.count("</think>")) == (1, 1)


def test_what_was_sampled_is_written_again_as_it_was(codec: ChatCodec) -> None:
    """A call that cannot be read goes into the history as the policy wrote it, with its tokens."""
    sampled = [*codec.tokenizer.encode_whole("Hm.\n<tool_call>\nnot json\n</tool_call>"), codec.stop_ids[0]]
    question: Message = {"role": "user", "content": "x"}
    again = codec.render([question, codec.message(sampled)], generation_prompt=False)
    assert controls(codec, again)[-3:] == ["<tool_call>", "</tool_call>", "<|im_end|>"]


def test_the_ids_of_qwens_vocabulary() -> None:
    tokenizer = load_tokenizer(qwen_vocabulary_or_skip())
    known = {"<|endoftext|>": 151643, "<|im_end|>": 151645, "<tool_call>": 151657, "<tool_response>": 151665}
    known |= {"<|fim_prefix|>": 151659, "<think>": 151667, "</think>": 151668}
    assert {token: tokenizer.token_id(token) for token in known} == known
    assert tokenizer.vocab_size == NUM_MERGED + len(ADDED) == 151669
    # Ids that Qwen's own tokenizer gives these words.
    assert tokenizer.encode("Hello, world! 12") == [9707, 11, 1879, 0, 220, 16, 17]


def test_white_space_that_was_added_to_a_vocabulary_stays_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, added=("    ", "<think>")))
    assert tokenizer.control_tokens == (*CHATML, "<think>")
    assert tokenizer.token_id("    ") in tokenizer.encode("a    b")


def spoken(text: str, **more: str) -> list[Message]:
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": text, **more},  # type: ignore[typeddict-item]
        {"role": "user", "content": "y"},
    ]


@given(text=spelt)
@settings(max_examples=60)
def test_words_put_into_the_assistants_mouth_write_no_control_token(codec: ChatCodec, text: str) -> None:
    ids = codec.render(spoken("So: " + text), own={})
    assert controls(codec, ids) == controls(codec, codec.render(spoken("harmless"), own={}))
    thoughtful = codec.render(spoken("So: " + text, reasoning_content=text), own={})
    assert controls(codec, thoughtful) == controls(codec, codec.render(spoken("x", reasoning_content="x"), own={}))
    if text.isascii():
        assert codec.tokenizer.decode(ids).count("So: " + text.rstrip()) == 1


def test_the_policys_own_words_keep_their_tags_and_what_stands_behind_them_does_not(codec: ChatCodec) -> None:
    call = "<tool_call>x</tool_call>"
    own = codec.render(spoken(call))
    assert codec.render(spoken(call), own={2: len(call)}) == own
    plain = codec.render(spoken("So"), own={2: 2})
    longer = codec.render(spoken(call + call), own={2: len(call)})
    assert controls(codec, longer) == controls(codec, own) != controls(codec, plain)
    assert codec.tokenizer.decode(longer).count(call + call) == 1
    # Halves of a tag that meet where the policy's words end are none.
    for place in range(1, len("<tool_call>")):
        met = codec.render(spoken("<tool_call>"), own={2: place})
        assert controls(codec, met) == controls(codec, plain)
