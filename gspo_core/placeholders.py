"""Placeholders in a text that a job has: `{{task}}`, `{{task.FIELD}}`, and others by name.

Rule: a text is filled once, so what is filled in is read for no placeholders.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

from gspo_core.json_value import JSON

# One way to match each text: blanks are no part of the pattern, but many of them would be tried in many ways.
PLACEHOLDER = re.compile(r"\{\{([^{}]*)\}\}")
TASK_NAME = re.compile(r"task(\.[A-Za-z0-9_-]+)*")


class NoSuchField(ValueError):
    """The text names a field that the task lacks."""


def names_in(text: str) -> list[str]:
    return [found[1].strip() for found in PLACEHOLDER.finditer(text)]


def filled(text: str, task: Mapping[str, JSON], others: Mapping[str, Callable[[], str]]) -> str:
    """``text`` with the values of the task and of ``others``. Raises ``NoSuchField``."""

    def value_of(found: re.Match[str]) -> str:
        name = found[1].strip()
        if name in others:
            return others[name]()
        value: JSON = dict(task)
        path = name.split(".")[1:]
        for part in path:
            if not isinstance(value, dict) or part not in value:
                raise NoSuchField(f"the task has no field {'.'.join(path)}, which the prompt names")
            value = value[part]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    return PLACEHOLDER.sub(value_of, text)
