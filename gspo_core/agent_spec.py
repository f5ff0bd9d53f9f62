"""How the agent of a job is started: the part of the job specification that says so.

Rule: exactly one way. It starts nothing and judges no address (``gspo_core.outbound`` does, where it is connected to).
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from gspo_core.documented import Documented
from gspo_core.outbound import MAX_URL_CHARS

# Of a command: more than any shell would be given, less than what makes a record large.
MAX_WORDS, MAX_WORD_CHARS = 64, 4096

_Word = Annotated[str, StringConstraints(min_length=1, max_length=MAX_WORD_CHARS, pattern=r"^[^\x00]+$")]


class AgentSpec(Documented):
    """How the agent is started, once an episode. With nothing given, `ref` names a function `run(task, llm)`."""

    url: Annotated[str, StringConstraints(max_length=MAX_URL_CHARS, pattern=r"^https?://[^\s]+$")] | None = None
    """A service that is sent the task, a base URL and a key with POST, and plays the episode before it answers.
    `ref` names what has the tasks."""
    command: Annotated[tuple[_Word, ...], Field(min_length=1, max_length=MAX_WORDS)] | None = None
    """A program and its arguments, started with the task, base URL and key in environment variables. `ref` names what
    has the tasks."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.url is not None and self.command is not None:
            raise ValueError("give url or command, not both")
        return self
