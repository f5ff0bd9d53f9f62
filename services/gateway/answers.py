"""Turns as answers: what an agent is given for the tokens of a turn, and the digest by which it is known again.

Rule: an answer depends on the tokens, the request's tools and the turn's entry alone, so it is the same whenever and
wherever it is given.
"""

from __future__ import annotations

from collections.abc import Sequence

from gspo_core.chat import ChatCodec
from gspo_core.messages import ToolSchema
from services.gateway.canonical import of_answer, of_message
from services.gateway.history import Place, TurnEntry
from services.gateway.reading import Reading, read
from services.gateway.tape import Tape
from services.gateway.turns import Answer, Ask, Finish, Usage, VersionSpan


class Answers:
    def __init__(self, codec: ChatCodec, tape: Tape) -> None:
        self._codec = codec
        self._tape = tape

    def id_of(self, number: int) -> str:
        return f"turn-{self._tape.attempt}-{number}"

    def number_of(self, turn_id: str) -> int | None:
        """The inverse of ``id_of``; None where it is no turn of this attempt."""
        number = turn_id.removeprefix(self.id_of(0)[:-1])
        return int(number) if number.isdecimal() and len(number) < 10 and self.id_of(int(number)) == turn_id else None

    def entry(self, number: int, place: Place, ask: Ask, created_at: int) -> TurnEntry:
        return TurnEntry(
            number=number,
            request=place.chain[-1],
            bare=place.bare,
            opening=of_message(ask.messages[0]),
            tail=of_message(ask.messages[-1]),
            digest=ask.digest,
            repeat_keys=[ask.repeat_key] if ask.repeat_key else [],
            parent=None if place.parent is None else place.parent.number,
            created_at=created_at,
        )

    def digest(self, entry: TurnEntry, tools: Sequence[ToolSchema]) -> bytes:
        """Of the assistant's message that says what the turn says."""
        if not entry.answer:
            self._note(entry, self._reading(entry, tools))
        return entry.answer

    def read(self, entry: TurnEntry, tools: Sequence[ToolSchema]) -> Answer:
        reading, taped = self._reading(entry, tools), self._tape.turns[entry.number]
        self._note(entry, reading)
        finish: Finish = "length" if entry.finish == "length" else "tool_calls" if reading.calls else "stop"
        return Answer(
            id=self.id_of(entry.number),
            text=reading.text,
            calls=reading.calls,
            call_ids=tuple(f"call_{self._tape.attempt}_{entry.number}_{place}" for place in range(len(reading.calls))),
            finish=finish,
            usage=Usage(taped.num_prompt, entry.num_stored, len(taped.sampled)),
            versions=_spans(taped.spans),
            created_at=entry.created_at,
            reasoning=reading.reasoning,
            stop_text=entry.stop_text,
        )

    def _reading(self, entry: TurnEntry, tools: Sequence[ToolSchema]) -> Reading:
        return read(self._codec, self._tape.turns[entry.number].sampled, tools, entry.overlap)

    def _note(self, entry: TurnEntry, reading: Reading) -> None:
        entry.answer = of_answer(reading.text, [(call.name, call.arguments) for call in reading.calls])
        entry.num_calls = len(reading.parsed.calls)
        entry.has_parse_error = reading.parsed.has_parse_error


def _spans(pieces: Sequence[tuple[int, int]]) -> tuple[VersionSpan, ...]:
    """Neighbouring pieces of one version are one span."""
    spans: list[VersionSpan] = []
    end = 0
    for version, length in pieces:
        start = spans.pop().start if spans and spans[-1].version == version else end
        end += length
        spans.append(VersionSpan(start, end, version))
    return tuple(spans)
