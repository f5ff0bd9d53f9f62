"""Keeps what an environment shows within bounds, in a way that the policy can see.

Rule: a mark in the text says where it was cut and how much is missing. The cut depends on the text alone, so a replayed
episode is cut alike. The first prompt is never cut: a task that does not fit the context is for its author to shorten.
"""

from __future__ import annotations

from collections.abc import Sequence

from gspo_core.messages import Message

# Of what is kept, the share that is taken from the beginning; the rest is the end, where results and errors often are.
_HEAD = 0.75


def within(messages: Sequence[Message], most_chars: int) -> tuple[list[Message], int]:
    """The messages with at most so many characters of text each, and how many of them were cut."""
    cut = [_message(message, most_chars) for message in messages]
    return [message for message, _ in cut], sum(was_cut for _, was_cut in cut)


def _message(message: Message, most_chars: int) -> tuple[Message, bool]:
    content = message.get("content")
    if content is None:
        return message, False
    if isinstance(content, str):
        if len(content) <= most_chars:
            return message, False
        return {**message, "content": _text(content, most_chars)}, True
    text = "".join(part.get("text", "") for part in content)
    if len(text) <= most_chars:
        return message, False
    others = [part for part in content if not part.get("text")]
    return {**message, "content": [{"type": "text", "text": _text(text, most_chars)}, *others]}, True


def _text(text: str, most_chars: int) -> str:
    head = int(_HEAD * most_chars)
    tail = most_chars - head
    return f"{text[:head]}\n[... {len(text) - most_chars} characters left out ...]\n{text[len(text) - tail :]}"
