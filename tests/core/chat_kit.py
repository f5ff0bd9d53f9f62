"""What tests of chat codecs share: a byte-level BPE of 2,048 tokens with control tokens, and random conversations."""

from __future__ import annotations

import argparse
import inspect
import json
import random
import textwrap
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from gspo_core.messages import Message, ToolSchema

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
)
GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
GLM_FORMAT = (
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
FORMAT = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
VOCAB_SIZE = 2048

TOOLS: list[ToolSchema] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add «numbers» <b>now</b>",
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "integer"}, "text": {"type": "string"}, "flags": {"type": "array"}},
                "required": ["x"],
            },
        },
    },
    {"type": "function", "function": {"name": "stop", "description": "", "parameters": {}}},
]


def write_tokenizer(
    directory: Path, special: tuple[str, ...] = CHATML, *, added: tuple[str, ...] = FORMAT, **config: Any
) -> Path:
    """2,048 ids in all, trained on Python source and the words of the formats; the same in every run."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(special) - len(added),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    corpus = [inspect.getsource(module) for module in (argparse, textwrap)]
    backend.train_from_iterator([*corpus, json.dumps(TOOLS), "user assistant system tool_response result"], trainer)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in added])
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def write_template(directory: Path, template: str) -> Path:
    (directory / "chat_template.jinja").write_text(template)
    return directory


TEXTS = ("Why?", "Sum them: 2, 3.", "Grüße, 世界 🦊", "a\n\nb", " two  spaces ", '{"x": 1}', "def f(x):\n    return x")


def conversation(generator: random.Random, *, reasons: bool = False) -> list[Message]:
    """Questions, answers and tool cycles in an order that can happen; ends anywhere but in the middle of a cycle."""
    messages: list[Message] = []
    if generator.random() < 0.5:
        messages.append({"role": "system", "content": generator.choice(TEXTS)})
    for _ in range(generator.randint(1, 3)):
        messages.append({"role": "user", "content": generator.choice(TEXTS)})
        for _ in range(generator.randint(0, 3)):
            calls = [call(generator) for _ in range(generator.randint(1, 2))]
            messages.append(assistant(generator, calls, reasons=reasons))
            messages += [{"role": "tool", "content": generator.choice(TEXTS)} for _ in calls]
        if generator.random() < 0.8:
            messages.append(assistant(generator, [], reasons=reasons))
    return messages


def assistant(generator: random.Random, calls: list[Any], *, reasons: bool) -> Message:
    message: dict[str, Any] = {"role": "assistant", "content": generator.choice(TEXTS) if not calls else ""}
    if calls:
        message |= {"content": generator.choice(("", "I add.")), "tool_calls": calls}
    if reasons and generator.random() < 0.6:
        message["reasoning_content"] = generator.choice(("Hm.", "First this,\nthen that.", "Ä ö"))
    return message


def call(generator: random.Random) -> dict[str, Any]:
    arguments = {"x": generator.randint(0, 99), "text": generator.choice(TEXTS), "flags": [True, None, 1.5]}
    return {"type": "function", "function": {"name": generator.choice(("add", "stop")), "arguments": arguments}}
