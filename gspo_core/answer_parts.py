"""What the client says of the API's answers in its own words: parts that the API's document leaves open, and events.

Rule: users import these from ``gspo_core.api_answers``, which is written from that document.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NotRequired, TypeAlias, TypedDict

from gspo_core.json_value import JSON
from gspo_core.messages import Message

NOT_LOADED = "it cannot be loaded: "
"""What an answer about an environment begins with where a job that names it could never begin."""

Settings: TypeAlias = dict[str, JSON]
"""By section, as in a job file."""


class EnvironmentSource(TypedDict, total=False):
    """``type`` decides which of the others are there."""

    type: str
    ref: str
    url: str
    id: str
    dataset: str
    reward: str
    tasks: list[dict[str, JSON]]
    config: dict[str, JSON]


class TrialCall(TypedDict):
    name: str | None
    arguments: JSON


TrialEntry = TypedDict(
    "TrialEntry",
    {"from": str, "text": NotRequired[str], "calls": NotRequired[list[TrialCall]], "message": NotRequired[Message]},
)
"""The policy's words (``text``, ``calls``), or a ``message`` to it."""


class RoleFields(TypedDict, total=False):
    """What processes of one role or another register with."""

    state: str | None
    job: str | None
    label: str
    """Names the weights that an engine holds."""
    jobs: list[str]
    num_episodes: int
    host: str
    device: str
    pid: int


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a job. A `gap` says that events before it are no longer kept."""

    id: str
    """Resume after it."""
    type: str
    data: Mapping[str, JSON]
