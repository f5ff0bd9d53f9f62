"""An episode as server-sent events, turn by turn while it is played.

One rule: a client's position is the attempt and the number of tokens that had arrived with what it has seen, so any API
process can take over from any other, and everything sent comes from the queue or the batch log. Turns are sent as they
arrive, also where branches grow at the same time; one that grows is sent again as a whole, under a higher position.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypedDict

from gspo_core.log.transcript import ShownTurn
from services.api.http.sse import RETRY_MS, frame
from services.api.views.episode_views import EpisodeDetail
from services.api.views.history import EpisodeForgotten, EpisodeNotKept, GroupNotKept
from services.state.client import Away

_POSITION = re.compile(r"([0-9]{1,9})-([0-9]{1,12})")
# How soon an appended segment is shown.
LOOK_S = 0.3
_OVER = frozenset({"done", "given_up", "trained"})

Position = tuple[int, int]
EpisodeState: TypeAlias = tuple[int, int, str] | Literal["settled"]
"""Attempt, number of segments and stage of an open episode: differs when the episode has changed."""
Look = Callable[[], Awaitable[EpisodeState]]
Arrivals = Mapping[int, int]
"""By turn, the position that a client has with it."""
Read = Callable[[], Awaitable[tuple[EpisodeDetail, Arrivals]]]


class NewAttempt(TypedDict):
    attempt: int


class EpisodeOutcome(TypedDict):
    status: str
    stop_reason: str | None
    reward: float | None
    reward_parts: dict[str, float]


@dataclass(frozen=True, slots=True)
class Happening:
    type: Literal["attempt", "turn", "outcome"]
    data: NewAttempt | ShownTurn | EpisodeOutcome
    id: str = ""


def parse_position(text: str) -> Position | None:
    """None if ``text`` is not a position."""
    match = _POSITION.fullmatch(text)
    return (int(match[1]), int(match[2])) if match else None


def happenings(detail: EpisodeDetail, arrivals: Arrivals, after: Position | None) -> Iterator[Happening]:
    """Everything that is new to a client that has seen the episode up to ``after``."""
    if after is not None and detail.attempt > after[0]:
        yield Happening("attempt", {"attempt": detail.attempt}, f"{detail.attempt}-0")
    known = after[1] if after is not None and after[0] == detail.attempt else 0
    for turn in sorted(detail.turns, key=lambda one: arrivals[one["turn"]]):
        if arrivals[turn["turn"]] > known:
            yield Happening("turn", turn, f"{detail.attempt}-{arrivals[turn['turn']]}")
    if detail.status in _OVER:
        outcome: EpisodeOutcome = {
            "status": detail.status,
            "stop_reason": detail.stop_reason,
            "reward": detail.reward,
            "reward_parts": detail.reward_parts,
        }
        yield Happening("outcome", outcome)


async def frames(
    read: Read, look: Look, stopping: asyncio.Event, clock: Callable[[], float], after: Position | None, ping_s: float
) -> AsyncIterator[bytes]:
    """Until the episode is over, or is gone."""
    yield b"retry: %d\n\n" % RETRY_MS
    seen: EpisodeState | None = None
    quiet_since = clock()
    with contextlib.suppress(Away):
        while not stopping.is_set():
            now = await look()
            if seen is None or now != seen:
                seen = now
                try:
                    detail, arrivals = await read()
                except (EpisodeForgotten, EpisodeNotKept, GroupNotKept) as error:
                    yield frame("gone", {"message": str(error)}) + frame("end", {})
                    return
                for one in happenings(detail, arrivals, after):
                    yield frame(one.type, one.data, one.id or None)
                    after = parse_position(one.id) or after
                    quiet_since = clock()
                after = after or (detail.attempt, 0)
                if detail.status in _OVER:
                    yield frame("end", {})
                    return
            if clock() - quiet_since >= ping_s:
                quiet_since = clock()
                yield b": ping\n\n"
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), LOOK_S)
