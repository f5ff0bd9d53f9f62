"""An engine is taken for seen only while new looks at it arrive; else its process asks it."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.engines.protocol import EngineInfo
from services.state.client import Away
from services.state.engine_beats import Ask
from services.state.engine_sightings import Sighting
from services.state.heard_engines import FRESH_S, HeardEngines, seldom_asked

URL = "http://e"


@dataclass
class Board:
    """What another process wrote, and a clock."""

    seen: dict[str, Sighting] = field(default_factory=dict)
    now: float = 100.0
    is_away: bool = False

    async def all(self) -> dict[str, Sighting]:
        if self.is_away:
            raise Away("redis is away")
        return self.seen

    def look(self, number: int, label: str = "job/1/1", *, answered: bool = True, seconds: float = 1.0) -> None:
        self.seen = {URL: Sighting(number=number, label=label, answered=answered)}
        self.now += seconds

    def heard(self) -> HeardEngines:
        return HeardEngines(self, lambda: self.now)


async def test_only_what_arrives_new_is_believed_and_not_for_long() -> None:
    board = Board()
    heard = board.heard()
    board.look(7)
    assert await heard.label(URL) is None, "it may be as old as Redis"
    board.look(8)
    assert await heard.label(URL) == "job/1/1"
    board.look(8, seconds=FRESH_S - 0.1)
    assert await heard.label(URL) == "job/1/1"
    board.look(8, seconds=0.2)
    assert await heard.label(URL) is None, "nobody looks any more"
    board.look(9, "job/1/2")
    assert await heard.label(URL) == "job/1/2"
    assert await heard.label("http://other") is None


async def test_an_engine_that_did_not_answer_has_to_be_asked() -> None:
    board = Board()
    heard = board.heard()
    board.look(1)
    await heard.label(URL)
    board.look(2, answered=False)
    assert await heard.label(URL) is None


async def test_what_was_heard_is_forgotten_while_redis_is_away() -> None:
    board = Board()
    heard = board.heard()
    board.look(1)
    await heard.label(URL)
    board.look(2)
    assert await heard.label(URL) == "job/1/1"
    board.is_away = True
    board.now += FRESH_S + 1
    assert await heard.label(URL) is None


async def test_a_description_is_told_again_while_the_engine_is_seen_with_the_same_weights() -> None:
    board, asked = Board(), []

    async def ask() -> EngineInfo:
        asked.append(board.seen[URL].label)
        return EngineInfo(label=board.seen[URL].label, model_path="/m")

    asks: dict[str, Ask] = {URL: ask}
    seldom = seldom_asked(asks, board.heard())[URL]
    for number in range(10):
        board.look(number)
        said = await seldom()
        assert said is not None
        assert said.model_path == "/m"
    assert len(asked) == 2, "the first look that is read is not believed"
    board.look(11, "default")
    said = await seldom()
    assert said is not None
    assert said.label == "default"
    board.look(12, answered=False)
    await seldom()
    assert len(asked) == 4
