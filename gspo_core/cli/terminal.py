"""Text of others on a terminal.

Rule: what a policy, an environment or a user wrote is shown, and moves no cursor, sets no title and hides nothing.
"""

from __future__ import annotations

import re

# Controls, but for line ends and tabs; and the characters that turn the direction of what follows them.
_ACTING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: str) -> str:
    """The text with everything spelled out that a terminal would act on."""
    return _ACTING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def say(*lines: str) -> None:
    """Print lines with what others wrote in them."""
    for line in lines:
        print(plain(line))


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
