"""What a harness asked for, as its requests alone tell: which of them go on from an earlier one to the letter.

Rule: it knows nothing of how the gateway compares conversations. A request whose messages begin with all those of an
earlier one and then an answer, and that nobody went on from yet, makes no branch. A request that its client gave up
went on from it too. Where a client says that it put words of its own in the place of an answer, or left it out and went
on in words of its own, nothing goes on from that answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.play.wire import Request

# What a client may send differently each time, and means nothing.
MEANINGLESS = frozenset({"cache_control", "id", "status", "encrypted_content", "phase", "thoughtSignature"})
# The Gemini CLI ends an answer in which it sees a loop, and writes this instead.
REPLACED = "[The previous response was interrupted before it completed.]"
_BILL = re.compile(r"x-anthropic-billing-header:[^\n]*")


@dataclass(frozen=True)
class Observed:
    turn: int
    said: Sequence[str]
    """Each message of the conversation, as text."""
    tools: str

    def goes_on_from(self, other: Observed) -> bool:
        length = len(other.said)
        if self.tools != other.tools or len(self.said) <= length or self.said[:length] != other.said:
            return False
        return REPLACED not in self.said[length] and not _is_of_the_agent(self.said[length])


def observed(requests: Sequence[Request]) -> list[Observed]:
    """One for each turn, in the order of turns."""
    found: dict[int, Observed] = {}
    for one in requests:
        if one.turn is not None and one.turn not in found:
            found[one.turn] = _observed(one, one.turn)
    return [found[turn] for turn in sorted(found)]


def given_up(requests: Sequence[Request]) -> list[Observed]:
    """What nobody was answered, nor asked again: the gateway may have begun a turn for it all the same."""
    answered = [one.said for one in observed(requests)]
    unanswered = [_observed(one, -1) for one in requests if one.turn is None and not one.refused]
    return [one for one in unanswered if one.said not in answered]


def goes_on(turns: Sequence[Observed], given_up: Sequence[Observed] = ()) -> dict[int, int]:
    """The turns that make no branch, and which each goes on from."""
    found: dict[int, int] = {}
    for place, one in enumerate(turns):
        before = [other for other in turns[:place] if one.goes_on_from(other)]
        nearest = max(before, key=lambda other: len(other.said), default=None)
        if nearest is None or any(other.goes_on_from(nearest) for other in given_up):
            continue
        if nearest.turn not in found.values():
            found[one.turn] = nearest.turn
    return found


def _observed(request: Request, turn: int) -> Observed:
    body = request.body
    messages = [
        *_listed(body.get("system") or body.get("instructions") or body.get("systemInstruction")),
        *(body.get("messages") or body.get("input") or body["contents"]),
    ]
    said = [_BILL.sub("", json.dumps(_meaning(message), sort_keys=True)) for message in messages]
    return Observed(turn, said, json.dumps(_meaning(body.get("tools")), sort_keys=True))


def _is_of_the_agent(message: str) -> bool:
    """Words of its own, and no answer of the policy's."""
    value = json.loads(message)
    return isinstance(value, dict) and value.get("role") in ("user", "system", "developer")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _meaning(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _meaning(one) for name, one in value.items() if name not in MEANINGLESS}
    if isinstance(value, list):
        only = value[0] if len(value) == 1 else None
        is_text = isinstance(only, dict) and only.get("type") == "text"
        return only["text"] if is_text else [_meaning(one) for one in value]  # as a part, or as the text that it is
    return value
