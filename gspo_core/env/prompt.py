"""The first messages of an episode, from the task, what ``reset`` returned, and the class docstring.

Rule: what ``reset`` returns is joined to the content of the last message with no separator, so that the prompt has the
tokens that TRL gives it. The task is never changed: the same one serves all members of a group.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import cast

from gspo_core.json_value import JSON
from gspo_core.messages import Content, ContentPart, Message


def first_messages(task: Mapping[str, JSON], observation: object, system_prompt: str | None) -> list[Message]:
    """Raises ``ValueError`` where the prompt or the observation has another form than messages or text."""
    messages = _base(task.get("prompt"))
    if observation is not None:
        last = messages[-1]
        messages[-1] = {**last, "content": _join(last.get("content"), observation)}
    if system_prompt and messages[0].get("role") != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def docstring_prompt(cls: type) -> str | None:
    """The class docstring as system prompt; None if there is none or if a dataclass generated it."""
    text = inspect.getdoc(cls)
    generated = dataclasses.is_dataclass(cls) and text is not None and text.startswith(f"{cls.__name__}(")
    return None if generated else (text or None)


def _base(prompt: JSON) -> list[Message]:
    if prompt is None:
        return [{"role": "user", "content": ""}]
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and prompt and all(isinstance(item, dict) and "role" in item for item in prompt):
        return cast(list[Message], [{**item} for item in prompt if isinstance(item, dict)])
    raise ValueError(f"the task's prompt must be text or a list of messages, not {type(prompt).__name__}")


def _join(content: Content | None, observation: object) -> Content:
    if isinstance(observation, str) and (content is None or isinstance(content, str)):
        return (content or "") + observation
    return _parts(content) + _parts(observation)


def _parts(content: object) -> list[ContentPart]:
    if content is None or content == "":
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        return list(content)
    raise ValueError(f"reset must return text, None or a list of content parts, not {type(content).__name__}")
