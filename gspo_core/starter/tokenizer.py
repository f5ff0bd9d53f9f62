"""The tokenizer of a tiny model: byte-level BPE, trained on rendered demonstrations, with the tokens of Qwen3.

Rule: ``gspo_core.chat`` and the chat template written here give the same ids for the same conversation, so that any
program which applies the template (an inference server, an evaluation tool) speaks to the model as the codec does.
A token may span words, so that the tools block, the same in every episode, costs few tokens; every digit is its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gspo_core.chat import TOOLS_FOOTER, TOOLS_HEADER, HermesCodec, Message, ToolSchema

MAX_VOCAB_SIZE = 640
# Long enough that a prompt is short; short enough that a call still takes several decisions.
MAX_TOKEN_CHARS = 20
# Anything up to a digit or the end of the line.
WORDS = r"[^\d\n]*\n+|[^\d\n]+"

_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_FORMAT_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

_CHAT_TEMPLATE = """\
{%- set turns = messages -%}
{%- if tools -%}
    {{- '<|im_start|>system\\n' -}}
    {%- if messages and messages[0].role == 'system' -%}
        {{- messages[0].content + '\\n\\n' -}}
        {%- set turns = messages[1:] -%}
    {%- endif -%}
    {{- HEADER -}}
    {%- for tool in tools -%}
        {{- '\\n' + (tool | tojson) -}}
    {%- endfor -%}
    {{- FOOTER + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in turns -%}
    {%- if message.role == 'tool' -%}
        {%- if loop.first or loop.previtem.role != 'tool' -%}
            {{- '<|im_start|>user' -}}
        {%- endif -%}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
        {%- if loop.last or loop.nextitem.role != 'tool' -%}
            {{- '<|im_end|>\\n' -}}
        {%- endif -%}
    {%- else -%}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') -}}
        {%- for call in message.tool_calls or [] -%}
            {%- set call = call.function or call -%}
            {%- if message.content or not loop.first -%}
                {{- '\\n' -}}
            {%- endif -%}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' -}}
            {{- call.arguments if call.arguments is string else (call.arguments | tojson) -}}
            {{- '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


_FIRST_CONTROL_ID = 0x110000  # beyond every character


def chat_template() -> str:
    """The format of ``HermesCodec`` without think blocks, as a Jinja template."""
    return _CHAT_TEMPLATE.replace("HEADER", json.dumps(TOOLS_HEADER)).replace("FOOTER", json.dumps(TOOLS_FOOTER))


def write_tokenizer(
    directory: Path,
    conversations: Iterable[Sequence[Message]],
    tools: Sequence[ToolSchema],
    *,
    words: str = WORDS,
    max_vocab_size: int = MAX_VOCAB_SIZE,
    context_tokens: int = 1024,
) -> None:
    """Train on ``conversations`` and write ``tokenizer.json``, its configuration and the chat template.

    ``words`` is the pattern of what, beside digits, may become one token.
    """
    codec = HermesCodec(_Characters())
    rendered = (codec.render(messages, tools, generation_prompt=False) for messages in conversations)
    backend = _train((codec.tokenizer.decode(ids) for ids in rendered), words, max_vocab_size)
    backend.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_tokens,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "chat_template.jinja").write_text(chat_template())


def _train(texts: Iterable[str], words: str, max_vocab_size: int) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    control = [*_SPECIAL_TOKENS, *_FORMAT_TOKENS]
    between = re.compile("|".join(map(re.escape, control)))
    backend = Tokenizer(models.BPE())
    # A digit is alone.
    pieces = pre_tokenizers.Split(Regex(rf"\d|{words}"), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pieces, to_bytes])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=max_vocab_size - len(control),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=MAX_TOKEN_CHARS,
        show_progress=False,
    )
    backend.train_from_iterator((part for text in texts for part in between.split(text) if part), trainer)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in _SPECIAL_TOKENS])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in _FORMAT_TOKENS])
    return backend


class _Characters:
    """One id per character and per control token: what the codec writes before there is a tokenizer."""

    control_tokens = (*_SPECIAL_TOKENS, *_FORMAT_TOKENS)
    vocab_size = _FIRST_CONTROL_ID + len(_SPECIAL_TOKENS) + len(_FORMAT_TOKENS)

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def encode_whole(self, text: str) -> list[int]:
        parts = re.split(f"({'|'.join(map(re.escape, self.control_tokens))})", text)
        control = [self.token_id(part) for part in parts]
        pairs = zip(parts, control, strict=True)
        return [i for part, found in pairs for i in (self.encode(part) if found is None else [found])]

    def decode(self, ids: Sequence[int]) -> str:
        first, control = _FIRST_CONTROL_ID, self.control_tokens
        return "".join(control[i - first] if i >= first else chr(i) for i in ids)

    def token_id(self, token: str) -> int | None:
        return _FIRST_CONTROL_ID + self.control_tokens.index(token) if token in self.control_tokens else None
