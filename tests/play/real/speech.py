"""What the model of a real play is taught to say: calls of the harness that it sits in, and words that end a turn.

Rule: what is said depends on the generator, on the tools that the prompt names, and on a call that was begun for it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from gspo_core.chat import HermesCodec
from tests.play.babble import Babbler
from tests.play.harnesses import HARNESSES

WORDS = ("Done.", "Fertig: Größe 🦊", "It says <|im_end|> there.", "a\n\nb ", "Nothing more to do.")
SOME = ("the result", "Größe", "a fox 🦊", "three and seven", "<tool_call>", "\\n {}")
# Of a turn in a harness, in turn: words that end it, two calls at once, a call of a tool that there is not.
ENDS, TWO, UNKNOWN = 0.25, 0.1, 0.03
# Spelled tags in a call are hard to learn: so often another one is drawn instead.
PLAIN = 0.7
# Agents by packages end by words, and are asked again.
PACKAGES_END = 0.35
PACKAGE, CALLER, CODER, TITLES = "package", "tool caller", "coder", "titles"

TOOLS: Mapping[str, str] = {
    "Claude Code": "Bash",
    "Codex": "exec_command",
    "Qwen Code": "run_shell_command",
    "OpenCode": "bash",
    "Gemini CLI": "run_shell_command",
    "mini-swe-agent": "bash",
}
"""The shell of each."""
NAMED: Mapping[str, str] = {
    **TOOLS,
    "Qwen Code": "run_shell_command of Qwen",
    "Gemini CLI": "run_shell_command of Gemini",
    "mini-swe-agent": "bash of mini",
}
"""As a task names it: what is near to where the model answers tells it where it is."""


def tongue_of(prompt: str) -> str:
    """What the policy behind this prompt may call."""

    def has(tool: str) -> bool:
        return f'"name": "{tool}"' in prompt

    if has("exec_command"):
        return "Codex"
    if has("Bash"):
        return "Claude Code"
    if has("run_shell_command"):
        return "Qwen Code" if "is_background" in prompt and NAMED["Gemini CLI"] not in prompt else "Gemini CLI"
    if has("bash"):
        return "mini-swe-agent" if "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" in prompt else "OpenCode"
    if has("final_answer"):
        return CALLER
    if "<code>" in prompt and not has("lookup"):
        return CODER
    return PACKAGE if has("lookup") else TITLES


class Speech:
    def __init__(self, codec: HermesCodec) -> None:
        self._codec = codec
        tokenizer = codec.tokenizer
        opening, closing = tokenizer.token_id("<tool_call>"), tokenizer.token_id("</tool_call>")
        assert opening is not None
        assert closing is not None
        self._opening, self._closing = opening, closing
        self._begun = {name: codec.call_opening(name) for name in ("lookup", "note", "")}

    def tongue(self, prompt: Sequence[int]) -> str:
        return tongue_of(self._codec.tokenizer.decode(list(prompt)))

    def turn(self, prompt: Sequence[int], tongue: str, rng: random.Random) -> list[int]:
        """With its end."""
        last = list(prompt[-64:])
        begun = next((name for name, ids in self._begun.items() if last[-len(ids) :] == ids), None)
        said = self._said(tongue, rng) if begun is None else self._behind(begun, tongue, rng)
        return [*said, self._codec.stop_ids[0]]

    def _said(self, tongue: str, rng: random.Random) -> list[int]:
        encode = self._codec.tokenizer.encode
        if tongue == TITLES:
            return encode(rng.choice(WORDS))
        if tongue == CODER:
            return encode(f"Thought: so.\n<code>\n{self._code(rng)}\n</code>")
        if rng.random() < (PACKAGES_END if tongue == PACKAGE else 0.1 if tongue == CALLER else ENDS):
            last = HARNESSES[tongue].last if tongue in HARNESSES else None
            return encode(rng.choice(WORDS)) if last is None else self._tagged(json.dumps(last))
        calls = [self._call(tongue, rng) for _ in range(2 if rng.random() < TWO else 1)]
        return [token for call in calls for token in self._tagged(json.dumps(call))]

    def _behind(self, begun: str, tongue: str, rng: random.Random) -> list[int]:
        """The rest of a call."""
        call = self._call(tongue, rng)
        body = f"{json.dumps(call)}\n"
        if begun:
            body = f" {json.dumps(_arguments(begun, rng))}}}\n"
        return [*self._codec.tokenizer.encode(body), self._closing]

    def _tagged(self, body: str) -> list[int]:
        return [self._opening, *self._codec.tokenizer.encode(f"\n{body}\n"), self._closing]

    def _call(self, tongue: str, rng: random.Random) -> Mapping[str, Any]:
        if rng.random() < UNKNOWN:
            return {"name": "no_such_tool", "arguments": {}}
        if tongue in HARNESSES:
            (call,) = HARNESSES[tongue].calls(rng)
            if "<" in str(call) and rng.random() < PLAIN:
                (call,) = HARNESSES[tongue].calls(rng)
            return call
        if tongue == CALLER and rng.random() < 0.3:
            return {"name": "final_answer", "arguments": {"answer": rng.choice(SOME)}}
        name = rng.choice(("lookup", "note"))
        return {"name": name, "arguments": _arguments(name, rng)}

    def _code(self, rng: random.Random) -> str:
        if rng.random() < 0.3:
            return f"final_answer({rng.choice(SOME)!r})"
        return rng.choice((f"print(lookup(query={rng.choice(SOME)!r}))", f"print(note({rng.choice(SOME)!r}))", "1 / 0"))


def _arguments(name: str, rng: random.Random) -> Mapping[str, Any]:
    if name == "note":
        return {"text": rng.choice(SOME)}
    return {"query": rng.choice(SOME), "limit": rng.choice((1, 5, 20))}


class Speaker(Babbler):
    """A policy of the scripted stage that speaks like this: what it was asked behind is what the model is taught on."""

    def _turn(self, prompt: list[int]) -> list[int]:
        self.begins.append(len(self.served))
        speech = Speech(self.codec)
        return speech.turn(prompt, speech.tongue(prompt), self.rng)
