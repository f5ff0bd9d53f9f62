"""How the server says no: every refusal of a function is one of these, and nothing was written.

Duty: the errors. The rule: an error reply of our functions begins with one upper-case word, which names the class here.
It does not decide what a caller does about one.
"""

from __future__ import annotations


class Refused(Exception):
    """A function refused; ``detail`` says what it refused."""

    def __init__(self, detail: str = "") -> None:
        super().__init__(f"{self.advice}: {detail}" if detail else self.advice)
        self.detail = detail

    advice = "the server refused"


class Fenced(Refused):
    """The caller's lease was lost: it must drop its work and write nothing else."""

    advice = "the lease is lost, drop the work and lease again"


class Gap(Refused):
    """The caller is ahead of the server, which was rolled back: abandon the episode and lease it again."""

    advice = "the server holds less than the caller appended, abandon the episode and lease again"


class Conflict(Refused):
    """The same name with another content: a bug of a caller, never a resend."""

    advice = "the same name was written with another content"


class Full(Refused):
    """The budget of bytes is taken: dispatch again when a group was committed."""

    advice = "the budget of bytes is taken, dispatch again after a commit"


class Missing(Refused):
    """What the call names does not exist."""

    advice = "it does not exist"


class Forbidden(Refused):
    """The state machine does not lead there; ``detail`` is the current state."""

    advice = "the transition is not in the table; the current state is"


class Damaged(Refused):
    """A record that the function needs cannot be read: the job's trainer empties the queue and dispatches again."""

    advice = "a record of the queue cannot be read"


BY_WORD: dict[str, type[Refused]] = {
    "FENCED": Fenced,
    "GAP": Gap,
    "CONFLICT": Conflict,
    "FULL": Full,
    "MISSING": Missing,
    "FORBIDDEN": Forbidden,
}
