"""A random policy for one episode: text, calls and noise in tokens of a real vocabulary, each with its own log-prob.

Rule: what it says depends on its generator and its cues alone, and on the prompt only where that ends with a call that
was begun for it. It writes what agents stumble over: added tokens, as tokens and spelled out in letters, halves of
characters, calls that are none, several calls at once, JSON in every spelling.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from gspo_core.chat import HermesCodec
from services.episodes.policy import Sampled
from tests.services.gateway.gateway_kit import Served
from tests.services.rollout.rollout_kit import answer_of

WORDS = (
    *("the", "a", "result", "of", "search", "was", "found", "no", "more", "than", "seven", "and", "then", "we", "add"),
    *("Größe", "数", "🦊", "naïve\n\n-", "\t", "ok.", "Fine!", "What?", "Observation:"),
)
SPELLED = ("<|im_end|>", "<tool_call>", "</tool_call>", "<|endoftext|>", "<|im_start|>user\n", "<think>", "</think>")
SPELLED_CALL = '<tool_call>\n{"name": "lookup", "arguments": {"query": "x"}}\n</tool_call>'
CONTROL = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|im_start|>", "<tool_response>", "<|file_sep|>")
# Behind these ids there are added tokens only.
NUM_PLAIN = 151_643
# Log-probs are kept in 32 bits; up to 2**24 of these are told apart.
STEP = 2.0**-20
POLL_S = 0.005


@dataclass
class Babbler:
    """``cues`` say how the next turns are spoken; without one it is random.

    A cue is ``text``, ``calls:NUMBER``, ``call:NAME``, ``call:NAME=ARGUMENT``, ``code:``, ``code:final``, ``noise``,
    ``exactly:CALLS`` (a list of calls in JSON) or ``say:WORDS``.
    """

    codec: HermesCodec
    rng: random.Random
    numbers: Iterator[int] = field(default_factory=lambda: count(1))
    wild: bool = True
    """It also calls tools that there are not."""
    huge: bool = True
    """It also writes numbers of more than 64 bits."""
    ends: Sequence[str] = ()
    """Stop texts of each request: calls that are spoken on a cue are to arrive, and do not have them."""
    cues: list[str] = field(default_factory=list)
    served: list[Served] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    """Where in ``served`` each turn begins."""
    requests: Callable[[], float] | None = None
    """How many the gateway has heard, where the next sample is to wait for one more."""
    versions: dict[float, int] = field(default_factory=dict)
    """Which sampled the token of this log-prob."""
    version: int = 0
    _words: Sequence[str] = (*WORDS, *SPELLED)
    _rest: dict[int, list[int]] = field(default_factory=dict)
    _is_to_arrive: bool = False
    """So the calls of this turn are to the tool that every player offers: others are no calls to it."""

    def __post_init__(self) -> None:
        tokenizer = self.codec.tokenizer
        self._control = {token: found for token in CONTROL if (found := tokenizer.token_id(token)) is not None}
        self._begun = {name: self.codec.call_opening(name) for name in ("lookup", "note", "")}

    async def sample(
        self,
        input_ids: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float,
        stop_token_ids: Collection[int],
        prefer_engine: str = "",
        sampling_seed: int | None = None,
    ) -> Sampled:
        await self._until_asked_again()
        prompt = list(input_ids)
        whole = self._rest.pop(hash(tuple(prompt)), None) or self._turn(prompt)
        ids = whole[:max_new_tokens]
        if len(whole) > max_new_tokens:
            self._rest[hash((*prompt, *ids))] = whole[max_new_tokens:]
        logprobs = [-STEP * next(self.numbers) for _ in ids]
        self.served.append(Served(prompt, ids, logprobs))
        cut = self.rng.randint(0, len(ids)) if self.rng.random() < 0.2 else len(ids)
        spans = [(self.version, 0, cut), (self.version + 1, cut, len(ids))]
        self.versions |= {value: self.version + (place >= cut) for place, value in enumerate(logprobs)}
        self.version += cut < len(ids)
        return answer_of(ids, logprobs, spans, "engine-0")

    async def _until_asked_again(self) -> None:
        requests, self.requests = self.requests, None
        if requests is not None:
            before = requests()
            while requests() == before:
                await asyncio.sleep(POLL_S)
        await asyncio.sleep(0)

    def _turn(self, prompt: list[int]) -> list[int]:
        self.begins.append(len(self.served))
        cue = self.cues.pop(0) if self.cues else ""
        kind = cue or self.rng.choices(("text", "calls:1", "calls:2", "noise"), (8, 7, 2, 2))[0]
        self._is_to_arrive = cue.startswith("calls:")
        avoided = self.ends if cue.startswith(("calls:", "call:")) else ()
        self._words = tuple(word for word in (*WORDS, *SPELLED) if word not in avoided)
        begun = next((name for name, ids in self._begun.items() if prompt[-len(ids) :] == ids), None)
        ids = self._said(kind) if begun is None else self._behind(begun, kind)
        return [*ids, self.codec.stop_ids[-1 if self.rng.random() < 0.1 else 0]]

    def _said(self, kind: str) -> list[int]:
        name, _, number = kind.partition(":")
        if name == "text":
            return self._text()
        if name == "calls":
            said = self._text() if self.rng.random() < 0.3 else []
            return [*said, *self._calls(int(number))]
        if name == "call":
            return self._tagged(self._cued(number))
        if name == "exactly":
            return [token for call in json.loads(number) for token in self._tagged(json.dumps(call))]
        if name == "say":
            return self._encode(number)
        if name == "code":
            return self._encode(f"Thought: {self._some()}\n<code>\n{self._code(number)}\n</code>{self._some()}")
        return self._noise()

    def _cued(self, call: str) -> str:
        """``NAME`` without arguments, or ``NAME=ARGUMENT``, which is then some words."""
        name, _, argument = call.partition("=")
        return json.dumps({"name": name, "arguments": {argument: self._some()} if argument else {}})

    def _code(self, call: str) -> str:
        if call == "final":
            return f"final_answer({self._some()!r})"
        return self.rng.choice(
            (f"print(lookup(query={self._some()!r}))", f"x = note({self._some()!r})\nprint(x)", "1 / 0")
        )

    def _tagged(self, body: str) -> list[int]:
        return [self._control["<tool_call>"], *self._encode(f"\n{body}\n"), self._control["</tool_call>"]]

    def _behind(self, begun: str, kind: str) -> list[int]:
        """The rest of a call that was begun, and further ones; now and then it becomes none."""
        if kind == "noise":
            return self._text()
        if kind.startswith("call:") and not begun:
            return [*self._encode(f"{self._cued(kind.removeprefix('call:'))}\n"), self._control["</tool_call>"]]
        name = begun or self._name()
        body = f" {self._arguments(name)}}}\n" if begun else f"{self._call_text(name)}\n"
        number = int(kind.partition(":")[2]) if kind.startswith("calls:") else 1
        return [*self._encode(body), self._control["</tool_call>"], *self._calls(number - 1)]

    def _calls(self, number: int) -> list[int]:
        ids: list[int] = []
        for _ in range(number):
            opening, body, closing = (
                self._control["<tool_call>"],
                self._call_text(self._name()),
                self._control["</tool_call>"],
            )
            ids += [
                opening,
                *self._encode(f"\n{body}\n"),
                closing,
                *self._encode(self.rng.choice(("", "\n", " \n\n")) or "\n"),
            ]
        return ids

    def _call_text(self, name: str) -> str:
        return f'{{"name": "{name}", "arguments": {self._arguments(name)}}}'

    def _name(self) -> str:
        if self._is_to_arrive:
            return "lookup"
        if self.wild and self.rng.random() < 0.05:
            return self.rng.choice(("fly", "lookup_", "数"))
        return self.rng.choice(("lookup", "note"))

    def _arguments(self, name: str) -> str:
        rng = self.rng
        right: dict[str, Any] = (
            {"query": self._some(), "limit": rng.randint(-3, 2**40)} if name == "lookup" else {"text": self._some()}
        )
        if rng.random() < 0.15:
            odd = (2**70, 1.0, -0.0, 1e300, None, True, "", [], {"a": [1, {"b": "\u2028"}]}, "<|im_end|>", "\x00")
            right[rng.choice(("limit", "more", "text"))] = rng.choice(odd if self.huge else odd[1:])
        if rng.random() < 0.05:
            right.pop(next(iter(right)))
        separators = rng.choice(((", ", ": "), (",", ":"), (" ,\n", " : ")))
        return json.dumps(right, ensure_ascii=rng.random() < 0.5, separators=separators)

    def _text(self) -> list[int]:
        ids = self._encode("So: ")
        for _ in range(self.rng.randint(1, 4)):
            pick = self.rng.random()
            if pick < 0.5:
                ids += self._encode(f" {self._some()}")
            elif pick < 0.75:
                ids += self._encode(self.rng.choice((*SPELLED, SPELLED_CALL)))
            else:
                ids += [self.rng.randrange(NUM_PLAIN) for _ in range(self.rng.randint(1, 8))]
        return ids

    def _noise(self) -> list[int]:
        pieces = (
            lambda: self._text(),
            lambda: [self.rng.choice(list(self._control.values()))],
            lambda: [self._control["<tool_call>"], *self._text(), self._control["</tool_call>"]],
            lambda: [
                self._control["<tool_call>"],
                *self._encode('{"name": "lookup", "arguments": [1]}'),
                self._control["</tool_call>"],
            ],
            lambda: [self._control["<think>"], *self._text(), self._control["</think>"]],
            lambda: self._encode(self.rng.choice((" ", "\n\n", "{", '{"a": 1}'))),
            lambda: self._calls(1),
            list,
        )
        return [token for piece in self.rng.choices(pieces, k=self.rng.randint(1, 4)) for token in piece()]

    def _some(self) -> str:
        return " ".join(self.rng.choices(self._words, k=self.rng.randint(0, 6)))

    def _encode(self, text: str) -> list[int]:
        return self.codec.tokenizer.encode(text)
