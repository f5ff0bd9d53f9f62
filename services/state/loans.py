"""Episodes that agents fetch by themselves: offered, lent, kept by signs of life, ended.

The rule: an agent that is lent an episode has it until it ends the loan or its worker does; an episode that was lent
once begins a new attempt before it is offered again, which the worker sees to. No clock decides here: the watcher of a
loan counts its signs of life (``Loan.beats``).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from enum import StrEnum

from gspo_core.types import EpisodeKey
from services.state.functions import Functions
from services.state.keys import bus_keys

ANY = -math.inf, math.inf
"""Every reward."""


class LoanState(StrEnum):
    LENT = "lent"
    FINISHED = "finished"
    """The agent has played the episode to its end."""
    RELEASED = "released"
    """The agent gave it back."""
    EXPIRED = "expired"
    """The agent gave no sign of life."""


@dataclass(frozen=True, slots=True)
class Loan:
    """The hold that one agent has of one attempt."""

    id: str
    key: EpisodeKey
    attempt: int
    beats: int
    """Signs of life so far."""
    length_s: float
    """Between two of them at most."""
    state: LoanState
    reward: float | None = None
    """Told with the end."""
    till: str = ""
    """The time of day until which no further sign is needed, for people."""
    num_refused: int = 0
    """Ends that were refused for their reward."""


@dataclass(frozen=True, slots=True)
class Lent:
    loan: Loan
    told: bytes
    """The worker's offer, for the agent."""
    is_again: bool
    """It was lent by this id before."""


class Loans:
    def __init__(self, functions: Functions) -> None:
        self._functions = functions

    # the worker's side

    async def offer(
        self, key: EpisodeKey, token: str, attempt: int, told: bytes, reward_range: tuple[float, float] = ANY
    ) -> None:
        """Harmless where this attempt was offered before, lent or not. ``reward_range``: of what may be told with its
        end. Raises Fenced."""
        bounds = [str(bound) if math.isfinite(bound) else "" for bound in reward_range]
        await self._functions.call("offer", bus_keys(key.job), token, _member(key), attempt, told, *bounds)

    async def offers(self, job: str) -> dict[EpisodeKey, Loan | None]:
        """All episodes that are offered, each with the hold that an agent has of it, if one has."""
        episodes, rows = await self._functions.call("loans", bus_keys(job))
        offers: dict[EpisodeKey, Loan | None] = {_key(job, episode.decode()): None for episode in episodes}
        return offers | {loan.key: loan for loan in (_read(job, row) for row in rows)}

    async def expire(self, loan: Loan, token: str) -> bool:
        """Whether it is over now; not where it gave a sign of life meanwhile, or the episode is another worker's."""
        return bool(await self._functions.call("expire_loan", bus_keys(loan.key.job), token, loan.id, loan.beats))

    # the agent's side

    async def lend(self, job: str, id: str, length_s: float, till: str = "") -> Lent | None:
        """The episode that was offered first; None if none waits. The same ``id`` names the same loan."""
        found = await self._functions.call("lend", bus_keys(job), id, _seconds(length_s), till)
        return None if found is None else Lent(_read(job, found[0]), found[1], bool(found[2]))

    async def extend(self, job: str, id: str, length_s: float | None = None, till: str = "") -> Loan:
        """A sign of life. Raises Fenced where the loan is over."""
        length = "" if length_s is None else _seconds(length_s)
        return _read(job, await self._functions.call("extend_loan", bus_keys(job), id, length, till))

    async def finish(self, job: str, id: str, reward: float | None = None) -> Loan:
        """The episode was played to its end. Raises Fenced where the loan is over, and OutOfRange where it goes on
        because of the reward."""
        return await self._end(job, id, LoanState.FINISHED, "" if reward is None else json.dumps(reward))

    async def release(self, job: str, id: str) -> Loan:
        """Another agent is to play it. Raises Fenced where the loan is over."""
        return await self._end(job, id, LoanState.RELEASED, "")

    async def _end(self, job: str, id: str, state: LoanState, reward: str) -> Loan:
        return _read(job, await self._functions.call("end_loan", bus_keys(job), id, str(state), reward))


def _member(key: EpisodeKey) -> str:
    return f"{key.group}:{key.member}"


def _key(job: str, member: str) -> EpisodeKey:
    group, number = member.split(":")
    return EpisodeKey(job, int(group), int(number))


def _seconds(length_s: float) -> str:
    return f"{length_s:.3f}"


def _read(job: str, row: list[bytes | int]) -> Loan:
    id, episode, attempt, beats, length_s, state, reward, till, num_refused = (
        value.decode() if isinstance(value, bytes) else str(value) for value in row
    )
    return Loan(
        id=id,
        key=_key(job, episode),
        attempt=int(attempt),
        beats=int(beats),
        length_s=float(length_s),
        state=LoanState(state),
        reward=float(reward) if reward else None,
        till=till,
        num_refused=int(num_refused),
    )
