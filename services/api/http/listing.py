"""What a list is asked for: jobs by their metadata (`?metadata[team]=search`, any number of times; all of them must
match), and a page of what is whole in memory.

Rule: a cursor that names no item of the list is refused, never taken for its beginning or its end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from pydantic import BaseModel, model_validator

from services.api.http.errors import RequestRefused
from services.api.views.store_views import Listed
from services.state.jobs import JobRecord

V = TypeVar("V")

_ASKED = re.compile(r"metadata\[(.*)\]")


class Labelled(BaseModel):
    """The parameters of a route that also selects by metadata."""

    @model_validator(mode="before")
    @classmethod
    def _leave_labels(cls, parameters: Mapping[str, V]) -> dict[str, V]:
        return {name: value for name, value in parameters.items() if not is_label(name)}


def is_label(parameter: str) -> bool:
    return _ASKED.fullmatch(parameter) is not None


def asked(parameters: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Value by name, from the parameters of a request."""
    return {match[1]: value for name, value in parameters if (match := _ASKED.fullmatch(name))}


def fits(job: JobRecord, wanted: Mapping[str, str]) -> bool:
    labels: dict[str, str] = job.spec_data.get("metadata") or {}
    return all(labels.get(name) == value for name, value in wanted.items())


def after_id(items: Sequence[Listed], after: str | None, limit: int) -> Sequence[Listed]:
    """Up to ``limit`` + 1 items behind ``after``. Raises RequestRefused 400."""
    if after is None:
        return items[: limit + 1]
    ids = [one.id for one in items]
    if after not in ids:
        raise RequestRefused(400, "invalid_cursor", f"{after[:80]!r} is not in this list", param="after")
    start = ids.index(after) + 1
    return items[start : start + limit + 1]
