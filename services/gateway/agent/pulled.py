"""Agents that fetch their episodes by themselves: offered here, waited for, and watched while one has the episode.

Rule: an agent has its episode for as long as it gives signs of life, and each request for a turn is one. When it has
ended without a word, or gives the episode back, the attempt is over and another agent gets a new one with a new key,
so two never play together. An episode that nobody fetches waits, and that time does not count.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import NoReturn, TypeAlias

import msgspec

from gspo_core.environment_contract import Llm, Start, Witness
from gspo_core.json_value import JSON
from gspo_core.types import NOTHING, EpisodeKey, Evidence
from services.episodes.metering import Meter
from services.gateway.agent.episode import AgentEpisode
from services.gateway.agent.played import PlayedSession
from services.gateway.agent.rewards import Source
from services.hosts.session import SessionLost
from services.state.loans import Loan, Loans, LoanState
from services.state.retry import Retrier
from services.workers.setting import EpisodeSetting

Offers: TypeAlias = Mapping[EpisodeKey, Loan | None]
"""Those of a job, each with the hold that an agent has of it, if one has."""
# How often the loans of a job are looked at; one read serves all its episodes here.
LOOK_S = 0.5


class LoanTerms(msgspec.Struct, frozen=True):
    """What an agent is told with its loan."""

    task: msgspec.Raw
    base_url: str
    api_key: str
    model: str
    reward_key: str


class LoanBoard:
    """What is offered of the jobs that are served here, and lent, as it was a moment ago."""

    def __init__(self, loans: Loans, *, look_s: float = LOOK_S) -> None:
        self.loans = loans
        self._look_s = look_s
        self._looking: dict[str, asyncio.Task[Offers]] = {}

    async def next(self, job: str, retrier: Retrier) -> Offers:
        """After a while. All who wait for a job's share one read."""
        looking = self._looking.get(job)
        if looking is None:
            looking = asyncio.create_task(self._look(job, retrier), name=f"loans of {job}")
            self._looking[job] = looking
            looking.add_done_callback(lambda done: self._forget(job, done))
        return await asyncio.shield(looking)

    async def _look(self, job: str, retrier: Retrier) -> Offers:
        await asyncio.sleep(self._look_s)
        return await retrier.keep_trying(self.loans.offers, job)

    def _forget(self, job: str, done: asyncio.Task[Offers]) -> None:
        self._looking.pop(job, None)
        if not done.cancelled():
            done.exception()  # whoever waited has it


class PulledAgent:
    """A ``PlayedSession`` around that of the tasks: ``start`` offers the episode, ``ended`` awaits who fetches it."""

    def __init__(
        self,
        session: PlayedSession,
        setting: EpisodeSetting,
        board: LoanBoard,
        episode: AgentEpisode,
        meter: Meter,
        rewards_from: Source | None = None,
    ) -> None:
        self._is_judged = rewards_from == "judge"
        self._session = session
        self._setting = setting
        self._board = board
        self._episode = episode
        self._meter = meter
        self._llm: Llm | None = None
        self._reward: float | None = None
        self._waiting = contextlib.ExitStack()

    @property
    def metrics(self) -> Mapping[str, float]:
        return self._session.metrics

    def keep_evidence(self, most_bytes: int) -> None:
        if isinstance(self._session, Witness):
            self._session.keep_evidence(most_bytes)

    @property
    def evidence(self) -> Evidence:
        return self._session.evidence if isinstance(self._session, Witness) else NOTHING

    def offer(self, llm: Llm) -> None:
        self._llm = llm
        self._session.offer(llm)

    async def start(self, task: Mapping[str, JSON], seed: int) -> Start:
        assert self._llm is not None
        llm, setting, episode = self._llm, self._setting, self._episode
        self._waiting.enter_context(self._meter.unattended())
        start = await self._session.start(task, seed)
        handed_out = msgspec.Raw((await self._session.handed_out()).encode())
        told = msgspec.json.encode(LoanTerms(handed_out, llm.base_url, llm.api_key, llm.model, llm.reward_key))
        given = episode.key, setting.token, episode.attempt, told, (episode.payer.lowest, episode.payer.highest)
        await setting.retrier.keep_trying(self._board.loans.offer, *given)
        return start

    async def handed_out(self) -> str:
        return await self._session.handed_out()

    async def ended(self) -> None:
        loan = await self._next()
        while loan is None:
            loan = await self._next()
        self._waiting.close()
        self._setting.counters.add("loans/lent")
        await self._watch(loan, self._setting.clock)

    async def _watch(self, loan: Loan, clock: Callable[[], float]) -> None:
        signs, since = self._signs(loan), clock()
        while loan.state is LoanState.LENT:
            if self._signs(loan) != signs or self._meter.is_sampling:
                signs, since = self._signs(loan), clock()
            elif clock() - since > loan.length_s and await self._expire(loan):
                self._count_refused(loan)
                self._lose(f"gave no sign of life for {loan.length_s:g}s", "loans/expired")
            loan = await self._next() or self._gone()
        self._count_refused(loan)
        if loan.state is not LoanState.FINISHED:
            self._lose("gave the episode back", "loans/released")
        if self._is_judged and loan.reward is not None:
            self._episode.count_refused_reward()
        else:
            self._reward = loan.reward

    def _count_refused(self, loan: Loan) -> None:
        """With its end, which has all of them."""
        for _ in range(loan.num_refused):
            self._episode.count_refused_reward()

    def _gone(self) -> NoReturn:
        raise SessionLost("host", "its offer is gone: its group is settled, or another gateway holds it")

    def _lose(self, why: str, counter: str) -> NoReturn:
        self._setting.counters.add(counter)
        raise SessionLost("agent", f"the agent that had it {why}")

    async def _next(self) -> Loan | None:
        """The hold that an agent has of this attempt."""
        key, attempt = self._episode.key, self._episode.attempt
        offers = await self._board.next(key.job, self._setting.retrier)
        loan = offers.get(key)
        if key not in offers or (loan is not None and loan.attempt != attempt):
            self._gone()
        return loan

    def _signs(self, loan: Loan) -> tuple[int, int]:
        return loan.beats, self._episode.num_requests

    async def _expire(self, loan: Loan) -> bool:
        return await self._setting.retrier.keep_trying(self._board.loans.expire, loan, self._setting.token)

    async def score(self) -> tuple[float, dict[str, float]]:
        """What the agent told with its end stands, as what it posts does."""
        return await self._session.score() if self._reward is None else (self._reward, {})


async def has_agent(board: LoanBoard, setting: EpisodeSetting, key: EpisodeKey, attempt: int) -> bool:
    """Whether an agent has this attempt, or has played it to its end."""
    loan = (await setting.retrier.keep_trying(board.loans.offers, key.job)).get(key)
    return loan is not None and loan.attempt == attempt and loan.state in (LoanState.LENT, LoanState.FINISHED)
