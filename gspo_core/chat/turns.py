"""Reads reasoning, text and calls from the ids of one sampled turn.

Rule: text is read from ids, never the other way round, and a call inside the reasoning does not count.
The codecs handle the conversation around the turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from gspo_core.chat.calls import CallReader
from gspo_core.chat.tokenizer import Tokenizer
from gspo_core.messages import CallStatus, Message, ParsedTurn, ToolCall, ToolSchema


class TurnReader:
    """One per codec; stateless."""

    def __init__(
        self, tokenizer: Tokenizer, stop_ids: Sequence[int], calls: CallReader, *, opens_thought: bool = False
    ) -> None:
        """``opens_thought``: the generation prompt ends inside a think block."""
        self._tokenizer = tokenizer
        self._stop_ids = tuple(stop_ids)
        self._calls = calls
        self.opens_thought = opens_thought
        self.think, self.think_end = tokenizer.token_id("<think>"), tokenizer.token_id("</think>")

    def read(
        self,
        sampled_ids: Sequence[int],
        tools: Sequence[ToolSchema] | None = None,
        *,
        opens_thought: bool | None = None,
    ) -> ParsedTurn:
        """Parse a turn. With ``tools``, calls to others get the status ``unknown_tool``."""
        ids = self._without_stop(sampled_ids)
        complete = len(ids) < len(sampled_ids)
        opens_thought = self.opens_thought if opens_thought is None else opens_thought
        thought, begin, is_open = self._split_thought(ids, opens_thought)
        first_call = self._calls.begin(ids, begin, tools or ())
        text = "" if is_open else self._tokenizer.decode(ids[begin:first_call]).strip()
        calls = () if is_open else tuple(self._read_calls(ids, first_call, tools))
        # A call ended the reasoning; if its own end comes later, the call was a part of it.
        may_be_thought = (opens_thought or self.think in ids[:begin]) and self.think_end not in ids[:begin]
        if may_be_thought:
            calls = tuple(replace(call, is_final=False) for call in calls)
        reasoning = self._tokenizer.decode(thought).strip()
        return ParsedTurn(text, calls, complete and not is_open, reasoning, begin, may_be_thought)

    def message(self, sampled_ids: Sequence[int], turn: ParsedTurn, *, as_text: bool = False) -> Message:
        """The turn as a history message; ``as_text`` writes its calls as sampled."""
        message: Message = {"role": "assistant"}
        if as_text:
            ids = self._without_stop(sampled_ids)
            message["content"] = self._tokenizer.decode(ids[self._split_thought(ids, self.opens_thought)[1] :]).strip()
        else:
            message["content"] = turn.text
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        if turn.calls and not as_text:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in turn.calls
            ]
        return message

    def opening(self, name: str = "") -> Sequence[str | int]:
        """Texts and ids that begin a turn which is a call; empty where the syntax has no beginning of one."""
        call = self._calls.opening(name)
        if call and self.opens_thought and self.think_end is not None:
            return ("\n", self.think_end, "\n\n", *call)
        return call

    def is_thinking(self, prefix_ids: Sequence[int], sampled_ids: Sequence[int], header_id: int) -> bool:
        """Whether a think block is open after these ids; ``header_id`` begins a message."""
        for token in chain(reversed(sampled_ids), reversed(prefix_ids)):
            if token in (self.think_end, self._calls.opening_id, header_id):
                return False
            if token == self.think:
                return True
        return False

    def _without_stop(self, sampled_ids: Sequence[int]) -> list[int]:
        ids = list(sampled_ids)
        for stop in self._stop_ids:
            if stop in ids:
                del ids[ids.index(stop) :]
        return ids

    def _split_thought(self, ids: Sequence[int], opens_thought: bool) -> tuple[Sequence[int], int, bool]:
        """The reasoning, the start of the rest, and whether the reasoning is still open. Reasoning comes first: a
        think block after other text is text."""
        opening = ids.index(self.think) if self.think in ids else -1
        is_first = opening >= 0 and not self._tokenizer.decode(ids[:opening]).strip()
        begin = opening + 1 if is_first else 0
        if self.think_end is None or not (opens_thought or is_first):
            return [], 0, False
        if self.think_end in ids[begin:]:
            end = ids.index(self.think_end, begin)
            return ids[begin:end], end + 1, False
        if self._calls.opening_id is not None and self._calls.opening_id in ids[begin:]:  # a call closes the reasoning
            end = ids.index(self._calls.opening_id, begin)
            return ids[begin:end], end, False
        return ids[begin:], len(ids), True

    def _read_calls(self, ids: Sequence[int], begin: int, tools: Sequence[ToolSchema] | None) -> Iterator[ToolCall]:
        names = None if tools is None else {tool["function"]["name"] for tool in tools}
        for call in self._calls.read(ids, begin, tools or ()):
            is_foreign = call.status is CallStatus.OK and names is not None and call.name not in names
            yield replace(call, status=CallStatus.UNKNOWN_TOOL) if is_foreign else call


def can_be_written(turn: ParsedTurn) -> bool:
    """Whether its calls can be rendered as calls again: each names a tool and passes an object."""
    readable = (CallStatus.OK, CallStatus.UNKNOWN_TOOL)
    return all(call.status in readable and isinstance(call.arguments, dict) for call in turn.calls)
