"""Turns messages into token ids and sampled ids into parsed turns, in the ChatML/Hermes format of the Qwen family.

Rule: sampled ids are never decoded and encoded again. The prompt of the next turn is what was sent, what was sampled,
and a freshly encoded bridge; text is read from ids, never the other way round. Control tokens come from this module
alone: text that spells ``<|im_end|>`` or ``</tool_response>``, in a tool's result say, is encoded as ordinary
characters. Only the text of an assistant's own turn keeps its tags of calls and thoughts, because it stands for what
was sampled; what others have put into the assistant's mouth is text.
No other chat format is known here, and no model is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from gspo_core.chat.text import text_of, to_json
from gspo_core.chat.tokenizer import Tokenizer, UnsuitableTokenizer, require_token
from gspo_core.chat.turns import TaggedCalls, TurnReader, can_be_written, open_hermes, read_hermes
from gspo_core.messages import ForkReason, Message, ParsedTurn, ToolSchema

# The wording around tools that Qwen models were trained on.
TOOLS_HEADER = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>"""
TOOLS_FOOTER = """
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""
_NO_THOUGHT = "<think>\n\n</think>\n\n"
# Tags around calls, results and thoughts; not every tokenizer of the family has all of them.
_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
# The tags that an assistant writes itself.
_OWN_TAGS = re.compile("</?(?:tool_call|think)>")
_ANY_TAG = re.compile("|".join(_TAGS))


@dataclass(frozen=True, slots=True)
class HermesStyle:
    """The differences between models of the family."""

    default_system: str | None = None
    """System message for conversations without one (Qwen2.5)."""
    reasons: bool = False
    """History keeps think blocks except those of earlier questions (Qwen3)."""
    empty_thought: bool = False
    """The generation prompt ends with an empty think block: thinking switched off (Qwen3)."""


class HermesCodec:
    """Renders, continues and reads conversations of one model. Stateless, so one instance serves all episodes."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        default_system: str | None = None,
        reasons: bool = False,
        empty_thought: bool = False,
        thinking: Literal["keep", "template"] = "keep",
        stop_ids: Sequence[int] = (),
    ) -> None:
        """The first three come from ``HermesStyle``. ``thinking``: on a new question, ``keep`` continues after
        everything sampled; ``template`` removes earlier reasoning, as the model's template does, which starts a new
        branch. ``stop_ids`` end a turn in addition to the format's own."""
        self.tokenizer = tokenizer
        self.style = HermesStyle(default_system, reasons, empty_thought)
        self._strips_thinking = thinking == "template" and reasons and not empty_thought
        what = "the ChatML/Hermes format"
        self._start, self._end = (require_token(tokenizer, token, what) for token in ("<|im_start|>", "<|im_end|>"))
        # Write a tag that the tokenizer lacks in ordinary characters, as a template would.
        self._tags = {tag: tokenizer.token_id(tag) if tag in tokenizer.control_tokens else None for tag in _TAGS}
        self._tools_footer = self._written(TOOLS_FOOTER, _ANY_TAG)
        self._answer_opening = ["assistant\n", *(self._written(_NO_THOUGHT, _ANY_TAG) if empty_thought else ())]
        end_of_text = tokenizer.token_id("<|endoftext|>")
        own_ends = (self._end,) if end_of_text is None else (self._end, end_of_text)
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys((*own_ends, *stop_ids)))
        """Ids of the tokens that end a turn, for the engine. The sampled one belongs to the turn."""
        self._turn_reader = TurnReader(tokenizer, self.stop_ids, TaggedCalls(tokenizer, read_hermes, open_hermes))
        if (reasons or empty_thought) and None in (self._turn_reader.think, self._turn_reader.think_end):
            raise UnsuitableTokenizer("think blocks are configured, but the tokenizer has no <think> token")

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        generation_prompt: bool = True,
        own: Mapping[int, int] | None = None,
    ) -> list[int]:
        """The ids of a whole conversation, for the first turn or a rewritten history. ``own``: as ``ChatCodec`` has
        it."""
        has_system = bool(messages) and messages[0]["role"] == "system"
        system = text_of(messages[0]) if has_system else self.style.default_system
        pieces: list[str | int] = []
        if tools or system is not None:
            pieces += [self._start, "system\n", "" if system is None else system]
            pieces += ["\n\n" if tools and system is not None else "", *self._tools_block(tools), self._end, "\n"]
        shifted = None if own is None else {place - has_system: number for place, number in own.items()}
        pieces += self._turns(messages[has_system:], shifted)
        return self._encode(pieces + self._generation_prompt() if generation_prompt else pieces)

    def bridge(
        self,
        prefix_ids: Sequence[int],
        sampled_ids: Sequence[int],
        new_messages: Sequence[Message],
        *,
        history: Sequence[Message] = (),
        tools: Sequence[ToolSchema] = (),
    ) -> list[int] | ForkReason:
        """The ids that follow ``prefix_ids + sampled_ids``: the turn's end if it was not sampled, ``new_messages``, and
        the generation prompt. If these cannot continue the conversation, returns the reason, and the caller starts a
        new branch. Ignores ``history`` and ``tools``: the ids suffice.
        """
        roles = {message["role"] for message in new_messages}
        if not roles <= {"tool", "user", "system"}:
            return ForkReason.ASSISTANT_MESSAGE
        is_ended = len(sampled_ids) > 0 and sampled_ids[-1] in self.stop_ids
        if any(stop in sampled_ids[:-1] for stop in self.stop_ids):
            return ForkReason.SAMPLED_AFTER_END
        if self._strips_thinking and "user" in roles and self._has_thought(prefix_ids, sampled_ids):
            return ForkReason.THINKING_STRIPPED
        pieces: list[str | int] = []
        if not is_ended:
            closing_id = self._turn_reader.think_end
            if closing_id is not None and self._turn_reader.is_thinking(prefix_ids, sampled_ids, self._start):
                pieces.append(closing_id)
            pieces.append(self._end)
        # The template writes a newline after the end of a turn; the engine stops before it.
        return self._encode([*pieces, "\n", *self._turns(new_messages), *self._generation_prompt()])

    def call_opening(self, name: str = "") -> list[int]:
        """The ids that begin a turn which is a call, of the tool ``name`` or of any. They belong to the turn, though
        the policy does not sample them."""
        thinks = self.style.reasons and not self.style.empty_thought
        thought = self._written(_NO_THOUGHT, _ANY_TAG) if thinks else ()
        return self._encode([*thought, *self._turn_reader.opening(name)])

    def parse(self, sampled_ids: Sequence[int], tools: Sequence[ToolSchema] | None = None) -> ParsedTurn:
        """Read a sampled turn. With ``tools``, calls to other tools get the status ``unknown_tool``."""
        return self._turn_reader.read(sampled_ids, tools)

    def message(
        self,
        sampled_ids: Sequence[int],
        tools: Sequence[ToolSchema] | None = None,
        *,
        turn: ParsedTurn | None = None,
    ) -> Message:
        """A sampled turn as a history message; ``turn`` is its result from ``parse``, if known."""
        turn = turn or self.parse(sampled_ids, tools)
        return self._turn_reader.message(sampled_ids, turn, as_text=not can_be_written(turn))

    def _has_thought(self, prefix_ids: Sequence[int], sampled_ids: Sequence[int]) -> bool:
        closing_id = self._turn_reader.think_end
        return closing_id in sampled_ids or closing_id in prefix_ids

    def _turns(self, messages: Sequence[Message], own: Mapping[int, int] | None = None) -> Iterator[str | int]:
        question = _last_question(messages) if self.style.reasons else 0
        for position, message in enumerate(messages):
            role, is_last = message["role"], position + 1 == len(messages)
            if role == "tool":  # neighbouring results share one user turn
                if position == 0 or messages[position - 1]["role"] != "tool":
                    yield from (self._start, "user")
                yield from ("\n", self._tag("<tool_response>"), f"\n{text_of(message)}\n")
                yield self._tag("</tool_response>")
                if not is_last and messages[position + 1]["role"] == "tool":
                    continue
            elif role == "assistant":
                whole = text_of(message)
                num_own = len(whole) if own is None else own.get(position, 0)
                thought, text, more = "", whole[:num_own], whole[num_own:]
                if self.style.reasons:
                    thought, text = _thought_and_text(message, text)
                yield from (self._start, "assistant\n")
                if self.style.reasons and position > question and (thought or is_last):
                    yield from (self._tag("<think>"), "\n" + thought.strip("\n") + "\n")
                    yield from (self._tag("</think>"), "\n\n")
                    text = text.lstrip("\n")
                    more = more if text else more.lstrip("\n")
                yield from (*self._written(text, _OWN_TAGS), more)
                yield from self._written_calls(message, has_text=bool(text + more))
            else:
                yield from (self._start, f"{role}\n{text_of(message)}")
            yield from (self._end, "\n")

    def _generation_prompt(self) -> list[str | int]:
        return [self._start, *self._answer_opening]

    def _tools_block(self, tools: Sequence[ToolSchema]) -> list[str | int]:
        if not tools:
            return []
        return [TOOLS_HEADER + "".join(f"\n{to_json(tool)}" for tool in tools), *self._tools_footer]

    def _written_calls(self, message: Message, *, has_text: bool) -> Iterator[str | int]:
        """The calls of an assistant message in the history, as the model would have written them."""
        for position, call in enumerate(message.get("tool_calls") or ()):
            function = call.get("function", call)
            arguments = function["arguments"]
            value = arguments if isinstance(arguments, str) else to_json(arguments)
            yield from ("\n" if position or has_text else "", self._tag("<tool_call>"))
            yield f'\n{{"name": "{function["name"]}", "arguments": {value}}}\n'
            yield self._tag("</tool_call>")

    def _tag(self, tag: str) -> str | int:
        found = self._tags[tag]
        return tag if found is None else found

    def _written(self, text: str, tags: re.Pattern[str]) -> list[str | int]:
        """Text pieces with these tags as token ids."""
        pieces: list[str | int] = []
        position = 0
        for match in tags.finditer(text):
            pieces += [text[position : match.start()], self._tag(match[0])]
            position = match.end()
        return [*pieces, text[position:]]

    def _encode(self, pieces: Iterable[str | int]) -> list[int]:
        """Encode the text between two control tokens in one piece, as in a template's whole text; no text becomes a
        control token."""
        ids: list[int] = []
        text = ""
        for piece in [*pieces, None]:
            if isinstance(piece, str):
                text += piece
                continue
            if text:
                ids += self.tokenizer.encode(text)
                text = ""
            if piece is not None:
                ids.append(piece)
        return ids


def _last_question(messages: Sequence[Message]) -> int:
    """Index of the last user message that is not a tool result; past the end if there is none."""
    for position in range(len(messages) - 1, -1, -1):
        if messages[position]["role"] == "user":
            text = text_of(messages[position])
            if not (text.startswith("<tool_response>") and text.endswith("</tool_response>")):
                return position
    return len(messages) - 1


def _thought_and_text(message: Message, text: str) -> tuple[str, str]:
    """Split an assistant message with this text into reasoning, given separately or before the text, and text."""
    thought = message.get("reasoning_content")
    if isinstance(thought, str):
        return thought, text
    if "</think>" not in text:
        return "", text
    before, *_, after = text.split("</think>")
    return before.rstrip("\n").split("<think>")[-1].lstrip("\n"), after.lstrip("\n")
