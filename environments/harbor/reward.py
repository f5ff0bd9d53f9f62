"""What the tests of a task wrote: ``reward.txt``, a number, or ``reward.json``, numbers by their names.

Rule: as Harbor does it, the text comes first. Of several numbers the one called ``reward`` is the reward and the others
are reported beside it; without one of that name only a single number is unambiguous.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

MOST_BYTES = 1 << 16
REWARD = "reward"


class UnreadableReward(Exception):
    """The tests wrote something else than numbers: their fault, not the policy's."""


@dataclass(frozen=True)
class Judgement:
    reward: float
    others: Mapping[str, float] = field(default_factory=dict)


def read(file: Callable[[str], bytes | None]) -> Judgement | None:
    """From the files of these names. None where nothing was written. Raises ``UnreadableReward``."""
    text = _text(file("reward.txt"))
    if text is not None and text.strip():
        try:
            return Judgement(_number("reward.txt", float(text)))
        except ValueError:
            raise UnreadableReward(f"reward.txt is {text.strip()[:80]!r}, not a number") from None
    text = _text(file("reward.json"))
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError:
        raise UnreadableReward("reward.json is not JSON") from None
    return _judgement(found)


def _judgement(found: object) -> Judgement:
    if not isinstance(found, dict) or not found:
        raise UnreadableReward("reward.json is no object with numbers")
    numbers = {str(name): _number(f"{name} in reward.json", value) for name, value in found.items()}
    if REWARD not in numbers and len(numbers) > 1:
        raise UnreadableReward(f"reward.json has {sorted(numbers)}, and none is called {REWARD}")
    name = REWARD if REWARD in numbers else next(iter(numbers))
    return Judgement(numbers[name], {other: value for other, value in numbers.items() if other != name})


def _number(name: str, value: object) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise UnreadableReward(f"{name} is {value!r}, not a finite number")
    return float(value)


def _text(held: bytes | None) -> str | None:
    return None if held is None else held.decode(errors="replace")
