"""Selecting jobs by their metadata: `?metadata[team]=search`, any number of times; all of them must match."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

from pydantic import BaseModel, model_validator

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
