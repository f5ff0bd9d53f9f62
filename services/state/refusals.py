"""The server's refusals: every refusal of a function is one of these, and then nothing was written.

Duty: the errors. The rule: an error reply of our functions begins with one upper-case word that names the class here.
It does not decide how a caller reacts.
"""

from __future__ import annotations

# How a refusal begins that is about an erased episode (`lua/queue_records.lua`).
ERASED = "erased: "


class Refused(Exception):
    """A function refused the call; ``detail`` gives the specifics."""

    @classmethod
    def of(cls, detail: str) -> Refused:
        """The refusal in the server's words: of this class, or of a more exact one."""
        return cls(detail)

    def __init__(self, detail: str = "") -> None:
        super().__init__(f"{self.advice}: {detail}" if detail else self.advice)
        self.detail = detail

    advice = "the server refused"


class Fenced(Refused):
    """The caller has lost its lease: it must drop its work and write nothing else."""

    advice = "the lease was lost; drop the work and lease again"

    @classmethod
    def of(cls, detail: str) -> Refused:
        return EpisodeErased(detail) if detail.startswith(ERASED) else cls(detail)


class EpisodeErased(Fenced):
    """The episode was erased while it was played: it has ended, for its worker too."""

    advice = "the episode was erased; drop the work"


class Gap(Refused):
    """The caller is ahead of a server that was rolled back: abandon the episode and lease it again."""

    advice = "the server holds less than the caller appended; abandon the episode and lease it again"


class Conflict(Refused):
    """The same name with other content: a caller's bug, never a resend."""

    advice = "this name was already written with different content"


class Full(Refused):
    """The byte budget is used up: dispatch again once a group has been committed."""

    advice = "the byte budget is used up; dispatch again after a commit"


class Missing(Refused):
    """The call names something that does not exist."""

    advice = "it does not exist"


class Forbidden(Refused):
    """The state machine does not allow this; ``detail`` is the current state."""

    advice = "the current state does not allow this transition"


class OutOfRange(Refused):
    """A number is not between those that ``detail`` names."""

    advice = "it is out of range"


class Damaged(Refused):
    """A record the function needs is unreadable: the job's trainer empties the queue and dispatches again."""

    advice = "a record of the queue is unreadable"


BY_WORD: dict[str, type[Refused]] = {
    "FENCED": Fenced,
    "GAP": Gap,
    "CONFLICT": Conflict,
    "FULL": Full,
    "MISSING": Missing,
    "FORBIDDEN": Forbidden,
    "RANGE": OutOfRange,
}
