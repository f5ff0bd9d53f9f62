"""What the engine of a chaos run says: a function that the oracle computes again, as what a world answers is (`chain`).

The rule kept here: everything but the first token of a turn follows from the tokens before it. So whoever has the
tokens of an episode can say of each whether an engine and a world have said it, and in one attempt.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from gspo_core.chat import HermesCodec, load_tokenizer
from gspo_core.chat.hermes import TOOLS_FOOTER, TOOLS_HEADER

VOCABULARY = 512
CONTEXT_TOKENS = 1024
MAX_CALLS = 4
FIRST = "abcdefgh"
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CONTROL = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_SAMPLE = [
    TOOLS_HEADER,
    TOOLS_FOOTER,
    '{"type": "function", "function": {"name": "add", "description": "Add to the sum.", "parameters": {"type":',
    '"object", "properties": {"number": {"type": "integer", "description": "what to add"}}, "required": ["number"]}}}',
    'so so so {"name": "add", "arguments": {"number": 123}} system user assistant done. Add up, task',
]


def write_tokenizer(directory: Path) -> None:
    """Short words for what is always said, so that episodes are short."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(_CONTROL),
        special_tokens=[AddedToken(token, special=True) for token in _SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SAMPLE * 3, trainer)
    tokenizer.add_tokens([AddedToken(token, special=False) for token in _CONTROL])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))


class Talker:
    """Ids -> ids. ``script`` is what an engine continues a prompt with."""

    def __init__(self, model_dir: Path) -> None:
        self.codec = HermesCodec(load_tokenizer(model_dir))
        tokenizer = self.codec.tokenizer
        self._header = self._opening_of_a_turn()
        opening, closing = tokenizer.token_id("<tool_call>"), tokenizer.token_id("</tool_call>")
        assert opening is not None
        assert closing is not None
        self._opening, self._closing = opening, closing
        self._known: dict[tuple[int | None, int], tuple[int, ...]] = {}
        self._firsts = [tokenizer.encode(letter)[0] for letter in FIRST]

    def _opening_of_a_turn(self) -> list[int]:
        ids = self.codec.render([{"role": "user", "content": "x"}])
        start = self.codec.tokenizer.token_id("<|im_start|>")
        assert start is not None
        return ids[len(ids) - 1 - ids[::-1].index(start) :]

    def begins_at(self, ids: Sequence[int]) -> int:
        """Where the turn begins that ``ids`` ends in."""
        header, ids = self._header, list(ids)
        for start in range(len(ids) - len(header), -1, -1):
            if ids[start : start + len(header)] == header:
                return start + len(header)
        raise ValueError("no turn begins in these ids")

    def script(self, ids: list[int]) -> list[int] | None:
        """None, which is any tokens, where nobody talks: an engine that is examined."""
        try:
            begin = self.begins_at(ids)
        except ValueError:
            return None
        said = ids[begin:]
        first = said[0] if said else random.choice(self._firsts)
        turn = self.turn(ids[:begin], first)
        return turn[len(said) :] or [self.codec.stop_ids[0]]

    def turn(self, prompt: Sequence[int], first: int) -> list[int]:
        """The whole turn after ``prompt`` that begins with ``first``."""
        return [first, *self._rest(self._num_calls(prompt), _digest(_bytes(prompt), first))]

    def possible_lengths(self, prompt: Sequence[int]) -> dict[int, int]:
        """Of every turn that may follow, by its first token; all are equally likely."""
        num_calls, read = self._num_calls(prompt), _bytes(prompt)
        return {first: 1 + len(self._rest(num_calls, _digest(read, first))) for first in self._firsts}

    def _num_calls(self, prompt: Sequence[int]) -> int:
        return list(prompt).count(self._closing) - 1  # one is in the instructions

    def _rest(self, num_calls: int, digest: bytes) -> tuple[int, ...]:
        if num_calls >= MAX_CALLS or digest[0] % 5 == 0:
            return self._said(None, 0)
        return self._said(digest[1] % 100, 2 + digest[2] % 12)

    def _said(self, number: int | None, num_fillers: int) -> tuple[int, ...]:
        if (number, num_fillers) not in self._known:
            encode = self.codec.tokenizer.encode
            said = encode("done.")
            if number is not None:
                call = json.dumps({"name": "add", "arguments": {"number": number}})
                said = [*encode(" so" * num_fillers), self._opening, *encode(call), self._closing]
            self._known[number, num_fillers] = (*said, self.codec.stop_ids[0])
        return self._known[number, num_fillers]


def _bytes(ids: Sequence[int]) -> bytes:
    return np.array(ids, "<u4").tobytes()


def _digest(prompt: bytes, first: int) -> bytes:
    return hashlib.sha256(prompt + first.to_bytes(4, "little")).digest()
