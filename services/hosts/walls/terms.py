"""What is decided about a wall before it is built: ``tiers`` writes it down, ``enter`` builds it.

Rule: it is JSON, read by a program that has nothing but the standard library and this package.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypedDict

SESSIONS = "/sessions"
"""Where the folders of sessions lie inside."""


class How(StrEnum):
    """How a path is shown."""

    SYSTEM = "system"
    """Readable, if every account may read it."""
    READ = "read"
    """Readable, if the service may read it."""
    WRITE = "write"
    LINK = "link"
    EMPTY = "empty"
    """Hidden."""


Entry = tuple[How, str]
"""How (a value of ``How``) and the path, which is the same outside and inside."""


class WallPlan(TypedDict):
    """Everything that is decided about a wall."""

    parent: int
    entries: list[Entry]
    staging: str
    directory: str
    """Where the program inside begins; ``/`` if that is not shown."""
    network: bool
    own_bytes: int
    num_processes: int
    program: list[str]
    variables: dict[str, str]
    descriptors: list[int]
    """Those that the program inside inherits, beside the usual three."""
    joins: list[str]
    """The files of the control groups that all inside is in."""
