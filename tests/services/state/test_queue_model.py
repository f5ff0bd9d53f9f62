"""The real functions against the twin, step by step: random trainers, workers, zombies, deaths and resends.

Every rule does the same to both and compares what they answer or refuse; after every step both are looked at from all
sides. A difference means that one of the two is wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any, ClassVar

import pytest
from redis import Redis

from gspo_core.types import EpisodeKey, Split
from services.state import functions
from services.state.client import RedisFault
from services.state.queue import Bus
from services.state.queue_records import Append, Kept, PostedReward, Snapshot, Stage
from services.state.refusals import Refused
from services.state.server import RedisServer, connect
from services.state.store import Claim, Store
from tests.services.state.twin_jobs import TwinStore
from tests.services.state.twin_queue import TwinBus
from tests.services.state.twin_world import TwinEpisode, World

pytestmark = pytest.mark.every_server

JOB = "job_model"
LEASE_S = 30.0
RUNS, STEPS = 63, 80
WORKERS = ("ann", "ben", "eve")
Draw = Callable[[Random], Any]
Step = Callable[..., None]
AnyBus = Bus | TwinBus


def of(*values: object) -> Draw:
    return lambda chance: chance.choice(values)


GROUP = of(*range(6))
CHOICE = of(*range(18))
"""Of whatever there is, by its remainder."""
SELDOM = of(False, False, False, False, True)
# A world that is appended beside the place where its episode is, by the choice that was drawn for its segment.
WORLD_AT = {15: -1, 17: 1}
RULES: dict[str, dict[str, Draw]] = {}


def rule(**draws: Draw) -> Callable[[Step], Step]:
    """A step of the machine, with arguments by chance."""

    def mark(step: Step) -> Step:
        RULES[step.__name__] = draws
        return step

    return mark


def some_groups(chance: Random) -> list[int]:
    return [GROUP(chance) for _ in range(chance.randint(0, 3))]


def some_appends(chance: Random) -> list[tuple[int, int, bool, bool]]:
    ahead = of(0, 0, 0, 0, 0, -1, -1, 1)
    return [(CHOICE(chance), ahead(chance), SELDOM(chance), SELDOM(chance)) for _ in range(chance.randint(1, 4))]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Side:
    """One of the two implementations; the names that it hands out are its own."""

    bus: AnyBus
    store: Store | TwinStore
    claims: list[Claim]
    tokens: dict[str, str]


async def answer(call: Awaitable[Any]) -> Any:
    """What came back, or the class of the refusal: their texts may differ."""
    try:
        return await call
    except Refused as refusal:
        return type(refusal)


class QueueModel:
    """``url`` is set by the test before it runs the machine."""

    url: ClassVar[str]
    num_steps: ClassVar[int] = 0

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.redis = connect(self.url)
        self.loop.run_until_complete(self.redis.flushall())
        clock, self.world = Clock(), World()
        self.clock = clock
        self.real = Side(Bus(self.redis, lease_s=LEASE_S, clock=clock), Store(self.redis, clock=clock), [], {})
        twin = TwinBus(self.world, lease_s=LEASE_S, clock=clock)
        self.twin = Side(twin, TwinStore(self.world), [], {})
        self.joined: dict[str, list[str]] = {worker: [] for worker in WORKERS}
        self.ever_leased: list[tuple[str, EpisodeKey]] = []
        self.unix = 1_000.0

    def play(self, seed: int) -> None:
        """STEPS steps; each run prefers other rules. A failure says what was done."""
        chance, done = Random(seed), []
        weights = [chance.choice((0.3, 1, 3)) for _ in RULES]
        self.begin()
        for _ in range(STEPS):
            [name] = chance.choices(list(RULES), weights)
            arguments = {key: draw(chance) for key, draw in RULES[name].items()}
            done.append(f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})")
            try:
                getattr(self, name)(**arguments)
                self.both_show_the_same()
            except Exception as error:
                error.add_note("\n".join([f"run {seed}, after", *done]))
                raise

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

    # What is acted on is what is really there, as the twin knows it; else most steps would do nothing.

    def _episode(self, key: EpisodeKey) -> TwinEpisode | None:
        group = self.world.queue(JOB).groups.get(key.group)
        return group.episodes[key.member] if group and key.member < len(group.episodes) else None

    def _held(self) -> list[tuple[str, EpisodeKey]]:
        """Every lease of an episode that is held: whose, and what."""
        names = {token: name for name, token in self.twin.tokens.items()}
        return [
            (names[episode.token], EpisodeKey(JOB, number, member))
            for number, group in self.world.queue(JOB).groups.items()
            for member, episode in enumerate(group.episodes)
            if episode.stage is Stage.HELD
        ]

    def _pick(self, choice: int, is_zombie: bool, num_new: int = 0) -> tuple[str, EpisodeKey]:
        """A lease that holds, after ``num_new`` segments more; or one that is over."""
        if not self._held():
            if not self.loop.run_until_complete(self.twin.bus.num_queued(JOB)):
                self._dispatch(next(group for group in count() if group not in self.world.queue(JOB).groups))
            self._lease(self.joined["ann"][-1], 3)
        held = self._held()
        # A zombie of a group that is gone is always refused; fewer of those.
        over = [one for one in self.ever_leased if one not in held and (choice % 3 == 0 or self._episode(one[1]))]
        leases = over if is_zombie and over else held
        name, key = leases[choice % len(leases)]
        if not is_zombie:
            for _ in range(num_new):
                self._append_next(name, key, version=choice % 4)
        return name, key

    def _append_next(self, name: str, key: EpisodeKey, version: int) -> None:
        episode = self._episode(key)
        assert episode is not None
        index = len(episode.segments)
        item = Append(key, episode.attempt, index, f"{key}:{episode.attempt}:{index}".encode(), False, version)
        self.same(lambda side: side.bus.append(JOB, side.tokens[name], [item]))

    # Trainers

    def begin(self) -> None:
        self.loop.run_until_complete(self.real.store.load_functions())
        for side in (self.real, self.twin):
            self.loop.run_until_complete(side.store.jobs.create("{}", job_id=JOB))
        self._claim()
        self.another_trainer_takes_over()
        for worker in (*WORKERS, *WORKERS):
            self.join(worker)

    def _claim(self) -> None:
        for side in (self.real, self.twin):
            claim = self.loop.run_until_complete(side.store.jobs.claim(f"trainer-{len(side.claims)}"))
            assert claim is not None
            side.claims.append(claim)

    @rule()
    def another_trainer_takes_over(self) -> None:
        for side in (self.real, self.twin):
            self.loop.run_until_complete(side.store.jobs.release(JOB, side.claims[-1].token))
        self._claim()

    @rule(
        former=SELDOM,
        group=GROUP,
        size=of(*range(1, 4)),
        reserve=of(0, 8),
        budget=of(None, None, 10, 40),
    )
    def dispatch(self, former: bool, group: int, size: int, reserve: int, budget: int | None) -> None:
        self._dispatch(group, 0 if former else -1, size, reserve, budget)

    def _dispatch(
        self, group: int, claim: int = -1, size: int = 2, reserve: int = 0, budget: int | None = None
    ) -> None:
        self.same(
            lambda side: side.bus.dispatch(
                JOB,
                side.claims[claim].token,
                group,
                size=size,
                split=Split.TRAIN,
                task_index=group + 7,
                environment=group % 2,
                bytes_per_episode=reserve,
                budget_bytes=budget,
                reads=group % 3,
            )
        )

    @rule(
        former=SELDOM,
        groups=some_groups,
        reason=of("trained", "evaluated", "dropped_stale"),
    )
    def commit(self, former: bool, groups: list[int], reason: str) -> None:
        self.same(lambda side: side.bus.commit(JOB, side.claims[0 if former else -1].token, 1, groups, reason=reason))

    @rule(former=SELDOM, group=GROUP)
    def cancel(self, former: bool, group: int) -> None:
        self.same(lambda side: side.bus.cancel(JOB, side.claims[0 if former else -1].token, group))

    # Workers

    @rule(worker=of(*WORKERS))
    def join(self, worker: str) -> None:
        name = f"{worker}-{len(self.joined[worker])}"
        self.joined[worker].append(name)
        for side in (self.real, self.twin):
            side.tokens[name] = self.loop.run_until_complete(side.bus.join(worker))

    @rule(worker=of(*WORKERS), former=SELDOM)
    def beat(self, worker: str, former: bool) -> None:
        self.same(lambda side: side.bus.beat(worker, side.tokens[self.joined[worker][0 if former else -1]]))

    @rule(worker=of(*WORKERS), former=SELDOM)
    def leave(self, worker: str, former: bool) -> None:
        self.same(lambda side: side.bus.leave(worker, side.tokens[self.joined[worker][0 if former else -1]]))

    @rule(worker=of(*WORKERS), former=SELDOM, limit=of(0, 1, 2, 4, 20))
    def lease(self, worker: str, former: bool, limit: int) -> None:
        self._lease(self.joined[worker][0 if former else -1], limit)

    def _lease(self, name: str, limit: int) -> None:
        worker = name.partition("-")[0]
        found = self.same(lambda side: side.bus.lease(JOB, worker, side.tokens[name], limit))
        self.ever_leased += [(name, one.key) for one in found]

    @rule(
        choice=CHOICE,
        is_zombie=SELDOM,
        steps=some_appends,
        version=of(None, 0, 1, 2, 3),
        shift=of(0, 0, 0, 0, 0, 0, -1, 1),
    )
    def append(
        self,
        choice: int,
        is_zombie: bool,
        steps: list[tuple[int, int, bool, bool]],
        version: int | None,
        shift: int,
    ) -> None:
        """Segments of several episodes: after what is there, again what is there, beyond it, with another content;
        behind some of them the world of their episode, or a part of it, as it is there or elsewhere."""
        name, first = self._pick(choice, is_zombie)
        keys = [first, *(key for holder, key in self._held() if holder == name)]
        present: dict[EpisodeKey, int] = {}
        appends: list[Append | Kept] = []
        for number, (which, ahead, is_other, final) in enumerate(steps):
            key = keys[which % len(keys)] if number else first
            episode = self._episode(key)
            attempt = max(0, (episode.attempt if episode else 0) + shift)
            index = max(0, present.setdefault(key, len(episode.segments) if episode else 0) + ahead)
            text = f"{key}:{attempt}:{index}" + ("!" if is_other and ahead < 0 else "")
            note = f"at {index}" if which % 2 else ""
            appends.append(Append(key, attempt, index, text.encode(), final, version, note))
            present[key] += ahead == 0
            if which % 2:
                at = max(0, present[key] + WORLD_AT.get(which, 0))
                world = Snapshot(attempt, at, f"the world of {key} at {at}".encode())
                appends.append(Kept(key, world, is_part=which % 4 == 3))
        self.same(lambda side: side.bus.append(JOB, side.tokens[name], appends))
        # Said again, as a client whose reply was lost does.
        self.same(lambda side: side.bus.append(JOB, side.tokens[name], appends))
        self.same(lambda side: side.bus.read_snapshot(first))

    @rule(choice=CHOICE, is_zombie=SELDOM)
    def finish(self, choice: int, is_zombie: bool) -> None:
        name, key = self._pick(choice, is_zombie)
        episode = self._episode(key)
        if episode is not None:
            last = Append(key, episode.attempt, len(episode.segments), b"the end", final=True, version=5)
            self.same(lambda side: side.bus.append(JOB, side.tokens[name], [last]))

    @rule(
        choice=CHOICE,
        is_zombie=SELDOM,
        num_new=of(*range(0, 3)),
        ahead=of(1, 1, 1, 1, 0, -1, 2),
        kept=of(None, None, 0, 0, 0, 0, -1, 1),
    )
    def restart(self, choice: int, is_zombie: bool, num_new: int, ahead: int, kept: int | None) -> None:
        """With nothing, or with what comes before the place of its world or another place."""
        name, key = self._pick(choice, is_zombie, num_new)
        episode = self._episode(key)
        attempt = max(0, (episode.attempt if episode else 0) + ahead)
        if kept is not None and not is_zombie and episode is not None and episode.segments:
            self._keep_world(name, key)
        world = episode.snapshot if episode else None
        num_kept = 0 if kept is None or world is None else max(0, world.num_segments + kept)
        again = [
            Append(key, attempt, index, f"{key}:{attempt}:{index}".encode(), False, index % 3 or None, f"at {index}")
            for index in range(num_kept)
        ]
        self.same(lambda side: side.bus.restart(key, side.tokens[name], attempt, again))
        self.same(lambda side: side.bus.restart(key, side.tokens[name], attempt, again))
        self.same(lambda side: side.bus.read_snapshot(key))

    @rule(
        choice=CHOICE,
        is_zombie=SELDOM,
        num_new=of(*range(0, 3)),
        how_many=of(*range(1, 4)),
        is_interrupt=of(False, True),
    )
    def hand_back(self, choice: int, is_zombie: bool, num_new: int, how_many: int, is_interrupt: bool) -> None:
        name, first = self._pick(choice, is_zombie, num_new)
        keys = [first, *(key for holder, key in self._held() if holder == name)][:how_many]
        if is_interrupt:
            self.same(lambda side: side.bus.interrupt(JOB, side.tokens[name], keys))
        else:
            self.same(lambda side: side.bus.hand_back(JOB, side.tokens[name], keys))

    @rule(choice=CHOICE, is_zombie=SELDOM, shifts=of((0, 0), (0, 0), (0, 0), (-1, 0), (0, 1), (1, 0)))
    def save_snapshot(self, choice: int, is_zombie: bool, shifts: tuple[int, int]) -> None:
        name, key = self._pick(choice, is_zombie)
        episode = self._episode(key)
        attempt, num_segments = (episode.attempt, len(episode.segments)) if episode else (0, 0)
        snapshot = Snapshot(attempt + shifts[0], num_segments + shifts[1], f"the world of {key}".encode())
        self.same(lambda side: side.bus.save_snapshot(key, side.tokens[name], snapshot))

    def _keep_world(self, name: str, key: EpisodeKey) -> None:
        """And something after it, half of the time."""
        episode = self._episode(key)
        assert episode is not None
        world = Snapshot(episode.attempt, len(episode.segments), f"the world of {key}".encode())
        self.same(lambda side: side.bus.save_snapshot(key, side.tokens[name], world))
        if len(episode.segments) % 2:
            self._append_next(name, key, version=2)

    # Rewards that come late

    @rule(choice=CHOICE, is_zombie=SELDOM, shift=of(0, 0, 0, 0, 0, 0, -1, 1), ahead=of(0, 0, 0, 0, 0, -1, 1))
    def await_reward(self, choice: int, is_zombie: bool, shift: int, ahead: int) -> None:
        name, key = self._pick(choice, is_zombie, 1)
        episode = self._episode(key)
        attempt = max(0, (episode.attempt if episode else 0) + shift)
        index = max(0, (len(episode.segments) if episode else 0) + ahead)
        end = Append(key, attempt, index, f"{key} unpaid".encode(), final=True, note="ended" if choice % 2 else "")
        deadline = self.unix + choice
        other = self.joined[WORKERS[choice % len(WORKERS)]][-1]
        for token in (name, name, other):
            self._await(token, end, deadline)

    def _await(self, name: str, end: Append, deadline: float) -> None:
        self.same(lambda side: side.bus.await_reward(side.tokens[name], end, b"kept", deadline))

    @rule(
        choice=CHOICE,
        token=of("a", "b", "c", ""),
        turn=of(None, None, 0, 3),
        shift=of(0, 0, 0, 0, 0, 0, -1, 1),
        unseen=SELDOM,
        after_s=of(0, 0, 0, 20),
    )
    def a_reward_comes(self, choice: int, token: str, turn: int | None, shift: int, unseen: bool, after_s: int) -> None:
        """Perhaps behind its deadline, at which nobody has looked yet."""
        key = self._awaited(choice)
        episode = self._episode(key)
        attempt = max(0, (episode.attempt if episode else 0) + shift)
        seen = len(episode.awaited.posted) if episode and episode.awaited else 0
        seen += unseen
        end = Append(key, attempt, len(episode.segments) if episode else 0, f"{key}:{turn}".encode(), final=True)
        now = self.unix + after_s
        paid, said = PostedReward(token, turn or 0, choice / 8), f"{turn}={choice % 3}"
        self.same(lambda side: side.bus.look_at_reward(key, attempt, token, now, said=said))
        for _ in range(2):
            if turn is None:
                self.same(lambda side: side.bus.settle_reward(end, token, said=said, seen=seen, now=now))
            else:
                self.same(lambda side: side.bus.post_reward(end, paid, said=said, seen=seen, now=now))
        self.same(lambda side: side.bus.look_at_reward(key, attempt, token, now, said=said))

    @rule(former=SELDOM, seconds=of(0, 1, 5, 20))
    def deadlines_pass(self, former: bool, seconds: int) -> None:
        self.unix += seconds
        claim, now = 0 if former else -1, self.unix
        self.same(lambda side: side.bus.expire_rewards(JOB, side.claims[claim].token, now=now))

    def _awaited(self, choice: int) -> EpisodeKey:
        """Mostly one that waits."""
        groups = self.world.queue(JOB).groups.items()
        episodes = [
            (EpisodeKey(JOB, number, m), one) for number, group in groups for m, one in enumerate(group.episodes)
        ]
        waiting = [key for key, one in episodes if one.awaited is not None]
        some = waiting if choice % 5 and waiting else [key for key, _ in episodes]
        return some[choice % len(some)] if some else EpisodeKey(JOB, choice, 0)

    @rule(choice=CHOICE, is_zombie=SELDOM, num_new=of(0, 0, 1))
    def fail(self, choice: int, is_zombie: bool, num_new: int) -> None:
        name, key = self._pick(choice, is_zombie, num_new)
        self.same(lambda side: side.bus.fail(key, side.tokens[name], "it broke"))

    # Erasing

    @rule(choice=CHOICE, group=GROUP)
    def erase(self, choice: int, group: int) -> None:
        """Mostly one that is there; whoever held it goes on as if nothing had happened."""
        groups = self.world.queue(JOB).groups.items()
        keys = [EpisodeKey(JOB, number, member) for number, one in groups for member in range(len(one.episodes))]
        key = keys[choice % len(keys)] if keys else EpisodeKey(JOB, group, 0)
        for _ in range(2):
            self.same(lambda side: side.bus.erase(key))
            self.same(lambda side: side.bus.was_erased(key))
            self.same(lambda side: side.bus.is_over(key))

    @rule(group=GROUP, member=of(0, 1))
    def is_over(self, group: int, member: int) -> None:
        self.same(lambda side: side.bus.is_over(EpisodeKey(JOB, group, member)))

    @rule(former=SELDOM, groups=some_groups)
    def seal(self, former: bool, groups: list[int]) -> None:
        """Those that were not erased, or all of them."""
        found = self.world.queue(JOB).groups
        members = {
            group: [place for place, one in enumerate(found[group].episodes) if not one.is_erased or group % 3 == 0]
            for group in groups
            if group in found
        }
        self.same(lambda side: side.bus.seal(JOB, side.claims[0 if former else -1].token, members))

    @rule(group=GROUP, member=of(*range(0, 3)))
    def read(self, group: int, member: int) -> None:
        self.same(lambda side: side.bus.read_episode(EpisodeKey(JOB, group, member)))
        self.same(lambda side: side.bus.read_snapshot(EpisodeKey(JOB, group, member)))

    @rule(looks=of(*range(1, 5)))
    def time_passes_and_somebody_looks_for_the_dead(self, looks: int) -> None:
        for _ in range(looks):
            self.clock.now += LEASE_S / 2.5
            self.same(lambda side: side.bus.reap(JOB))

    @rule(worker=of(*WORKERS), num_deaths=of(*range(2, 8)), limit=of(1, 2, 20))
    def workers_die_again_and_again(self, worker: str, num_deaths: int, limit: int) -> None:
        """Each with what it was given, and nothing done."""
        for _ in range(num_deaths):
            self._lease(self.joined[worker][-1], limit)
            self.join(worker)
            self.same(lambda side: side.bus.reap(JOB))

    # What can be seen

    def both_show_the_same(self) -> None:
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
        bus.num_queued(JOB),
        bus.waiting(JOB),
        _segments(bus),
        _letters(bus),
    )


def compare(model: type[QueueModel], runs: int = RUNS) -> None:
    for number in range(runs):
        machine = model()
        try:
            machine.play(number)
        finally:
            machine.teardown()


@pytest.fixture
def model(redis_server: RedisServer) -> Iterator[type[QueueModel]]:
    """On a server that does not flush: what is compared is what functions answer, not what survives."""
    with Redis.from_url(redis_server.url) as redis:
        redis.config_set("appendfsync", "no")
        QueueModel.url, QueueModel.num_steps = redis_server.url, 0
        yield QueueModel
        redis.config_set("appendfsync", "always")
        redis.function_flush()  # a test may have broken them


@pytest.mark.timeout(900)
@pytest.mark.parametrize("runs", [RUNS // 2, pytest.param(RUNS, marks=pytest.mark.slow)])
def test_the_real_functions_do_what_the_twin_does(model: type[QueueModel], runs: int) -> None:
    compare(model, runs)
    assert model.num_steps == runs * STEPS


# What must not happen, as changes of the functions that would let it happen.
BROKEN = {
    "a zombie appends": (
        'not state or token == "" or state.token ~= token or append.attempt',
        "not state or append.attempt",
    ),
    "a world is kept of segments that are not there": (
        "world.attempt > state.attempt or world.index > state.segments",
        "world.attempt > state.attempt",
    ),
    "a resend is stored twice": ("if append.index < state.segments then", "if append.index < state.segments - 1 then"),
    "a new attempt is taken for a resend": (
        "state.attempt, state.segments, state.bytes, state.version = attempt, 0, 0, nil",
        "state.attempt, state.bytes, state.version = attempt, 0, nil",
    ),
    "a world is kept without its segments": ("not (world and world.segments == num_kept)", "not world"),
    "a part that is said again is added twice": ("if state.part == world.digest then", "if false then"),
    "a world stays with the attempt before": ("    world.attempt = attempt\n", ""),
    "a worker gets several suspects": ("and limit > 0 and not holds_a_suspect(K, token)", "and limit > 0"),
    "suspects come like all others": ("take(K, num_suspects, limit", "take(K, 0, limit"),
    "the death of a worker is every episode's fault": ("elseif is_death and not is_suspect(state)", "elseif false"),
    "what kills its workers is never given up": ("elseif is_death and not is_suspect(state)", "elseif is_death"),
    "a former trainer commits": ('return refuse("FENCED", "commit of step " .. step)', ""),
    "the budget is looked at too late": ("charged + size * reserve > budget", "charged > budget"),
    "what came back with tokens goes last": ("score = WITH_TOKENS + math.min", "score = math.min"),
    "the age of tokens does not matter": (
        "(state.version, HIGHEST_VERSION) * SEQUENCES",
        "(state.version, 0) * SEQUENCES",
    ),
    "a reward counts twice": ("  if posted then\n    return posted\n", "  if false then\n    return posted\n"),
    "the deadline of a reward does not count": (
        'return now > read_waiting(K, episode).deadline and "late" or ""',
        'return ""',
    ),
    "another worker sets an episode aside": ("waiting.by == token and 0 or refuse", "true and 0 or refuse"),
    "a reward that nobody has seen is lost": ("if #waiting.posted ~= tonumber(args[5]) then", "if false then"),
    "a former trainer ends the wait": ('return refuse("FENCED", "ending the wait for rewards")', ""),
    "a group waits for rewards too early": ("group.done + waiting[name] == group.size", "group.done > 0"),
    "what waits costs nothing": ("  state.waits = #waiting.payload + #waiting.kept\n", "  state.waits = 0\n"),
    "what is sealed is erased": ("  elseif group.sealed and owns(K, group.sealed) then", "  elseif false then"),
    "what was erased is sealed": ("if not erased or string.find(erased,", "if not erased or string.find(name,"),
    "the seal of a trainer outlives it": (
        "elseif group.sealed and owns(K, group.sealed)",
        "elseif group.sealed",
    ),
    "whoever played it is not told": ('state and state.erased and "erased: " or ""', '""'),
    "a group is ready too early": ("if group.done == group.size then", "if group.done == group.size - 1 then"),
}


def test_what_is_broken_on_purpose_is_in_the_functions_once() -> None:
    source, _ = functions.library()
    assert [what for what, (right, _) in BROKEN.items() if source.count(right) != 1] == []


@pytest.mark.slow  # a test of the tests: each asks whether the comparison above would notice
@pytest.mark.timeout(900)
@pytest.mark.parametrize("what", BROKEN)
def test_the_comparison_finds_functions_that_are_broken(
    what: str, model: type[QueueModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    right, wrong = BROKEN[what]
    source, digest = functions.library()
    mutated = source.replace(right, wrong).replace(digest, "0" * len(digest))
    with Redis.from_url(model.url) as redis:
        redis.function_load(mutated, replace=True)  # it is a program, only not the right one
    monkeypatch.setattr(functions, "library", lambda: (mutated, "0" * len(digest)))
    with pytest.raises((AssertionError, RedisFault, ExceptionGroup)):
        compare(model)
