"""The real functions against the twin, step by step: random trainers, workers, zombies, deaths and resends.

Every rule does the same to both and compares what they answer or refuse; after every step both are looked at from all
sides. A difference means that one of the two is wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from redis import Redis
from redis.exceptions import ResponseError

from gspo_core.types import EpisodeKey, Split
from services import functions
from services.bus import Bus
from services.queue_records import Append, EpisodeLease
from services.redis_server import RedisServer, connect
from services.refusals import Refused
from services.store import Claim, Store
from services.twin import TwinBus, TwinStore, World

pytestmark = pytest.mark.every_server

JOB = "job_model"
LEASE_S = 30.0
RUNS, STEPS = 70, 80
"""As many steps as hypothesis makes of them; the test counts."""
WORKERS = ("ann", "ben", "eve")
AnyBus = Bus | TwinBus


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Side:
    """One of the two implementations; the names that it hands out are its own."""

    bus: AnyBus
    store: Store | TwinStore
    clock: Clock
    claims: dict[str, Claim]
    tokens: dict[str, str]


async def answer(call: Awaitable[Any]) -> Any:
    """What came back, or the class of the refusal: their texts may differ."""
    try:
        return await call
    except Refused as refusal:
        return type(refusal)


class QueueModel(RuleBasedStateMachine):
    """``servers`` and ``loop`` are set by the test before it runs the machine."""

    url: ClassVar[str]
    num_steps: ClassVar[int] = 0

    trainers = Bundle("trainers")
    leases = Bundle("leases")
    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.redis = connect(self.url)
        self.loop.run_until_complete(self.redis.flushall())
        clock, world = Clock(), World()
        self.clock = clock
        self.real = Side(Bus(self.redis, lease_s=LEASE_S, clock=clock), Store(self.redis, clock=clock), clock, {}, {})
        self.twin = Side(TwinBus(world, lease_s=LEASE_S, clock=clock), TwinStore(world, clock=clock), clock, {}, {})
        self.payload = 0
        self.num_leases = 0

    def teardown(self) -> None:
        self.loop.run_until_complete(self.redis.aclose())
        self.loop.close()

    def both(self, call: Callable[[Side], Awaitable[Any]]) -> tuple[Any, Any]:
        real, twin = (self.loop.run_until_complete(answer(call(side))) for side in (self.real, self.twin))
        return real, twin

    def same(self, call: Callable[[Side], Awaitable[Any]]) -> Any:
        real, twin = self.both(call)
        assert real == twin
        return real

    # Trainers

    @initialize(target=trainers)
    def begin(self) -> str:
        self.loop.run_until_complete(self.real.store.load_functions())
        for side in (self.real, self.twin):
            self.loop.run_until_complete(side.store.create_job("{}", job_id=JOB))
        return self._claim()

    def _claim(self) -> str:
        name = f"trainer-{len(self.real.claims)}"
        for side in (self.real, self.twin):
            claim = self.loop.run_until_complete(side.store.claim_job(name))
            assert claim is not None
            side.claims[name] = claim
        return name

    @rule(target=trainers)
    def another_trainer_takes_over(self) -> str:
        newest = f"trainer-{len(self.real.claims) - 1}"
        for side in (self.real, self.twin):
            self.loop.run_until_complete(side.store.release_job(JOB, side.claims[newest].token))
        return self._claim()

    @rule(
        trainer=trainers,
        group=st.integers(0, 5),
        size=st.integers(1, 3),
        reserve=st.sampled_from([0, 8]),
        budget=st.sampled_from([None, None, 40]),
    )
    def dispatch(self, trainer: str, group: int, size: int, reserve: int, budget: int | None) -> None:
        self.same(
            lambda side: side.bus.dispatch(
                JOB,
                side.claims[trainer].token,
                group,
                size=size,
                split=Split.TRAIN,
                task_index=group + 7,
                environment=group % 2,
                bytes_per_episode=reserve,
                budget_bytes=budget,
            )
        )

    @rule(
        trainer=trainers,
        groups=st.lists(st.integers(0, 5), max_size=3),
        reason=st.sampled_from(["trained", "evaluated", "dropped_stale"]),
    )
    def commit(self, trainer: str, groups: list[int], reason: str) -> None:
        self.same(lambda side: side.bus.commit(JOB, side.claims[trainer].token, 1, groups, reason=reason))

    # Workers

    @rule(target=leases, worker=st.sampled_from(WORKERS))
    def join(self, worker: str) -> tuple[str, str]:
        name = f"{worker}-{self.num_leases}"
        self.num_leases += 1
        for side in (self.real, self.twin):
            side.tokens[name] = self.loop.run_until_complete(side.bus.join(worker))
        return worker, name

    @rule(lease=leases)
    def beat(self, lease: tuple[str, str]) -> None:
        self.same(lambda side: side.bus.beat(lease[0], side.tokens[lease[1]]))

    @rule(lease=leases)
    def leave(self, lease: tuple[str, str]) -> None:
        self.same(lambda side: side.bus.leave(lease[0], side.tokens[lease[1]]))

    @rule(target=held, lease=leases, limit=st.integers(0, 4))
    def lease(self, lease: tuple[str, str], limit: int) -> tuple[str, list[EpisodeLease]]:
        worker, name = lease
        found = self.same(lambda side: side.bus.lease(JOB, worker, side.tokens[name], limit))
        return name, found

    @rule(
        one=held,
        choice=st.integers(0, 3),
        steps=st.lists(st.tuples(st.integers(-1, 1), st.booleans(), st.booleans()), min_size=1, max_size=3),
        version=st.sampled_from([None, 0, 1, 2, 3]),
        attempt=st.sampled_from([0, 0, 0, -1, 1]),
    )
    def append(
        self,
        one: tuple[str, list[EpisodeLease]],
        choice: int,
        steps: list[tuple[int, bool, bool]],
        version: int | None,
        attempt: int,
    ) -> None:
        """Segments after what is there, again what is there, beyond it, with the same or another content."""
        name, episodes = one
        if not episodes:
            return
        key = episodes[choice % len(episodes)].key
        view = self._view(key)
        present = view.num_segments if view else episodes[0].num_segments
        number = max(0, (view.attempt if view else 0) + attempt)
        appends = []
        for shift, is_other, final in steps:
            index = max(0, present + shift)
            text = f"{key}:{number}:{index}" + ("!" if is_other and shift < 0 else "")
            appends.append(Append(key, number, index, text.encode(), final, version))
            present += shift == 0
        self.same(lambda side: side.bus.append(JOB, side.tokens[name], appends))
        # Said again, as a client whose reply was lost does.
        self.same(lambda side: side.bus.append(JOB, side.tokens[name], appends))

    def _view(self, key: EpisodeKey) -> Any:
        groups = self.loop.run_until_complete(self.twin.bus.groups(JOB))
        found = [group.episodes for group in groups if group.group == key.group]
        return found[0][key.member] if found and key.member < len(found[0]) else None

    @rule(one=held, choice=st.integers(0, 3))
    def finish(self, one: tuple[str, list[EpisodeLease]], choice: int) -> None:
        name, episodes = one
        if episodes:
            key = episodes[choice % len(episodes)].key
            view = self._view(key)
            if view is not None:
                last = Append(key, view.attempt, view.num_segments, b"the end", final=True, version=5)
                self.same(lambda side: side.bus.append(JOB, side.tokens[name], [last]))

    @rule(one=held, choice=st.integers(0, 3), attempt=st.integers(0, 3))
    def restart(self, one: tuple[str, list[EpisodeLease]], choice: int, attempt: int) -> None:
        name, episodes = one
        if episodes:
            key = episodes[choice % len(episodes)].key
            self.same(lambda side: side.bus.restart(key, side.tokens[name], attempt))

    @rule(one=held)
    def hand_back(self, one: tuple[str, list[EpisodeLease]]) -> None:
        name, episodes = one
        keys = [lease.key for lease in episodes]
        self.same(lambda side: side.bus.hand_back(JOB, side.tokens[name], keys))

    @rule(one=held, choice=st.integers(0, 3))
    def fail(self, one: tuple[str, list[EpisodeLease]], choice: int) -> None:
        name, episodes = one
        if episodes:
            key = episodes[choice % len(episodes)].key
            self.same(lambda side: side.bus.fail(key, side.tokens[name], "it broke"))

    @rule(one=held)
    def read(self, one: tuple[str, list[EpisodeLease]]) -> None:
        for lease in one[1]:
            self.same(lambda side: side.bus.read_episode(lease.key))  # noqa: B023

    @rule(looks=st.integers(1, 4))
    def time_passes_and_somebody_looks_for_the_dead(self, looks: int) -> None:
        for _ in range(looks):
            self.clock.now += LEASE_S / 2.5
            self.same(lambda side: side.bus.reap(JOB))

    # What can be seen

    @invariant()
    def both_show_the_same(self) -> None:
        if not self.real.claims:
            return
        type(self).num_steps += 1
        real, twin = (self.loop.run_until_complete(everything(side.bus)) for side in (self.real, self.twin))
        assert real == twin
        counters = dict(real[0])
        assert counters.pop("dispatched") == sum(counters.values())


async def _segments(bus: AnyBus) -> list[bytes]:
    return [payload for _, payload in await bus.read_segments(JOB, "0", count=10_000, block_ms=0)]


async def _letters(bus: AnyBus) -> list[tuple[object, ...]]:
    return [(one.key, one.attempt, one.num_segments, one.num_failures) for one in await bus.dead_letters(JOB)]


async def everything(bus: AnyBus) -> list[Any]:
    """What can be seen of the queue, the counters first."""
    return await asyncio.gather(
        bus.counters(JOB),
        bus.usage(JOB),
        bus.groups(JOB),
        bus.ready_groups(JOB),
        bus.open_groups(JOB),
        _segments(bus),
        _letters(bus),
    )


@pytest.fixture
def model(redis_server: RedisServer) -> Iterator[type[QueueModel]]:
    """On a server that does not flush: what is compared is what functions answer, not what survives."""
    with Redis.from_url(redis_server.url) as redis:
        redis.config_set("appendfsync", "no")
        QueueModel.url, QueueModel.num_steps = redis_server.url, 0
        yield QueueModel
        redis.config_set("appendfsync", "always")


@pytest.mark.timeout(900)  # a minute of CPU; on a busy machine the round trips take several
def test_the_real_functions_do_what_the_twin_does(model: type[QueueModel]) -> None:
    run_state_machine_as_test(
        model,
        settings=settings(
            max_examples=RUNS,
            stateful_step_count=STEPS,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(f"{model.num_steps} steps, each compared")
    assert model.num_steps >= 5000


# What must not happen, as changes of the functions that would let it happen.
BROKEN = {
    "a zombie appends": (
        'not state or token == "" or state.token ~= token or append.attempt',
        "not state or append.attempt",
    ),
    "a resend is stored twice": ("if append.index < state.segments then", "if append.index < state.segments - 1 then"),
    "a new attempt is taken for a resend": (
        "state.attempt, state.segments, state.bytes, state.version = attempt, 0, 0, nil",
        "state.attempt, state.bytes, state.version = attempt, 0, nil",
    ),
    "a former trainer commits": ('return refuse("FENCED", "commit of step " .. step)', ""),
    "the budget is looked at too late": ("charged + size * reserve > budget", "charged > budget"),
    "what came back goes last": ("local score = WITHOUT_TOKENS + state.sequence", "local score = state.sequence"),
    "a group is ready too early": ("if group.done == group.size then", "if group.done == group.size - 1 then"),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("what", BROKEN)
def test_the_comparison_finds_functions_that_are_broken(
    what: str, model: type[QueueModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    right, wrong = BROKEN[what]
    source, digest = functions.library()
    assert source.count(right) == 1
    mutated = source.replace(right, wrong).replace(digest, "0" * len(digest))
    with Redis.from_url(model.url) as redis:
        redis.function_load(mutated, replace=True)  # it is a program, only not the right one
    monkeypatch.setattr(functions, "library", lambda: (mutated, "0" * len(digest)))
    with pytest.raises((AssertionError, ResponseError, ExceptionGroup)):
        run_state_machine_as_test(
            model,
            settings=settings(
                max_examples=RUNS,
                stateful_step_count=STEPS,
                deadline=None,
                derandomize=True,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )
