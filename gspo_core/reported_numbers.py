"""Bounds on the numbers that an environment reports: how many, how they are named, how large they are.

Rule: what is beyond a bound is refused by its name, and neither cut nor dropped. An author meets the bound where the
number is reported; whoever takes numbers from a process that a policy may have reached asks ``check_all`` again. What a
name says is nobody's to judge: it may carry whatever the environment can see, up to the bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from gspo_core.invariants import MOST_SIZE

# Of an episode. They are kept with it: in Redis, in the log of its step, and on its page.
MOST_NUMBERS = 128
MOST_NAME_CHARS = 128
_SHOWN_CHARS = 40


class BeyondBounds(ValueError):
    """The message names the number, or begins with the name's beginning where that is what is wrong."""


def check_name(name: str) -> None:
    if not name or len(name) > MOST_NAME_CHARS or not name.isprintable():
        raise BeyondBounds(
            f"{name[:_SHOWN_CHARS]!r} is no name of a number: 1 to {MOST_NAME_CHARS} printable characters, "
            f"not {len(name)}"
        )


def check_size(name: str, value: float) -> None:
    """What is not finite has rules of its own elsewhere."""
    if math.isfinite(value) and abs(value) > MOST_SIZE:
        raise BeyondBounds(f"{name} is {value:g}, beyond {MOST_SIZE:g}")


def check_room(name: str, held: Mapping[str, float]) -> None:
    if name not in held and len(held) >= MOST_NUMBERS:
        raise BeyondBounds(f"{name} would be one more than {MOST_NUMBERS} numbers of an episode")


def check_all(values: Mapping[str, float]) -> None:
    if len(values) > MOST_NUMBERS:
        names = ", ".join(name[:_SHOWN_CHARS] for name in list(values)[:3])
        raise BeyondBounds(f"{len(values)} numbers of an episode ({names}, …), more than {MOST_NUMBERS}")
    for name, value in values.items():
        check_name(name)
        check_size(name, value)
