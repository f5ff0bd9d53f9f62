"""Every field of the gateway's table as a case: a request with a drawn value in it, and what may come of it.

Rule: what is due is read from the kind of the field's rule; how the gateway comes to it is not known here.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from services.gateway.dialects.fields import ANTHROPIC_MESSAGES, GEMINI, OPENAI_CHAT, OPENAI_RESPONSES
from services.gateway.dialects.sent import Decided, Fields, Harmless, Only, Read
from tests.play.requirements import asking
from tests.play.requirements.asking import Answered, Body
from tests.play.requirements.whole_bodies import WHOLE, objects_at

TABLES: Mapping[str, Fields] = {
    asking.CHAT: OPENAI_CHAT,
    asking.RESPONSES: OPENAI_RESPONSES,
    asking.MESSAGES: ANTHROPIC_MESSAGES,
    asking.GEMINI: GEMINI,
}
ACTED, TOLD, HARMLESS, ASKED_FOR_NOTHING, UNKNOWN = "acted on", "not acted on", "harmless", "what happens", "unknown"
MOST_DRAWS = 60
_INDEX = re.compile(r"\[\d+\]")
# Acted on where they have a place, and said elsewhere: a name of who speaks.
SAID_WHERE_READ = frozenset({(asking.CHAT, "messages[]", "name")})


class NoPlace(Exception):
    """The bodies that are drawn have no object for a field of the table."""


@dataclass(frozen=True)
class Case:
    dialect: str
    place: str
    name: str
    kind: str
    """Of the value, by the rule of the field."""
    asked: Body
    without: Body | None = None
    """The same without the field, where it is acted on."""

    @property
    def path(self) -> str:
        """As refusals name it, without numbers."""
        return f"{self.place}.{self.name}".lstrip(".")


def cases(dialect: str, rng: random.Random) -> Iterator[Case]:
    for place, rules in TABLES[dialect].items():
        for name, rule in rules.items():
            if isinstance(rule, Read):
                yield _read(dialect, place, name, rng)
                continue
            for kind, value in _values(rule, rng):
                yield _with(dialect, place, name, kind, value, rng)
        yield _with(dialect, place, f"drawn_{rng.getrandbits(32):08x}", UNKNOWN, _any(rng), rng)


def _read(dialect: str, place: str, name: str, rng: random.Random) -> Case:
    for _ in range(MOST_DRAWS):
        seed = rng.getrandbits(48)
        asked, without = (WHOLE[dialect](random.Random(seed)) for _ in range(2))
        holders = [one for one in objects_at(without, place) if name in one]
        if holders:
            del holders[-1][name]
            return Case(dialect, place, name, ACTED, asked, without)
    raise NoPlace(f"{dialect}: no body has {place or 'the request'} with {name}")


def _with(dialect: str, place: str, name: str, kind: str, value: Any, rng: random.Random) -> Case:
    asked = WHOLE[dialect](rng)
    for _ in range(MOST_DRAWS):
        if found := objects_at(asked, place):
            rng.choice(found)[name] = value
            return Case(dialect, place, name, kind, asked)
        asked = WHOLE[dialect](rng)
    raise NoPlace(f"{dialect}: no body has {place}")


def _values(rule: Any, rng: random.Random) -> Iterator[tuple[str, Any]]:
    if isinstance(rule, Harmless):
        yield HARMLESS, _any(rng)
    elif isinstance(rule, Decided):
        yield TOLD, _other(rule.idle, rng)
        yield from ((ASKED_FOR_NOTHING, one) for one in rule.idle)
    elif isinstance(rule, Only):
        yield TOLD, _other(rule.values, rng)
        yield from ((ASKED_FOR_NOTHING, one) for one in rule.values)


def _other(known: tuple[Any, ...], rng: random.Random) -> Any:
    """A value that is none of these, and like the first of them."""
    if not known:
        return _any(rng)
    first = known[0]
    if isinstance(first, bool):
        return not first
    if isinstance(first, int):
        return rng.randint(2, 9)
    text = f"drawn-{rng.getrandbits(24):x}"
    return text if isinstance(first, str) else [text] if isinstance(first, list) else {"drawn": text}


def _any(rng: random.Random) -> Any:
    text = f"drawn-{rng.getrandbits(24):x}"
    return rng.choice((text, rng.randint(2, 99), round(rng.uniform(0.1, 1.9), 3), {"drawn": text}, [text], True))


def judged(case: Case, answer: Answered) -> tuple[str, str]:
    """What came of it, and what is wrong with that; nothing else than these three may happen."""
    if answer.status == 200:
        is_said = without_index(case.path).replace("[]", "") in answer.ignored
        if case.kind in (TOLD, UNKNOWN):
            return ("said", "") if is_said else ("passed over", "it is answered, and the field is not named")
        if is_said and case.kind != ACTED:
            return "said", "it asks for nothing, and is named as left out"
        return ("said", "") if is_said else (case.kind, "")
    if 400 <= answer.status < 500 and case.path in named_in(answer.fault):
        is_due = case.kind in (TOLD, UNKNOWN)
        return "refused by name", "" if is_due else f"it is refused: {answer.fault}"
    return "something else", f"{answer.status} {answer.fault}"


def named_in(fault: str) -> str:
    return _INDEX.sub("[]", fault)


def without_index(path: str) -> str:
    return _INDEX.sub("", path)
