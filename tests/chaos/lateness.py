"""Problems that more time might have mended, apart from those that no time mends.

What is lost, doubled or wrong is so however fast the machine is. What was not over, or left late, may say no more than
that two cores were busy: whoever judges a change plays the same seed once more before that counts.
"""

from __future__ import annotations

from collections.abc import Iterable

LATE = 3
"""The status of a run of which nothing is wrong but that something came late."""


class Late(str):
    """What is wrong, where more time might have mended it."""

    __slots__ = ()


def status(problems: Iterable[str]) -> int:
    found = list(problems)
    return 0 if not found else LATE if all(isinstance(one, Late) for one in found) else 1
