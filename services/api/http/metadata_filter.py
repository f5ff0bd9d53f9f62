"""Selecting jobs by their metadata: `?metadata[team]=search`, as often as wanted; all of them must fit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, model_validator

from services.state.jobs import JobRecord

_ASKED = re.compile(r"metadata\[(.*)\]")


class Labelled(BaseModel):
    """The parameters of a route that also selects by metadata."""

    @model_validator(mode="before")
    @classmethod
    def _leave_labels(cls, parameters: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in parameters.items() if not is_label(name)}


def is_label(parameter: str) -> bool:
    return _ASKED.fullmatch(parameter) is not None


def asked(parameters: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Name -> value, of the parameters of a request."""
    return {match[1]: value for name, value in parameters if (match := _ASKED.fullmatch(name))}


def fits(job: JobRecord, wanted: Mapping[str, str]) -> bool:
    labels: dict[str, Any] = job.spec_data.get("metadata") or {}
    return all(labels.get(name) == value for name, value in wanted.items())
