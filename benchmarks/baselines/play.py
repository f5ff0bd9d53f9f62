"""Episodes as a rollout worker plays them, in one process, under weights whose age is set.

Rule: the worker's own attempt, ledger and chat codec, the environment's own session, the assembler's groups; only who
samples differs: all episodes of a round wait for each other, and then one pass of the sampler serves them. An episode
begins under one version and goes on under a newer one after a number of tokens that was drawn before it began, so no
switch depends on what was sampled.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from benchmarks.baselines.sampler import Request, Sampler
from gspo_core.assemble import Assembler
from gspo_core.chat import ChatCodec
from gspo_core.env import Environment
from gspo_core.spec import JobSpec
from gspo_core.types import EpisodeKey, Group, Segment, Split
from services.engine.sampling import request_seed
from services.episodes.metering import Counters
from services.episodes.outbox import Outbox
from services.episodes.policy import Sampled, Span
from services.episodes.tree import Ledger
from services.rollout.attempt import EnvironmentDriver, EpisodeAttempt
from services.state.queue import Append, Kept, LeasedEpisode, Snapshot
from services.state.retry import Retrier
from services.workers.setting import EpisodeSetting, EpisodeSpec

JOB = "baselines"
MAX_SWITCH = 20
"""An episode changes its weights after 1 to so many sampled tokens."""


@dataclass(frozen=True)
class Ages:
    """The versions of a round: an episode begins under ``first`` and ends under ``second``."""

    first: int
    second: int

    @classmethod
    def of_step(cls, step: int, staleness: int) -> Ages:
        """For the batch of a step: ``staleness`` steps old at the start of an episode, half as old at its end."""
        return cls(max(0, step - staleness), max(0, step - staleness // 2))

    @classmethod
    def sustained(cls, step: int, staleness: int) -> Ages:
        """``staleness`` steps old at the start of an episode, and one step younger at its end."""
        return cls(max(0, step - staleness), max(0, step - max(0, staleness - 1)))


def context_length(spec: JobSpec) -> int:
    """What the sampler has room for: as much as the job lets an episode have."""
    length = spec.limits.max_context_tokens
    assert length is not None
    return length


@dataclass(frozen=True)
class Task:
    group: int
    index: int
    split: Split
    size: int


class _Shelf(Outbox):
    """Where segments go instead of the queue."""

    def __init__(self, assembler: Assembler) -> None:
        self._assembler = assembler

    async def append(self, segments: Sequence[Segment], note: str = "", kept: Kept | None = None) -> None:
        for segment in segments:
            self._assembler.add(segment)


class _NoRecords:
    """No episode is ever resumed here."""

    async def read_episode(self, key: EpisodeKey) -> list[bytes]:
        raise NotImplementedError

    async def restart(self, key: EpisodeKey, token: str, attempt: int, kept: Sequence[object] = ()) -> None:
        raise NotImplementedError

    async def save_snapshot(self, key: EpisodeKey, token: str, snapshot: Snapshot) -> None:
        raise NotImplementedError

    async def read_snapshot(self, key: EpisodeKey) -> Snapshot | None:
        raise NotImplementedError

    async def await_reward(self, token: str, end: Append, kept: bytes, deadline: float) -> None:
        raise NotImplementedError


class _Round:
    """Answers when all episodes that still play have asked."""

    def __init__(self, sampler: Sampler, num_playing: int) -> None:
        self._sampler = sampler
        self._num_playing = num_playing
        self._asked: dict[EpisodeKey, tuple[int, Request, Collection[int], asyncio.Future[Sampled]]] = {}

    async def ask(self, key: EpisodeKey, version: int, request: Request, stop_ids: Collection[int]) -> Sampled:
        answer: asyncio.Future[Sampled] = asyncio.get_running_loop().create_future()
        self._asked[key] = (version, request, stop_ids, answer)
        self._serve()
        return await answer

    def leave(self) -> None:
        self._num_playing -= 1
        self._serve()

    def _serve(self) -> None:
        if not self._asked or len(self._asked) < self._num_playing:
            return
        asked = [self._asked[key] for key in sorted(self._asked)]  # not in the order in which threads came back
        self._asked = {}
        for version in sorted({one[0] for one in asked}):
            some = [one for one in asked if one[0] == version]
            answers = self._sampler.generate(version, [one[1] for one in some], some[0][2])
            for (*_, future), answer in zip(some, answers, strict=True):
                spans = (Span(0, len(answer.ids), version),)
                future.set_result(Sampled(answer.ids, answer.logprobs, spans, "baselines"))


class _Seat:
    """The policy as one episode sees it."""

    def __init__(self, round_: _Round, key: EpisodeKey, ages: Ages, seed: int) -> None:
        self._round, self._key, self._ages = round_, key, ages
        self._seed = request_seed(seed, str(key))
        self._num_drawn = 0
        self._switch = MAX_SWITCH * 1000
        if ages.first != ages.second:
            self._switch = random.Random(f"switch/{seed}/{key}").randint(1, MAX_SWITCH)

    async def sample(
        self,
        input_ids: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float,
        stop_token_ids: Collection[int],
        prefer_engine: str = "",
        sampling_seed: int | None = None,
    ) -> Sampled:
        rest = self._switch - self._num_drawn
        version, most = (
            (self._ages.first, min(max_new_tokens, rest)) if rest > 0 else (self._ages.second, max_new_tokens)
        )
        request = Request(list(input_ids), most, self._seed, self._num_drawn, temperature)
        answer = await self._round.ask(self._key, version, request, stop_token_ids)
        self._num_drawn += len(answer.ids)
        return answer


def play(
    spec: JobSpec,
    environment: Environment,
    codec: ChatCodec,
    sampler: Sampler,
    tasks: Sequence[Task],
    ages: Ages,
) -> list[Group]:
    """All episodes of ``tasks``, to their ends."""
    assembler = Assembler()
    asyncio.run(_play(spec, environment, codec, sampler, tasks, ages, assembler))
    groups = (assembler.group(JOB, task.group, task.split, task.index, task.size) for task in tasks)
    return [group for group in groups if group is not None]


async def _play(
    spec: JobSpec,
    environment: Environment,
    codec: ChatCodec,
    sampler: Sampler,
    tasks: Sequence[Task],
    ages: Ages,
    assembler: Assembler,
) -> None:
    """Returns nothing: asyncio would write out what its main task returns, every array of it."""
    round_ = _Round(sampler, sum(task.size for task in tasks))
    counters = Counters()

    async def episode(task: Task, member: int) -> None:
        key = EpisodeKey(JOB, task.group, member)
        setting = EpisodeSetting(
            driver=EnvironmentDriver(),
            codec=codec,
            policy=_Seat(round_, key, ages, spec.seed),
            outbox=_Shelf(assembler),
            records=_NoRecords(),
            token="",
            retrier=Retrier(counters, random.Random(0)),
            counters=counters,
            clock=time.monotonic,
            leaving=asyncio.Event(),
        )
        try:
            await _attempt(setting, spec, environment, task, key)
        finally:
            round_.leave()

    await asyncio.gather(*(episode(task, member) for task in tasks for member in range(task.size)))


async def _attempt(
    setting: EpisodeSetting, spec: JobSpec, environment: Environment, task: Task, key: EpisodeKey
) -> None:
    lease = LeasedEpisode(
        key=key,
        attempt=0,
        num_segments=0,
        split=task.split,
        task_index=task.index,
        environment=0,
        group_size=task.size,
    )
    order = EpisodeSpec.from_spec(spec, environment, lease, context_length(spec))
    ledger = Ledger(key, 0, order.temperature)
    session = environment.session(limits=order.limits, episode_id=str(key))
    try:
        outcome = await EpisodeAttempt(setting, order, session, ledger).play()
    finally:
        await session.close()
    await setting.outbox.append([ledger.close(outcome)])
