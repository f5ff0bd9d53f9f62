"""A job that can do nothing with its trainer gives it to one that waits, says why, and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from gspo_core.codec import encode
from gspo_core.spec import JobSpec
from services.state.functions import Functions
from services.state.jobs import HANDED_OVER, JobRecord, StatusReason
from services.state.queue import Append, Bus, Fenced, LeasedEpisode
from services.state.store import Claim, Store
from services.trainer.fleet import engines as engines_module
from services.trainer.giving_way import GivingWay, Signs
from services.trainer.groups import late_rewards
from services.trainer.run import JobRun
from services.trainer.telling.attempt_messages import AttemptEnd
from services.trainer.worker import TrainerWorker
from tests.core.learner_support import write_model
from tests.patience import HANG_S
from tests.services.trainer.loop_kit import Hook, Loop, a_loop, after_each_step, loop_spec, prompt_of
from tests.services.trainer.test_trainer_late_rewards import HOUR, Hours, LateJob
from tests.services.trainer.test_trainer_standstill import register
from tests.services.trainer.trainer_kit import InProcess, make_spec, stop

DEADLINE_S = HANG_S
AFTER_S = 0.3


class Scripted:
    """Attempts of jobs that stand still until they ``may_go``."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.claims: list[str] = []
        self.may_go: set[str] = set()

    def is_ready(self) -> bool:
        return True

    async def run(self, claim: Claim, _spec: JobSpec, stop: asyncio.Event, leaving: asyncio.Event) -> AttemptEnd:
        job, token = claim.job_id, claim.token
        self.claims.append(job)
        await self._store.jobs.set_status(job, "running", token=token, reason=StatusReason("env_unhealthy", "it fails"))
        while job not in self.may_go:
            if leaving.is_set() or stop.is_set():
                return AttemptEnd.because("released", HANDED_OVER)
            await asyncio.sleep(0.01)
        await self._store.jobs.update_progress(job, token, 1, 1)
        return AttemptEnd("succeeded", "steps_done", "done")


def worker(store: Store, bus: Bus, attempts: Any, name: str = "trainer", lease_s: float = 30.0) -> TrainerWorker:
    return TrainerWorker(store, bus, name, attempts, lease_s=lease_s, yield_after_s=AFTER_S)


async def submit(store: Store) -> str:
    return (await store.jobs.create(make_spec())).id


class Looks:
    """Of a worker at the job that it serves, by a clock that is moved by hand: a busy machine is no standstill."""

    def __init__(self, worker: TrainerWorker) -> None:
        self.now = 0.0
        self.num_begun = 0
        looking = worker._giving_way
        assert looking is not None
        self._signs = looking._signs
        looking._signs = self._count  # type: ignore[method-assign]
        looking._clock = lambda: self.now

    async def _count(self, job: JobRecord) -> Signs | None:
        self.num_begun += 1
        return await self._signs(job)

    async def some(self) -> None:
        """One that has seen what is there now has ended."""
        first = self.num_begun
        async with asyncio.timeout(DEADLINE_S):
            while self.num_begun < first + 3:
                await asyncio.sleep(0.01)


async def seen(store: Store, job: str, holds: Callable[[JobRecord], bool]) -> JobRecord:
    async with asyncio.timeout(DEADLINE_S):
        while not holds(record := await store.jobs.get(job)):
            await asyncio.sleep(0.01)
    return record


async def test_a_job_that_stands_still_lets_another_one_in_and_comes_back(store: Store, bus: Bus) -> None:
    attempts = Scripted(store)
    stuck, honest = await submit(store), await submit(store)
    attempts.may_go.add(honest)
    working = asyncio.create_task(worker(store, bus, attempts).run(end := asyncio.Event()))
    try:
        await seen(store, honest, lambda job: job.status.is_terminal)
        attempts.may_go.add(stuck)
        record = await seen(store, stuck, lambda job: job.status.is_terminal)
    finally:
        end.set()
        await working
    assert attempts.claims == [stuck, honest, stuck]
    assert [one.code for one in record.attempts] == ["yielded", "steps_done"]
    assert "env_unhealthy: it fails" in str(record.attempts[0].message)
    assert record.num_yields == 0
    told = [event.data for event in await store.events.read(stuck, "0") if event.type == "job.status"]
    queued = [one for one in told if (one["previous"], one["status"]) == ("running", "queued")]
    assert [one["status_reason"]["code"] for one in queued] == ["yielded"]
    assert "another job waited for a trainer" in queued[0]["status_reason"]["message"]


async def test_a_job_keeps_its_trainer_while_nobody_waits_or_it_goes_on(store: Store, bus: Bus) -> None:
    attempts = Scripted(store)
    stuck, patient = await submit(store), worker(store, bus, attempts)
    looks = Looks(patient)
    working = asyncio.create_task(patient.run(end := asyncio.Event()))
    try:
        await seen(store, stuck, lambda job: job.status == "running")
        await looks.some()
        looks.now += 3 * AFTER_S
        await looks.some()
        assert attempts.claims == [stuck]
        claimed = await store.functions.redis.hget(f"gspo:{{{stuck}}}:trainer", "token")
        await store.jobs.update_progress(stuck, claimed.decode(), 0, 0)
        await looks.some()
        await submit(store)
        for step in range(5):
            await store.jobs.update_progress(stuck, claimed.decode(), step, step)
            await looks.some()
            looks.now += 0.9 * AFTER_S
            await looks.some()
            assert attempts.claims == [stuck]
    finally:
        end.set()
        await working


async def test_two_jobs_that_stand_still_take_turns_ever_more_slowly(store: Store, bus: Bus) -> None:
    clock = [0.0]
    other = await submit(store)
    giving_way = GivingWay(store, bus, lambda _: None, 10.0, lambda: clock[0])
    rests = []
    for _ in range(7):
        await give_way(store, other)
        begun = clock[0]
        while not await giving_way._waiting():
            clock[0] += 1.0
        rests.append(clock[0] - begun)
    assert rests == [10, 20, 40, 80, 160, 160, 160]


async def give_way(store: Store, job: str) -> None:
    claim = await store.jobs.claim("other")
    assert claim is not None
    assert claim.job_id == job
    await store.jobs.yield_trainer(job, claim.token, StatusReason("yielded", "it stood still"))


async def test_giving_way_again_and_again_does_not_fail_a_job_and_new_ones_come_before_it(store: Store) -> None:
    old = await submit(store)
    for _ in range(5):
        await give_way(store, old)
    new = await submit(store)
    claims = [await store.jobs.claim("trainer") for _ in range(2)]
    assert [claim.job_id for claim in claims if claim is not None] == [new, old]


async def test_a_trainer_that_dies_while_it_gives_way_loses_nothing(
    store: Store, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the call arrives, and after it did but before its answer came."""
    call, dying = Functions.call, ["before", "after"]

    async def killed(self: Functions, name: str, *given: Any) -> Any:
        if name != "yield" or not dying:
            return await call(self, name, *given)
        if dying.pop(0) == "after":
            await call(self, name, *given)
        raise asyncio.CancelledError

    monkeypatch.setattr(Functions, "call", killed)
    attempts = Scripted(store)
    stuck, honest = await submit(store), await submit(store)
    for name in ("first", "second"):
        with pytest.raises(asyncio.CancelledError):
            await worker(store, bus, attempts, name).run(asyncio.Event())
    assert dying == []
    attempts.may_go = {stuck, honest}
    lasting = asyncio.create_task(worker(store, bus, attempts, "third").run(end := asyncio.Event()))
    try:
        for job in (stuck, honest):
            record = await seen(store, job, lambda job: job.status.is_terminal)
            assert record.status == "succeeded", record.status_reason
    finally:
        end.set()
        await lasting


async def test_who_lost_the_job_gives_nothing_away_and_once_is_enough(store: Store) -> None:
    job = await submit(store)
    claim = await store.jobs.claim("trainer")
    assert claim is not None
    why = StatusReason("yielded", "it stood still")
    with pytest.raises(Fenced):
        await store.jobs.yield_trainer(job, "not its token", why)
    for _ in range(2):
        await store.jobs.yield_trainer(job, claim.token, why)
    assert (await store.jobs.get(job)).num_yields == 1


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> list[Hook]:
    return after_each_step(monkeypatch)


class Both(Scripted):
    """The job of a loop is a real run, any other one is scripted."""

    def __init__(self, loop: Loop, **changes: Any) -> None:
        super().__init__(loop.store)
        self._job = loop.job
        self._real = InProcess(loop.store, lambda claim, _: loop.run_of(claim, **changes))

    async def run(self, claim: Claim, spec: JobSpec, stop: asyncio.Event, leaving: asyncio.Event) -> AttemptEnd:
        if claim.job_id != self._job:
            return await super().run(claim, spec, stop, leaving)
        self.claims.append(claim.job_id)
        return await self._real.run(claim, spec, stop, leaving)


async def as_pieces_arrive(loop: Loop, looks: Looks, then: Callable[[], object]) -> None:
    """Time goes on by less than what counts as a standstill, each time that a piece has arrived and was looked at."""
    newest = ""
    while True:
        if (now := await loop.bus.newest_segment(loop.job)) != newest:
            newest = now
            await looks.some()
            looks.now += 0.9 * AFTER_S
            then()
        await asyncio.sleep(0.01)


async def let_another_in(
    loop: Loop, both: Both, mend: Callable[[], object], *, then: Callable[[], object] | None = None
) -> JobRecord:
    """After its first step the job of the loop stands still, until another one was served: then it is mended.

    ``then``: time goes on only as pieces of episodes arrive, and this is done after each."""
    patient = worker(loop.store, loop.bus, both)
    tasks = [] if then is None else [asyncio.create_task(as_pieces_arrive(loop, Looks(patient), then))]
    working = asyncio.create_task(patient.run(end := asyncio.Event()))
    try:
        await seen(loop.store, loop.job, lambda job: job.step == 1)
        other = await submit(loop.store)
        both.may_go.add(other)
        await seen(loop.store, other, lambda job: job.status.is_terminal)
        mend()
        record = await seen(loop.store, loop.job, lambda job: job.status.is_terminal)
        end.set()
        await working
    finally:
        for task in [*tasks, working]:
            await stop(task)
    assert (record.status, record.step) == ("succeeded", loop.spec.steps)
    codes = [one.code for one in record.attempts]
    assert codes[-1] == "steps_done"
    assert set(codes[:-1]) == {"yielded"}
    assert both.claims[:2] == [loop.job, other]
    return record


async def test_a_real_run_without_an_engine_gives_way_and_goes_on_where_it_was(
    redis_client: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: list[Hook]
) -> None:
    monkeypatch.setattr(engines_module, "WATCH_S", 0.05)
    monkeypatch.setattr(engines_module, "RETRY_S", 0.05)
    spec = loop_spec(write_model(tmp_path / "model"), steps=3)
    async with a_loop(redis_client, tmp_path / "jobs", spec, monkeypatch) as loop:
        engines = loop.transport.engines

        async def lose_the_engine(_: JobRun, step: int) -> None:
            if step == 1 and "engine" in engines:
                engines["gone"] = engines.pop("engine")

        hook.append(lose_the_engine)
        record = await let_another_in(loop, Both(loop), lambda: engines.update(engine=engines.pop("gone")))
    assert "no piece of an episode arrived" in str(record.attempts[0].message)


async def test_a_real_run_whose_world_fails_after_its_first_turn_gives_way(
    redis_client: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: list[Hook]
) -> None:
    """Its first turns arrive again and again, each in a new attempt, as from a worker whose quarantine lets one try."""
    ill: dict[str, dict[str, str]] = {}
    play, num_tried = Loop._play, 0

    async def fail_after_the_first_turn(self: Loop, lease: LeasedEpisode, token: str) -> None:
        nonlocal num_tried
        if ill:
            said = prompt_of(lease.task_index, lease.key.group, lease.key.member)
            begun = await self._sample(lease, 0, [*said], said, 0)
            while ill:
                again = [replace(one, attempt=lease.attempt) for one in begun]
                appends = [
                    Append(lease.key, lease.attempt, one.index, encode(one), False, one.version) for one in again
                ]
                await self.bus.append(self.job, token, appends[lease.num_segments :])
                lease = replace(lease, attempt=lease.attempt + 1, num_segments=0)
                await self.bus.restart(lease.key, token, lease.attempt)
                num_tried += 1
                await asyncio.sleep(0.02)
        await play(self, lease, token)

    monkeypatch.setattr(Loop, "_play", fail_after_the_first_turn)
    spec = loop_spec(write_model(tmp_path / "model"), steps=3)
    async with a_loop(redis_client, tmp_path / "jobs", spec, monkeypatch) as loop:

        async def break_the_world(_: JobRun, step: int) -> None:
            if step == 1:
                ill[loop.job] = {"made:Here": "act: OSError: no route to host"}

        hook.append(break_the_world)
        telling = asyncio.create_task(register(loop, ill_environments=ill))
        try:
            record = await let_another_in(loop, Both(loop), ill.clear, then=lambda: None)
        finally:
            await stop(telling)
    assert num_tried > 1
    message = str(record.attempts[0].message)
    assert "what was played came to nothing: its environment fails at every worker" in message


async def test_a_real_run_whose_rewards_never_come_gives_way(
    redis_client: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: list[Hook]
) -> None:
    """Each wait is over before the job would have stood still: it goes on beginning episodes."""

    class Unpaid:
        """From a group on, of whom nobody pays."""

        first = 1_000_000

        def __contains__(self, member: object) -> bool:
            return isinstance(member, tuple) and member[0] >= self.first

    changes: dict[str, Any] = {
        "environments": [{"ref": "made:Here", "agent": {}}],
        "rewards": {"deadline_s": HOUR},
        "rollout": {"group_size": 2, "max_staleness": 0},
    }
    spec = loop_spec(write_model(tmp_path / "model"), steps=3, **changes)
    monkeypatch.setattr(late_rewards, "LOOK_S", 0.02)
    async with a_loop(redis_client, tmp_path / "jobs", spec, monkeypatch) as loop:
        now, unpaid = Hours(), Unpaid()
        LateJob(loop, now, cast(Any, unpaid)).begin()

        async def stop_paying(_: JobRun, step: int) -> None:
            if step == 1:
                unpaid.first = 0

        def let_an_hour_pass() -> None:
            now.now += HOUR + 1

        hook.append(stop_paying)
        pay = partial(setattr, unpaid, "first", 1_000_000)
        record = await let_another_in(loop, Both(loop, now=now), pay, then=let_an_hour_pass)
    assert "rewards did not come in time" in str(record.attempts[0].message)


@pytest.mark.parametrize(
    ("changes", "is_progress"),
    [
        ({}, False),
        ({"newest": "2-0"}, True),
        ({"newest": "2-0", "is_ill": True}, False),
        ({"newest": "2-0", "num_missed": 4}, False),
        ({"newest": "2-0", "num_missed": 4, "settled": (1, 1, 8)}, True),
        ({"is_ill": True, "settled": (2, 1, 7)}, True),
        ({"is_ill": True, "settled": (1, 2, 7)}, True),
    ],
)
def test_a_piece_is_progress_unless_it_is_known_to_be_in_vain(changes: dict[str, Any], is_progress: bool) -> None:
    before = Signs(settled=(1, 1, 7), newest="1-0", num_missed=3, is_ill=False)
    assert replace(before, **changes).are_progress_since(before) == is_progress
