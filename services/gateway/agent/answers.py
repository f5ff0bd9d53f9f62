"""Turns as answers: what an agent is given for the tokens of a turn, and the digest by which it is known again.

Rule: an answer depends on the tokens, the request's tools and the turn's entry alone, so it is the same whenever and
wherever it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gspo_core.chat import ChatCodec
from gspo_core.chat.text import text_of
from gspo_core.messages import Message, ToolSchema
from services.episodes.fingerprints import as_javascript_writes, of_answer, of_instructions, of_message, of_opening
from services.episodes.matching import PrefixMatch, TurnEntry
from services.episodes.policy import Span
from services.episodes.reading import Reading, before_stop_text, read
from services.episodes.tree import TokenTree
from services.gateway.dialects.turns import Answer, Finish, TurnRequest, Usage, call_id

# So much of an answer, found in another conversation's first message, is no chance.
MIN_QUOTED_CHARS = 24


def turn_id(attempt: int, number: int) -> str:
    return f"turn-{attempt}-{number}"


def turn_number(attempt: int, turn: str) -> int | None:
    """The inverse of ``turn_id``; None where it is no turn of this attempt."""
    number = turn.removeprefix(turn_id(attempt, 0)[:-1])
    return int(number) if number.isdecimal() and len(number) < 10 and turn_id(attempt, int(number)) == turn else None


class Answers:
    def __init__(self, codec: ChatCodec, tree: TokenTree) -> None:
        self._codec = codec
        self._tree = tree
        self._words: dict[int, tuple[int, str]] = {}
        """Texts of turns that were looked for in a new conversation, with the number of tokens they were read from."""

    def id_of(self, number: int) -> str:
        return turn_id(self._tree.attempt, number)

    def number_of(self, turn: str) -> int | None:
        return turn_number(self._tree.attempt, turn)

    def entry(self, number: int, place: PrefixMatch, ask: TurnRequest, created_at: int) -> TurnEntry:
        return TurnEntry(
            number=number,
            request=place.chain[-1],
            bare=place.bare,
            opening=of_opening(ask.messages, place.said),
            tail=of_message(ask.messages[-1]),
            digest=ask.digest,
            repeat_keys=[ask.repeat_key] if ask.repeat_key else [],
            parent=None if place.parent is None else place.parent.number,
            created_at=created_at,
            gives_no_calls=ask.choice.mode == "none",
            instructions=of_instructions(ask.messages, place.said),
            num_messages=len(ask.messages),
            gives_one_call=ask.single_call,
        )

    def digest(self, entry: TurnEntry, tools: Sequence[ToolSchema]) -> bytes:
        """The digest of an assistant's message with the content of the turn."""
        if not entry.answer:
            self._note(entry, self._reading(entry, tools))
        return entry.answer

    def is_told_anew(self, entry: TurnEntry, message: Message, tools: Sequence[ToolSchema]) -> bool:
        """Whether the message is the answer as some clients write it again: with other blanks between its texts before
        and behind calls, and with numbers in these as JavaScript has them."""
        if not message.get("tool_calls"):
            return False
        reading = self._reading(entry, tools)
        told = {**message, "content": reading.text} if _is_joined(reading, text_of(message).strip()) else message
        calls = [(call.name, as_javascript_writes(call.arguments)) for call in reading.calls]
        return of_message(told) in (self.digest(entry, tools), of_answer(reading.text, calls))

    def is_in(self, entry: TurnEntry, text: str) -> bool:
        """Whether ``text`` quotes what the turn said; of a few characters it might do so by chance."""
        if len(text) < MIN_QUOTED_CHARS:
            return False
        num_sampled, words = self._words.get(entry.number, (-1, ""))
        if num_sampled != len(self._tree.turns[entry.number].sampled):
            words = self._reading(entry, ()).text.strip()
            self._words[entry.number] = len(self._tree.turns[entry.number].sampled), words
        return len(words) >= MIN_QUOTED_CHARS and words in text

    def read(self, entry: TurnEntry, tools: Sequence[ToolSchema]) -> Answer:
        reading, tokens = self._reading(entry, tools), self._tree.turns[entry.number]
        self._note(entry, reading)
        num_thought = max(reading.parsed.num_thought_tokens - len(tokens.begun), 0)
        finish: Finish = "length" if entry.finish == "length" else "tool_calls" if reading.calls else "stop"
        return Answer(
            id=self.id_of(entry.number),
            text=reading.text,
            calls=reading.calls,
            call_ids=tuple(call_id(self.id_of(entry.number), place) for place in range(len(reading.calls))),
            finish=finish,
            usage=Usage(tokens.num_prompt, entry.num_stored, len(tokens.sampled), num_thought),
            versions=_spans(tokens.spans),
            created_at=entry.created_at,
            reasoning=reading.reasoning,
            stop_text=entry.stop_text,
            num_behind=reading.num_behind,
        )

    def _reading(self, entry: TurnEntry, tools: Sequence[ToolSchema]) -> Reading:
        return read(
            self._codec,
            self.told(entry),
            tools,
            entry.overlap,
            gives_calls=not entry.gives_no_calls,
            gives_one_call=entry.gives_one_call,
        )

    def told(self, entry: TurnEntry) -> Sequence[int]:
        """Ids to read the turn of as an agent has it."""
        tokens = self._tree.turns[entry.number]
        return [*tokens.begun, *before_stop_text(self._codec, tokens.sampled, entry.stop_text)]

    def _note(self, entry: TurnEntry, reading: Reading) -> None:
        entry.answer = of_answer(reading.text, [(call.name, call.arguments) for call in reading.calls])
        entry.num_calls = 0 if entry.gives_no_calls else len(reading.parsed.calls)
        entry.has_parse_error = reading.parsed.has_parse_error
        sampled = self._tree.turns[entry.number].sampled
        is_ended = bool(sampled) and sampled[-1] in self._codec.stop_ids
        entry.num_told = -1 if is_ended else len(reading.text.strip())


def _is_joined(reading: Reading, text: str) -> bool:
    """Whether the text is that of the answer, but for the blanks before what stands behind its calls."""
    behind = reading.text[len(reading.text) - reading.num_behind :].strip()
    before = reading.text.removesuffix(behind).strip()
    return bool(behind) and text.startswith(before) and text[len(before) :].strip() == behind


def _spans(pieces: Sequence[Span]) -> tuple[Span, ...]:
    """Neighbouring pieces of one version are one span."""
    spans: list[Span] = []
    for one in pieces:
        is_same = bool(spans) and spans[-1].version == one.version
        spans.append(replace(one, start=spans.pop().start) if is_same else one)
    return tuple(spans)
