"""A program that is spoken to by the Agent Client Protocol: what it is asked, and what it may do, as a job says it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, StringConstraints

from gspo_core.documented import Documented
from gspo_core.placeholders import TASK_NAME, names_in

MAX_PROMPT_CHARS = 65_536


def _prompt(text: str) -> str:
    for name in names_in(text):
        if not TASK_NAME.fullmatch(name):
            raise ValueError(f"there is no {{{{{name}}}}}; use {{{{task}}}} or {{{{task.FIELD}}}}")
    return text


class AcpSpec(Documented):
    """The program of `command` speaks the Agent Client Protocol, version 1, on its stdin and stdout."""

    prompt: (
        Annotated[str, StringConstraints(min_length=1, max_length=MAX_PROMPT_CHARS), AfterValidator(_prompt)] | None
    ) = None
    """What it is asked; `{{task}}` and `{{task.FIELD}}` become the task. Left out: the texts in the task's field
    `prompts` one after another, or the text in its field `prompt` or `question`, else the task as JSON."""
    permissions: Literal["allow", "reject"] = "allow"
    """What it is answered when it asks whether it may use a tool."""
    login: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None
    """The method of authentication that is named to it before its session begins, such as `gemini-api-key`. Left out:
    none."""
