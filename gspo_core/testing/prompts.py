"""The model that prompts are measured for: how it writes them, and how long they may be.

Rule: it is loaded before an environment is examined, because loading a large vocabulary holds up the whole process and
the author is not to be blamed for that. No weights are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gspo_core.json_value import JSON
from gspo_core.messages import Message, ToolSchema
from gspo_core.testing.report import Check, Status

if TYPE_CHECKING:
    from gspo_core.chat import ChatCodec

# As in a job that says nothing (`limits.max_context_tokens`).
DEFAULT_CONTEXT_TOKENS = 32768


@dataclass(frozen=True, slots=True)
class PromptMeter:
    """Counts the tokens of prompts."""

    codec: ChatCodec
    model_tokens: int | None
    """The model's own limit; None where it states none."""

    @classmethod
    def load(cls, model_dir: Path) -> PromptMeter:
        from gspo_core.chat import load_codec

        path = model_dir / "config.json"
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        given = config.get("max_position_embeddings") if isinstance(config, dict) else None
        return cls(load_codec(model_dir), given if isinstance(given, int) else None)

    def length(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> int:
        return len(self.codec.render(messages, tools))

    def bound(self, limits: Mapping[str, JSON]) -> tuple[int, str]:
        """How many tokens an episode of an author's ``limits`` may hold, and what says so."""
        asked = limits.get("max_context_tokens")
        theirs = asked if isinstance(asked, int) else DEFAULT_CONTEXT_TOKENS
        if self.model_tokens is not None and self.model_tokens <= theirs:
            return self.model_tokens, "the model's context"
        return theirs, "limits.max_context_tokens" if theirs == asked else "the default of limits.max_context_tokens"


def prompt_check(meter: PromptMeter, lengths: Sequence[int], limits: Mapping[str, JSON]) -> Check:
    """A prompt that fills the context leaves no room for an answer: its episodes end before they begin."""
    middle, longest = sorted(lengths)[len(lengths) // 2], max(lengths)
    bound, of_what = meter.bound(limits)
    data = {"median": middle, "max": longest, "bound": bound}
    shown = f"{middle} tokens in the middle, {longest} at most"
    too_long = sum(length >= bound for length in lengths)
    if too_long:
        message = (
            f"{shown}, but {of_what} is {bound} tokens: {too_long} of {len(lengths)} tasks leave no room for an answer"
        )
        return Check("prompt", Status.FAIL, message, data)
    return Check("prompt", Status.PASS, f"{shown}; an episode may hold {bound}", data)
