"""Reads a request field by field: every value knows where it stands, and no field is passed over in silence.

Rule: a field that is not in the table of its dialect is refused by its name, and so is one whose value would mean
something that is not done here; beside the conversation, a job may have such fields said instead, so they are noted in
``Reader.unsupported``. What the job decides instead of the client is noted in ``Reader.ignored``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from gspo_core.json_value import JSON
from services.gateway.dialects.turns import Refusal, RefusalKind

_INDEX = re.compile(r"\[\d+\]")
# In one request; a client that exceeds it does not speak this dialect.
MAX_PASSED_OVER = 64
CONVERSATION = ("messages[", "input[", "system[", "contents[", "systemInstruction.")


def without_index(place: str) -> str:
    return _INDEX.sub("", place)


@dataclass(frozen=True, slots=True)
class Read:
    """The field is acted on."""


@dataclass(frozen=True, slots=True)
class Harmless:
    """The field changes nothing in an answer of a policy."""


class Decided:
    """The job decides this, not the client, who is told. ``idle``: values that ask for nothing."""

    def __init__(self, *idle: JSON) -> None:
        self.idle = idle


class Only:
    """What these values say happens anyway; any other would mean something that is not done here."""

    def __init__(self, *values: JSON, why: str, is_vital: bool = False) -> None:
        """``is_vital``: an answer that passes it over is of no use to anybody."""
        self.values = values
        self.why = why
        self.is_vital = is_vital


Rule: TypeAlias = Read | Harmless | Decided | Only
Fields: TypeAlias = Mapping[str, Mapping[str, Rule]]
"""Rules by the place of an object (``messages[].content[]``; the request itself is ``""``) and the name of a field."""


@dataclass(frozen=True, slots=True)
class FieldValue:
    """A value of a request, and where it stands."""

    value: JSON
    place: str = ""

    def fault(self, why: str) -> Refusal:
        return Refusal(RefusalKind.INVALID, f"{self.place or 'the body'} {why}", param=self.place)

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.fault("must be a text")
        return self.value

    def name(self) -> str:
        if not self.text():
            raise self.fault("must not be empty")
        return self.text()

    def count(self) -> int:
        if isinstance(self.value, bool) or not isinstance(self.value, int) or self.value < 1:
            raise self.fault("must be a whole number above 0")
        return self.value

    def seed(self) -> int:
        """Any number of 64 bits, as OpenAI has it."""
        if isinstance(self.value, bool) or not isinstance(self.value, int) or not -(2**63) <= self.value < 2**63:
            raise self.fault("must be a whole number of at most 64 bits")
        return self.value

    def flag(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.fault("must be true or false")
        return self.value

    def items(self) -> list[FieldValue]:
        if not isinstance(self.value, list):
            raise self.fault("must be a list")
        return [FieldValue(one, f"{self.place}[{index}]") for index, one in enumerate(self.value)]

    def members(self) -> Iterator[tuple[str, FieldValue]]:
        if not isinstance(self.value, dict):
            raise self.fault("must be an object")
        for name, value in self.value.items():
            yield name, FieldValue(value, f"{self.place}.{name}" if self.place else name)

    def object(self) -> dict[str, JSON]:
        """Not checked further: schemas and arguments have fields that users define."""
        if not isinstance(self.value, dict):
            raise self.fault("must be an object")
        return self.value


class ReadFields:
    """The fields of one object that are acted on. Whoever reads them takes them; then none may be left."""

    def __init__(self, whole: FieldValue, fields: dict[str, FieldValue]) -> None:
        self._whole = whole
        self._fields = fields

    def get(self, name: str) -> FieldValue | None:
        return self._fields.pop(name, None)

    def need(self, name: str) -> FieldValue:
        found = self._fields.pop(name, None)
        if found is None:
            raise FieldValue(None, f"{self._whole.place}.{name}".lstrip(".")).fault("is missing")
        return found

    def end(self, what: str) -> None:
        """``what`` these fields belong to, for the refusal of one that does not."""
        for field in self._fields.values():
            raise field.fault(f"has no place in {what}")


class Reader:
    """Reads one request by the table of its dialect."""

    def __init__(self, fields: Fields, *, is_strict: bool = False) -> None:
        """``is_strict``: nothing is passed over, whatever a job says."""
        self._fields = fields
        self._is_strict = is_strict
        self._ignored: dict[str, None] = {}
        self._unsupported: list[Refusal] = []

    @property
    def ignored(self) -> tuple[str, ...]:
        return tuple(self._ignored)

    @property
    def unsupported(self) -> tuple[Refusal, ...]:
        """The refusals of fields that are not acted on, to be raised unless the job says otherwise."""
        return tuple(self._unsupported)

    def ignore(self, place: str) -> None:
        self._ignored[without_index(place)] = None

    def _refuse(self, refusal: Refusal, *, is_vital: bool = False) -> None:
        """What belongs to the conversation is never passed over: the policy would answer another one."""
        is_flood = len(self._unsupported) >= MAX_PASSED_OVER
        if is_vital or is_flood or self._is_strict or refusal.param.startswith(CONVERSATION):
            raise refusal
        self._unsupported.append(refusal)

    def take(self, sent: FieldValue) -> ReadFields:
        """An object's fields that are acted on. Null says nothing. Raises ``Refusal``."""
        rules = self._fields[_INDEX.sub("[]", sent.place)]
        taken: dict[str, FieldValue] = {}
        for name, field in sent.members():
            rule = rules.get(name)
            if rule is None:
                self._refuse(field.fault("is a field that this gateway does not know, so it is not passed over"))
                continue
            if field.value is None:
                continue
            if isinstance(rule, Read):
                taken[name] = field
            elif isinstance(rule, Decided) and not _is_one_of(field.value, rule.idle):
                self.ignore(field.place)
            elif isinstance(rule, Only) and not _is_one_of(field.value, rule.values):
                self._refuse(field.fault(rule.why), is_vital=rule.is_vital)
        return ReadFields(sent, taken)


def _is_one_of(value: JSON, values: tuple[JSON, ...]) -> bool:
    """True is not 1 here."""
    return any(isinstance(value, bool) == isinstance(one, bool) and value == one for one in values)
