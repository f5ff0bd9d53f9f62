"""A whole training loop in one process: the real trainer on real Redis, an engine that computes what the model says,
and a player whose episodes are a function of group, member and weights alone.

The engine is the scripted one; its language is replaced by the model whose weights it was told to load. So what is
sampled depends on the content of these weights, not on the name of a version, the order of requests or the hour: two
runs from the same seeds are the same run, or one of them is wrong. ``plain_loop`` is the other one, without any of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from redis.asyncio import Redis

from gspo_core.advantage import group_advantages
from gspo_core.batch import TrainSequence
from gspo_core.codec import encode
from gspo_core.learner import Learner
from gspo_core.spec import JobSpec
from gspo_core.types import Outcome, Segment, StopReason
from services.engines.protocol import EngineError
from services.engines.sglang import EngineClient
from services.files.batch_log import BatchLog
from services.files.checkpoints import CheckpointStore
from services.files.job_dir import JobDir, JobsDir
from services.files.origin import bring
from services.files.recording import Rewards
from services.files.weights import WeightStore
from services.state.queue import Append, Bus, Fenced, LeasedEpisode
from services.state.store import Claim, JobNotFound, Store
from services.trainer.building import make_learner
from services.trainer.fleet.engines import EnginePool
from services.trainer.groups.intake import Intake
from services.trainer.groups.run_context import Services
from services.trainer.groups.tasks import TaskSchedule
from services.trainer.ranks.learner import AnyLearner
from services.trainer.run import JobRun
from services.trainer.telling.status import JobStatusBoard
from services.trainer.worker import TrainerWorker
from tests.apparatus import small_qwen3
from tests.apparatus.scripted_engine import ScriptedEngine, ScriptedTransport, language
from tests.apparatus.small_qwen3 import next_logprobs
from tests.core.learner_support import VOCABULARY
from tests.patience import HANG_S
from tests.services.trainer.trainer_kit import InProcess, stop

NUM_TASKS = 5
NUM_TURNS = 2
ACTIONS = 5
STOP_ID = 3
DEADLINE_S = HANG_S
LEASE_S = 30.0
URL = "http://engine"


def loop_spec(model_dir: Path, **changes: Any) -> JobSpec:
    given: dict[str, Any] = {
        "model": str(model_dir),
        "environments": [{"ref": "made:Here"}],
        "rollout": {"group_size": 3, "max_staleness": 0},
        "groups_per_step": 2,
        "checkpoint_every": 2,
        "checkpoints": {"keep_versions": 1000},  # the engine is asked what it holds after its trainer has died
        "steps": 5,
        "seed": 11,
        "optimizer": {"lr": 3e-3},
        "objective": {"minibatches": 2},
        "resources": {"device": "cpu"},
    }
    return JobSpec.model_validate(given | changes)


# The engine's language


def _read(state: bytes, token_id: int, weights: str) -> bytes:
    return state + np.int32(token_id).tobytes()


def sample_turn(weights: str, prompt: Sequence[int]) -> tuple[list[int], list[float]]:
    """What the model says after ``prompt``, and how probable it was; the dice are a function of the prompt."""
    dice = random.Random(np.array(prompt, np.int32).tobytes())
    ids, logprobs = list(prompt), []
    while len(ids) - len(prompt) < ACTIONS and (ids == list(prompt) or ids[-1] != STOP_ID):
        values = next_logprobs(weights, ids)
        ids.append(dice.choices(range(VOCABULARY), weights=np.exp(values).tolist())[0])
        logprobs.append(float(values[ids[-1]]))
    return ids[len(prompt) :], logprobs


@contextlib.contextmanager
def spoken_by_the_model(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Scripted engines say what the model would say whose weights they hold."""
    with patch.context() as patched:
        patched.setattr(language, "read", _read)
        patched.setattr(language, "logprobs", lambda state, weights, _t, _v: next_logprobs(weights, state))
        yield
    small_qwen3.forget()


# Episodes


def prompt_of(task: int, group: int, member: int) -> list[int]:
    return [4 + task, 10 + group % 40, 50 + member]


def observation_of(turn: int) -> list[int]:
    return [5 + turn, 9]


def reward_of(actions: Sequence[int]) -> float:
    """The share of even ids."""
    return sum(token % 2 == 0 for token in actions) / len(actions)


# The plain loop


def plain_loop(spec: JobSpec, directory: Path, *, learner: Learner | None = None) -> Learner:
    """Sample with the present weights, train, again: no queue, no engine, no version, no process."""
    learner = learner or make_learner(spec)
    size, count = spec.rollout.group_size, spec.groups_per_step
    schedule = TaskSchedule(spec.seed, [NUM_TASKS], [1.0])
    for step in range(learner.counters.num_steps, spec.steps):
        learner.save_weights(weights := directory / f"plain-{step}")
        batch: list[TrainSequence] = []
        for group in range(step * count, (step + 1) * count):
            task = schedule.task(group).index
            prompts = [prompt_of(task, group, member) for member in range(size)]
            batch += [replace(one, group=group) for one in _plain_group(str(weights), prompts, spec)]
        learner.step(batch)
    return learner


def _plain_group(weights: str, prompts: Sequence[list[int]], spec: JobSpec) -> list[TrainSequence]:
    episodes = [_plain_episode(weights, prompt) for prompt in prompts]
    rewards = [
        reward_of([token for token, acts in zip(ids, mask, strict=True) if acts]) for ids, mask, _, _ in episodes
    ]
    advantages = group_advantages(rewards, spec.objective.advantage)
    return [
        TrainSequence(
            token_ids=np.array(ids, np.int32),
            action_mask=np.array(mask),
            behavior_logprobs=np.array(logprobs, np.float32),
            turn_ids=np.array(turns, np.int32),
            staleness=np.zeros(len(ids), np.int32),
            advantages=np.where(mask, advantage, 0.0).astype(np.float32),
        )
        for (ids, mask, logprobs, turns), advantage in zip(episodes, advantages, strict=True)
    ]


def _plain_episode(weights: str, prompt: list[int]) -> tuple[list[int], list[bool], list[float], list[int]]:
    ids, mask, logprobs, turns = list[int](), list[bool](), list[float](), list[int]()
    for turn in range(NUM_TURNS):
        said = prompt if turn == 0 else observation_of(turn)
        answer, values = sample_turn(weights, [*ids, *said])
        ids += [*said, *answer]
        mask += [False] * len(said) + [True] * len(answer)
        logprobs += [0.0] * len(said) + values
        turns += [turn] * (len(said) + len(answer))
    return ids, mask, logprobs, turns


# The service around the trainer


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Loop:
    """A job, its queue and its engine; who trains it is up to the test."""

    redis: Redis
    store: Store
    bus: Bus
    clock: Clock
    job: str
    job_dir: Path
    spec: JobSpec
    transport: ScriptedTransport
    http: httpx.AsyncClient
    played: Counter[int] = field(default_factory=Counter)
    """Episodes of each group."""

    def client(self, url: str = URL) -> EngineClient:
        return EngineClient(url, self.http)

    def run_of(
        self,
        claim: Claim,
        *,
        guard: Callable[[Any], Any] = lambda part: part,
        make: Callable[[], AnyLearner] | None = None,
        **changes: Any,
    ) -> JobRun:
        """As the trainer's process builds it; ``guard`` may come between the run and what it needs."""
        store, bus = guard(self.store), guard(self.bus)
        weights = guard(WeightStore(JobDir(self.job_dir)))
        engines = EnginePool(
            store, claim.job_id, claim.token, weights, [URL], self.client, lease_s=LEASE_S, **changes.pop("engines", {})
        )
        parts: dict[str, Any] = {
            "bus": bus,
            "store": store,
            "status": JobStatusBoard(store, claim),
            "engines": engines,
            "intake": Intake(bus, claim.job_id),
            "weights": weights,
            "batch_log": guard(BatchLog(JobDir(self.job_dir))),
            "checkpoints": guard(CheckpointStore(JobDir(self.job_dir))),
            "job_dir": JobDir(self.job_dir),
        }
        return JobRun(claim, self.spec, Services(**(parts | changes)), make or (lambda: make_learner(self.spec)))

    def worker(self, name: str = "trainer", *, make: Callable[[], AnyLearner] | None = None) -> TrainerWorker:
        """A trainer whose attempts run in this process."""
        attempts = InProcess(self.store, lambda claim, _spec: self.run_of(claim, make=make))
        return TrainerWorker(self.store, self.bus, name, attempts, lease_s=LEASE_S)

    async def claim(self) -> Claim:
        while (claim := await self.store.jobs.claim("trainer")) is None:
            self.clock.now += LEASE_S / 5
        return claim

    async def play(self) -> None:
        """Everything that is leased out, until cancelled.

        A fork is played beside its parent: under one name the two would fence each other for ever.
        """
        name = f"player of {self.job}"
        while True:
            with contextlib.suppress(Fenced):
                token = await self.bus.join(name)
                while True:
                    with contextlib.suppress(JobNotFound):  # a server that was wiped is given its jobs back later
                        await self.store.environments.describe(self.job, 0, DESCRIPTION)
                    await self.bus.beat(name, token)
                    await self.bus.reap(self.job)
                    for lease in await self.bus.lease(self.job, name, token, 8):
                        await self._play(lease, token)
                    await asyncio.sleep(0.02)

    async def _play(self, lease: LeasedEpisode, token: str) -> None:
        key, history, appends = lease.key, list[int](), list[Append]()
        actions = list[int]()
        for turn in range(NUM_TURNS):
            said = prompt_of(lease.task_index, key.group, key.member) if turn == 0 else observation_of(turn)
            history += said
            for segment in await self._sample(lease, turn, history, said, len(appends)):
                taken = segment.token_ids[segment.action_mask].tolist()
                history += taken
                actions += taken
                appends.append(_append(lease, segment))
        outcome = Outcome(StopReason.COMPLETED, reward_of(actions))
        appends[-1] = _append(lease, replace(segment, outcome=outcome))
        await self.bus.append(self.job, token, appends[lease.num_segments :])
        self.played[key.group] += 1

    async def _sample(
        self, lease: LeasedEpisode, turn: int, history: list[int], said: list[int], index: int
    ) -> list[Segment]:
        while True:
            with contextlib.suppress(EngineError):
                answer = await self.client().generate(
                    history, max_new_tokens=ACTIONS, temperature=1.0, stop_token_ids=[STOP_ID]
                )
                if answer.finish_reason != "abort" and answer.spans[0].label.startswith(f"{self.job}/"):
                    break
            await asyncio.sleep(0.01)
        segments = []
        for span in answer.spans:
            before = said if not segments else []
            ids = answer.output_ids[span.start : span.end]
            segments.append(
                Segment(
                    key=lease.key,
                    attempt=lease.attempt,
                    branch=0,
                    index=index + len(segments),
                    turn=turn,
                    version=int(span.label.rpartition("/")[2]),
                    temperature=1.0,
                    engine_id=URL,
                    token_ids=np.array([*before, *ids], np.int32),
                    action_mask=np.array([False] * len(before) + [True] * len(ids)),
                    behavior_logprobs=np.array(
                        [0.0] * len(before) + answer.logprobs[span.start : span.end], np.float32
                    ),
                )
            )
        return segments


DESCRIPTION = {"num_tasks": {"train": NUM_TASKS, "eval": 1}}


def _append(lease: LeasedEpisode, segment: Segment) -> Append:
    return Append(lease.key, lease.attempt, segment.index, encode(segment), segment.is_final, segment.version)


@contextlib.asynccontextmanager
async def a_loop(redis: Redis, root: Path, spec: JobSpec, patch: pytest.MonkeyPatch) -> AsyncIterator[Loop]:
    """A job that waits for its trainer, an engine that runs, a player that plays."""
    clock = Clock()
    bus, store = Bus(redis), Store(redis, lease_s=LEASE_S, clock=clock, max_attempts=10_000, jobs_dir=JobsDir(root))
    await bus.load_functions()
    job = (await store.jobs.create(spec.model_dump_json())).id
    await store.environments.describe(job, 0, DESCRIPTION)
    engine = ScriptedEngine(spec.model, vocab_size=VOCABULARY, script=lambda ids: sample_turn(engine.weights, ids)[0])
    transport = ScriptedTransport({"engine": engine})
    async with httpx.AsyncClient(transport=transport) as http:
        loop = Loop(redis, store, bus, clock, job, root / job, spec, transport, http)
        with spoken_by_the_model(patch):
            tasks = [asyncio.create_task(engine.run(), name="engine"), asyncio.create_task(loop.play(), name="player")]
            try:
                yield loop
            finally:
                for task in tasks:
                    if task.done():
                        task.result()
                    await stop(task)


# What is compared


Hook = Callable[[JobRun, int], Awaitable[None]]


def after_each_step(patch: pytest.MonkeyPatch) -> list[Hook]:
    """What is put in here is done after each step, before the next one begins."""
    original, hooks = JobRun._after_step, list[Hook]()

    async def hooked(self: JobRun, *args: Any) -> None:
        await original(self, *args)
        for one in hooks:
            await one(self, self._lineage.step)

    patch.setattr(JobRun, "_after_step", hooked)
    return hooks


def fingerprint(learner: Learner) -> str:
    """Of all that training has made: weights, moments and counters, to the last bit."""
    digest = hashlib.sha256(repr(learner.counters).encode())
    for name, parameter in learner._policy.named_parameters():
        digest.update(name.encode() + parameter.detach().numpy().tobytes())
        for key, value in sorted(learner._optimizer.state[parameter].items()):
            digest.update(key.encode() + value.numpy().tobytes())
    return digest.hexdigest()


def saved(loop: Loop) -> Learner:
    """The learner of the newest checkpoint."""
    learner = make_learner(loop.spec)
    learner.load_state(CheckpointStore(JobDir(loop.job_dir)).newest_first()[0].learner_dir)
    return learner


# Death


class Killed(BaseException):
    """The process is gone; what it had in memory is lost."""


# What a trainer tells those who outlive it. Between two of these it may die at any moment, and nobody sees which.
WRITES = {
    *("begin_epoch", "write", "collect", "dispatch", "seal", "commit", "update_progress", "set_status"),
    *("VersionTable.next", "VersionTable.publish", "Fleet.bind", "Fleet.mark", "MetricSeries.add", "EventLog.add"),
}


class Fate:
    """Decides at every write of a trainer whether it dies there: before, or just after."""

    def __init__(self, seed: int, probability: float) -> None:
        self._random, self._probability = random.Random(seed), probability
        self.points: list[str] = []
        """Where trainers died."""

    def guard(self, life: Life, part: Any) -> Any:
        return _Mortal(self, life, part)

    def strikes(self, life: Life, point: str) -> None:
        """A dead trainer does nothing more, whatever coroutine of it still runs."""
        if life.is_over:
            raise Killed(point)
        if WRITES & {point.split()[-1], point.rpartition(".")[2]} and self._random.random() < self._probability:
            life.is_over = True
            self.points.append(point)
            raise Killed(point)


@dataclass
class Life:
    """Of one trainer."""

    is_over: bool = False


class _Mortal:
    """Everything of ``part``, with a chance to die around each call."""

    def __init__(self, fate: Fate, life: Life, part: Any) -> None:
        self._fate, self._life, self._part = fate, life, part

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._part, name)
        if isinstance(self._part, Store) and not callable(value):
            return _Mortal(self._fate, self._life, value)
        if not callable(value):
            return value
        point = f"{type(self._part).__name__}.{name}"

        async def wait_for(answer: Any) -> Any:
            result = await answer
            self._fate.strikes(self._life, f"after {point}")
            return result

        def call(*args: Any, **kwargs: Any) -> Any:
            self._fate.strikes(self._life, f"before {point}")
            result = value(*args, **kwargs)
            if asyncio.iscoroutine(result):
                return wait_for(result)
            self._fate.strikes(self._life, f"after {point}")
            return result

        return call


# Trainers


async def serve(loop: Loop, make: Callable[[], AnyLearner] | None = None, *, ends: str = "succeeded") -> None:
    """A trainer's process, until the job is over. ``make`` makes its learner."""
    end = asyncio.Event()
    worker = loop.worker("trainer", make=make)
    serving = asyncio.create_task(worker.run(end))
    async with asyncio.timeout(DEADLINE_S):
        while not (await loop.store.jobs.get(loop.job)).status.is_terminal and not serving.done():
            await asyncio.sleep(0.05)
        end.set()
        await serving
    job = await loop.store.jobs.get(loop.job)
    assert job.status == ends, job.status_reason


async def serve_although_killed(
    loop: Loop, fate: Fate, wiped_after: set[int], make: Callable[[], AnyLearner] | None = None
) -> int:
    """One trainer after the other, each until it dies; after some deaths Redis is empty too. Returns how many."""
    for number in range(200):
        claim = await loop.claim()
        try:
            async with asyncio.timeout(DEADLINE_S):
                await loop.run_of(claim, guard=partial(fate.guard, Life()), make=make).run()
        except (Killed, Fenced):
            if number in wiped_after:
                await loop.redis.flushall()
            continue
        return number + 1
    raise AssertionError(f"200 trainers did not finish: {fate.points}")


def child_spec(
    parent: Loop, step: int, *, same_batches: bool = False, fed: Mapping[str, Any] | None = None, **changes: Any
) -> JobSpec:
    at = {"job": parent.job, "step": step, "same_batches": same_batches, **(fed or {})}
    return JobSpec.model_validate(parent.spec.model_dump() | {"parent": at} | changes)


async def fork_of(parent: Loop, spec: JobSpec, rewards: Rewards | None = None) -> Loop:
    """As the API makes it: what it needs is brought before it is accepted."""
    assert spec.parent is not None
    job = f"{parent.job}f"
    ours = JobDir(parent.job_dir.parent / job)
    bring(JobDir(parent.job_dir), ours, spec.parent, rewards)
    await parent.store.jobs.create(spec.model_dump_json(), job_id=job)
    await parent.store.environments.describe(job, 0, DESCRIPTION)
    return replace(parent, job=job, job_dir=ours.path, spec=spec)
