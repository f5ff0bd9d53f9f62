"""Problems in the values of a specification, told in its author's own keys.

One rule: a problem names the key, says what is allowed there, and for an unknown key what was probably meant. It is
made from a validator's report and the data that was validated; it knows neither files nor HTTP.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import AliasChoices, AliasPath, BaseModel, ValidationError
from pydantic_core import ErrorDetails

KeyPath = tuple[str | int, ...]

# More than a user reads. A body can hold a hundred thousand, and guessing what each was meant to be takes a while.
MAX_PROBLEMS = 100

# Reports that only repeat another one: a default that could not be made, a list counted without its bad items.
_ECHOES = frozenset({"default_factory_not_called"})
_CODES = {"extra_forbidden": "unknown_field", "missing": "missing_field"}


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong."""

    code: str
    """`unknown_field`, `missing_field` or `validation_failed`."""
    path: KeyPath
    message: str

    @property
    def key(self) -> str:
        """The path as people write it: `environments[0].weight`."""
        return spell(self.path)


def spell(path: Iterable[str | int]) -> str:
    """`("environments", 0, "weight")` as `environments[0].weight`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def near(word: str, known: Iterable[str]) -> str:
    """A remark for the end of a sentence about an unknown word: what it may have been meant to be."""
    known = sorted(known)
    matches = difflib.get_close_matches(word.lower(), known, n=3, cutoff=0.6)
    if matches:
        return "; did you mean " + " or ".join(matches) + "?"
    return f"; known are {', '.join(known)}" if known else ""


def problems(error: ValidationError, model: type[BaseModel], data: object) -> list[Problem]:
    """What `error` says about `data` validated as `model`, unknown keys first: they explain most of the rest."""
    return problems_of(error.errors(include_url=False, include_context=False), model, data)


def problems_of(reports: Sequence[ErrorDetails], model: type[BaseModel], data: object) -> list[Problem]:
    """The same from reports of the validator that the caller collected; at most the first ``MAX_PROBLEMS``."""
    reports = reports[:MAX_PROBLEMS]
    inner = {report["loc"] for report in reports}
    found = []
    for report in reports:
        loc = report["loc"]
        covered = any(loc != other and loc == other[: len(loc)] for other in inner)
        if report["type"] in _ECHOES or (covered and report["type"] == "too_short"):
            continue
        kind, message = report["type"], report["msg"]
        if kind == "missing" and isinstance(loc[-1], int):
            kind, message = "too_short", "list has too few items"
        found.append(_problem(kind, _written_path(loc, data), message, report["input"], model))
    found = list(dict.fromkeys(found))
    return sorted(found, key=lambda problem: problem.code != "unknown_field")


def _problem(kind: str, path: KeyPath, message: str, given: object, model: type[BaseModel]) -> Problem:
    code = _CODES.get(kind, "validation_failed")
    key = spell(path)
    if code == "unknown_field":
        return Problem(code, path, f"{key} is not a field" + near(str(path[-1]), _names_at(model, path[:-1])))
    if code == "missing_field":
        return Problem(code, path, f"{key} is required")
    # what is a list in a file is a tuple in Python
    message = message.removeprefix("Value error, ").replace("valid tuple", "valid list").replace("Tuple", "List")
    message = message[:1].lower() + message[1:] if kind != "value_error" else message
    shown = f" (it is {given!r:.80})" if kind != "value_error" and isinstance(given, str | int | float | None) else ""
    return Problem(code, path, f"{key}: {message}{shown}" if key else message)


def _written_path(loc: Sequence[str | int], data: object) -> KeyPath:
    """The part of a report's location that exists in the data, with the key that is missing from it at most.

    Validators add names of their own, of union members for example.
    """
    path: list[str | int] = []
    for part in loc:
        if isinstance(data, Mapping) and isinstance(part, str):
            path.append(part)
            if part not in data:
                break
            data = data[part]
        elif isinstance(data, list | tuple) and isinstance(part, int) and part < len(data):
            path.append(part)
            data = data[part]
    return tuple(path)


def _names_at(model: type[BaseModel], path: KeyPath) -> set[str]:
    """Keys that may be written at `path` of a `model`."""
    models = {model}
    for part in path:
        if isinstance(part, str):
            models = {
                found
                for one in models
                for name, field in one.model_fields.items()
                if part in _spellings(name, field.alias, field.validation_alias)
                for found in _models_in(field.annotation)
            }
    return {
        spelling
        for one in models
        for name, field in one.model_fields.items()
        for spelling in _spellings(name, field.alias, field.validation_alias)
    }


def _spellings(name: str, *aliases: str | AliasPath | AliasChoices | None) -> set[str]:
    spellings = {name}
    for alias in aliases:
        choices = alias.choices if isinstance(alias, AliasChoices) else [alias]
        spellings |= {choice for choice in choices if isinstance(choice, str)}
    return spellings


def _models_in(annotation: Any) -> set[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {annotation}
    return {found for argument in typing.get_args(annotation) for found in _models_in(argument)}
