"""Of the hostile world: each attack was tried, and none got what it tried to get. What it may have done to others is
judged as everything else that befalls them is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tests.chaos.evidence import Evidence, lines


def no_attack_succeeded(evidence: Evidence) -> Iterator[str]:
    for path in sorted(evidence.work.glob("attacks-*")):
        for one in lines(path):
            if one["told"] == "harm":
                yield f"{one['attack']} of run {one['run']} got {one['got']}"


def tried(evidence: Evidence) -> Counter[str]:
    """How often each was begun."""
    found = (one for path in evidence.work.glob("attacks-*") for one in lines(path))
    return Counter(one["attack"] for one in found if one["told"] == "begun")
