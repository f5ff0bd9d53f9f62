"""How clients write an answer into their history with more than they were told: its stop text, and words behind it.

Rule: such a message is the answer, as far as it begins with it, and the rest is read and not trained. Only behind words
can there be more: behind calls nothing but the stop text. It knows an answer by its digest and its length.
"""

from __future__ import annotations

from gspo_core.messages import Message
from services.episodes.canonical import of_beginning


def words_behind(message: Message, answer: bytes, num_chars: int, stop_text: str) -> str | None:
    """What a message of the assistant says behind the answer with this digest and so many characters of text.

    None where it does not begin with that answer, or where nobody could tell: an answer of no words is known by the
    stop text that ended it alone."""
    digest, words = of_beginning(message, num_chars)
    if digest != answer:
        return None
    behind = _behind_stop_text(words, stop_text)
    if message.get("tool_calls"):
        return None if behind is None or behind.strip() else words
    return None if behind is None and not num_chars else words


def added(words: str, stored: str, stop_text: str) -> str:
    """What of ``words``, which stand behind an answer as it was told, does not stand in the text that is stored."""
    place = stored.find(stop_text) if stop_text else -1
    behind = _behind_stop_text(words, stop_text)
    if place < 0:
        there = stored[len(stored.rstrip()) :]
    elif behind is not None:
        words, there = behind, stored[place:].partition(stop_text.strip())[2]
    else:
        there = "" if stop_text.strip() else stored[place:]
    return words.removeprefix(there)


def _behind_stop_text(words: str, stop_text: str) -> str | None:
    """None where they do not begin with it, blanks aside."""
    bare, begun = stop_text.strip(), words.lstrip()
    return begun.removeprefix(bare) if bare and begun.startswith(bare) else None
