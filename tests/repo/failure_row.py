"""A row of docs/failures.md: for one cause, what it costs the episode, its group and the job.

Rule: a row names the causes of the code that it explains (``failure_causes`` lists them all) and the tests that show
what it says. Words are for users; no cause is explained without its code.
"""

from __future__ import annotations

from dataclasses import dataclass

NOTHING = "—"
YES, NO = "yes", "no"
LATER = "yes, as it goes on"


@dataclass(frozen=True)
class Row:
    cause: str
    names: tuple[str, ...]
    """``kind:name`` of the causes that it covers."""
    episode: str
    group: str
    job: str
    trained: str
    shown_by: tuple[str, ...] = ()
    """``test_file.py::test_name``."""


AGAIN = "begins again, `limits.retries` (2) times; then `env_error`, without a reward"
WITHOUT = "goes on without the member; see below for how many it needs"
MEMBER = "counts it as a member"
GOES_ON = "goes on where it was, with every stored token"
