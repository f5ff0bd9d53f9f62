"""Who waits for a recovery waits for all that was struck, and for no longer than it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.chaos.patience import Name, State, held_back, recovered, struck_of

ONE, OTHER = ("job", "0:1"), ("job", "0:2")


def state(segments: int = 0, furthest: int = 0, *, token: str = "t", done: bool = False, **more: Any) -> State:
    return {"segments": segments, "furthest": furthest, "token": token, "done": done, **more}


def test_struck_is_who_is_held() -> None:
    now = {ONE: state(2, 1), OTHER: state(1, 4), ("job", "0:3"): state(token=""), ("job", "0:4"): state(done=True)}
    assert struck_of(now) == {ONE: 2, OTHER: 4}


def test_recovered_is_who_got_further_than_ever_or_has_ended() -> None:
    struck = {ONE: 2}
    assert held_back(struck, {ONE: state(2)}) == [ONE]
    assert held_back(struck, {ONE: state(0, 2, token="")}) == [ONE]  # it began again
    assert held_back(struck, {ONE: state(2, 2)}) == [ONE]
    for better in (state(3), state(0, 3), state(2, done=True), state(2, waits=7)):
        assert held_back(struck, {ONE: better}) == []
    assert held_back(struck, {}) == []


class Recovering:
    """It is looked at as it was at one moment after the other, and then stays so."""

    def __init__(self, *states: Mapping[Name, State], served_after: int = 0) -> None:
        self._states = list(states)
        self._served_after = served_after
        self.num_looks = self.num_asked = 0

    async def look(self) -> Mapping[Name, State]:
        self.num_looks += 1
        return self._states[min(self.num_looks, len(self._states)) - 1]

    async def serves(self) -> bool:
        self.num_asked += 1
        return self.num_asked > self._served_after


async def test_it_is_waited_until_each_has_recovered_and_the_gateway_answers() -> None:
    both = {ONE: state(1), OTHER: state(1)}
    what = Recovering(both, both | {ONE: state(2)}, {ONE: state(2), OTHER: state(1, done=True)}, served_after=2)
    assert await recovered(what.look, what.serves, 30.0) == []
    assert (what.num_looks, what.num_asked) == (5, 3)


async def test_what_does_not_recover_in_time_is_told() -> None:
    what = Recovering({ONE: state(1), OTHER: state(1)}, {ONE: state(2), OTHER: state(1)})
    assert await recovered(what.look, what.serves, 0.5) == [OTHER]
    idle = Recovering({}, served_after=10**6)
    assert await recovered(idle.look, idle.serves, 0.2) == [("gateway", "")]
