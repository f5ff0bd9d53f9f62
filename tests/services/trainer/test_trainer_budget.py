"""A job stays within its bytes in Redis, and always has room for one step."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from gspo_core.spec import JobSpec
from gspo_core.types import Split
from gspo_core.versions import WeightFile, WeightsManifest
from services.files.job_dir import JobDir
from services.state.client import AwayReason, OutOfMemory
from services.state.fleet_records import EngineRecord, TrainerRecord
from services.state.queue import Append, Bus, Fenced
from services.state.store import CancelManner, Claim, Store
from services.trainer.groups.admission import BYTES_PER_TOKEN
from services.trainer.groups.evaluation import LAST_ROUND_WAITS_S, Evaluator
from services.trainer.groups.intake import Intake
from services.trainer.groups.run_context import Services
from services.trainer.groups.tasks import TaskSchedule
from services.trainer.run import JobRun
from services.trainer.telling.best_evaluation import MEAN
from tests.core.learner_support import write_model
from tests.patience import HANG_S
from tests.services.trainer.loop_kit import a_loop, after_each_step, loop_spec, serve
from tests.services.trainer.trainer_kit import stop

CONTEXT_TOKENS = 100
EVIDENCE_BYTES = 300
EPISODE_BYTES = CONTEXT_TOKENS * BYTES_PER_TOKEN + EVIDENCE_BYTES
SPEC = JobSpec.model_validate(
    {
        "model": "m",
        "environments": [{"ref": "a:B"}],
        "limits": {"max_context_tokens": CONTEXT_TOKENS, "max_episode_tokens": CONTEXT_TOKENS},
        "rollout": {"group_size": 2, "max_staleness": 4},
        "groups_per_step": 3,
        "rewards": {"evidence_bytes": EVIDENCE_BYTES},
        "steps": 100,
    }
)
SCHEDULE = TaskSchedule(0, [10], [1.0])


def run_of(bus: Bus, claim: Claim, budget_bytes: int | None, store: Any = None) -> Any:
    nothing = cast(Any, None)
    services = Services(
        bus=bus,
        store=store,
        status=nothing,
        engines=nothing,
        intake=nothing,
        weights=nothing,
        batch_log=nothing,
        checkpoints=nothing,
        job_dir=JobDir(Path("unused")),
        budget_bytes=budget_bytes,
    )
    run: Any = JobRun(claim, SPEC, services, nothing)
    run._admission.schedule = SCHEDULE
    return run


async def test_groups_wait_until_there_is_room(bus: Bus, claim: Claim) -> None:
    job = claim.job_id
    run = run_of(bus, claim, 9 * EPISODE_BYTES)
    await run._admission.admit()
    assert await bus.open_groups(job) == [0, 1, 2, 3]  # the fifth would be the tenth episode
    assert run._lineage.num_dispatched == 4
    token = await bus.join("w")
    leases = await bus.lease(job, "w", token, 2)
    await bus.append(job, token, [Append(lease.key, 0, 0, b"short", True) for lease in leases])
    await run._admission.admit()
    assert await bus.open_groups(job) == [0, 1, 2, 3, 4]
    assert (await bus.usage(job)).charged_bytes == 8 * EPISODE_BYTES + 2 * len(b"short")


async def test_without_a_budget_only_staleness_bounds_them(bus: Bus, claim: Claim) -> None:
    await run_of(bus, claim, None)._admission.admit()
    assert len(await bus.open_groups(claim.job_id)) == 15


async def test_a_server_whose_memory_is_full_is_waited_for(
    bus: Bus, store: Store, claim: Claim, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that a trainer says on its way to the next commit, which frees memory, gets through meanwhile."""
    monkeypatch.setattr("services.trainer.groups.admission.RETRY_S", 0.05)
    job, token = claim.job_id, claim.token
    run = run_of(bus, claim, None, store)
    await bus.dispatch(job, token, 7, size=1, split=Split.TRAIN, task_index=0)
    settings: Any = redis_client
    before = await settings.config_get("maxmemory*")
    await settings.config_set("maxmemory-policy", "noeviction", "maxmemory", "1")
    try:
        with pytest.raises(OutOfMemory):
            await bus.dispatch(job, token, 8, size=1, split=Split.TRAIN, task_index=0)
        admitting = asyncio.create_task(run._admission.admit())
        async with asyncio.timeout(HANG_S):
            while not [event for event in await store.events.read(job) if event.type == "alert"]:
                assert not admitting.done(), admitting.result()
                await asyncio.sleep(0.01)
        await store.jobs.beat(job, token)
        await store.jobs.set_status(job, "running", token=token)
        version = await store.versions.next(job, token)
        manifest = WeightsManifest(job, version, claim.epoch, 1, (WeightFile("w", 1, "0" * 64),))
        await store.versions.publish(job, token, manifest)
        await store.jobs.update_progress(job, token, 1, version)
        await store.metrics.add(job, 1, {"reward/mean": 1.0}, token=token)
        await store.jobs.change_settings(job, 0, {"optimizer.lr": 1e-7}, {"optimizer.lr": 1e-7})  # after a fall
        await store.fleet.register_trainer(TrainerRecord(id="t"))
        await store.fleet.register_engine(EngineRecord(id="e"))
        assert await store.fleet.bind(job, token, "e")
        await bus.commit(job, token, 1, [7])
        await store.jobs.release(job, token)
        heir = await store.jobs.claim("heir")
        assert heir is not None
        await store.jobs.set_desired_state(job, "cancelled")
        await store.jobs.set_desired_state(job, "cancelled", CancelManner.DRAIN)
    finally:
        await settings.config_set("maxmemory", before["maxmemory"], "maxmemory-policy", before["maxmemory-policy"])
    with pytest.raises(Fenced):  # it goes on as soon as there is room; here the job is another trainer's by then
        await admitting
    [alert] = [event.data for event in await store.events.read(job) if event.type == "alert"]
    assert alert["kind"] == "redis_full"


async def test_held_out_episodes_have_their_room_reserved_too(bus: Bus, store: Store, claim: Claim) -> None:
    """So training groups wait for them, but for one step's worth."""
    spec = JobSpec.model_validate(SPEC.model_dump() | {"evaluation": {"tasks": 2, "every": 1}})
    evaluator = Evaluator(claim, spec, bus, store, Intake(bus, claim.job_id), [2], cast(Any, None))
    assert await evaluator.start(1, 2)
    evaluator.cancel()
    assert (await bus.usage(claim.job_id)).charged_bytes == 2 * EPISODE_BYTES
    run = run_of(bus, claim, 8 * EPISODE_BYTES)
    await run._admission.admit()
    assert run._lineage.num_dispatched == 3


async def test_an_evaluation_for_which_a_full_server_has_no_room_is_left_out(
    bus: Bus, store: Store, claim: Claim, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for memory that training alone frees. What was begun of it is thrown away."""
    settings: Any = redis_client
    before, original = await settings.config_get("maxmemory*"), bus.dispatch

    async def filling(*args: Any, **more: Any) -> bool:
        is_new = await original(*args, **more)
        await settings.config_set("maxmemory-policy", "noeviction", "maxmemory", "1")
        return is_new

    monkeypatch.setattr(bus, "dispatch", filling)
    spec = JobSpec.model_validate(SPEC.model_dump() | {"evaluation": {"tasks": 2, "every": 1}})
    evaluator = Evaluator(claim, spec, bus, store, Intake(bus, claim.job_id), [2], cast(Any, None))
    try:
        async with asyncio.timeout(HANG_S):
            await evaluator.play(0, 1)
            assert not await evaluator.start(1, 2)
    finally:
        await settings.config_set("maxmemory", before["maxmemory"], "maxmemory-policy", before["maxmemory-policy"])
    alerts = [event.data for event in await store.events.read(claim.job_id) if event.type == "alert"]
    assert [(alert["kind"], alert["step"]) for alert in alerts] == [("redis_full", 0), ("redis_full", 1)]
    assert await bus.open_groups(claim.job_id) == []
    assert (await bus.counters(claim.job_id))["dropped_redis_full"] == 1


async def test_a_job_takes_its_steps_although_redis_is_full_where_it_is_evaluated(
    redis_client: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next trainer finds the server full, and in the queue all that two steps need. The server is full again, for a
    moment, where the last weights are evaluated."""
    spec = loop_spec(
        write_model(tmp_path / "model"),
        rollout={"group_size": 3, "max_staleness": 2},
        evaluation={"tasks": 1, "every": 1},
    )
    monkeypatch.setattr("services.trainer.groups.evaluation.RETRY_S", 0.05)
    original, full, hooks = Bus.dispatch, asyncio.Event(), after_each_step(monkeypatch)
    full_for_a_moment = asyncio.Event()

    async def dispatch(self: Bus, *args: Any, **more: Any) -> bool:
        if full.is_set() or full_for_a_moment.is_set():
            full_for_a_moment.clear()
            raise OutOfMemory(AwayReason.OOM, "its memory is used up")
        return await original(self, *args, **more)

    monkeypatch.setattr(Bus, "dispatch", dispatch)
    async with a_loop(redis_client, tmp_path / "jobs", spec, monkeypatch) as loop:

        async def fill(run: JobRun, step: int) -> None:
            if step == 2:
                await run._services.intake.wait_for(Split.TRAIN, 2 * spec.groups_per_step)
                full.set()
                run.phase.leave()
            elif step == 3:
                full.clear()
            elif step == spec.steps:
                full_for_a_moment.set()

        hooks.append(fill)
        await serve(loop)
        job = await loop.store.jobs.get(loop.job)
        alerts = [event.data for event in await loop.store.events.read(loop.job) if event.type == "alert"]
        metrics = {row["step"]: row for row in await loop.store.metrics.read(loop.job)}
    assert (job.step, [one.code for one in job.attempts]) == (spec.steps, ["handed_over", "steps_done"])
    assert [alert["step"] for alert in alerts if alert["kind"] == "redis_full"] == [2, 3, spec.steps]
    assert (MEAN in metrics[3], MEAN in metrics[spec.steps]) == (False, True)


async def test_the_last_evaluation_waits_for_room(
    bus: Bus, store: Store, claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is trained after it, and no other round would say how good the job's last weights are."""
    monkeypatch.setattr("services.trainer.groups.evaluation.RETRY_S", 0.01)
    original, refused = bus.dispatch, list[int]()

    async def dispatch(job: str, token: str, group: int, **more: Any) -> bool:
        if len(refused) < 3 and await bus.open_groups(job):  # there is room for one group of each round
            refused.append(group)
            raise OutOfMemory(AwayReason.OOM, "its memory is used up")
        return await original(job, token, group, **more)

    monkeypatch.setattr(bus, "dispatch", dispatch)
    spec = JobSpec.model_validate(SPEC.model_dump() | {"evaluation": {"tasks": 2, "every": 1}})
    evaluator = Evaluator(claim, spec, bus, store, Intake(bus, claim.job_id), [2], cast(Any, None))
    playing = asyncio.create_task(evaluator.play_last(100, 1))
    told = list[tuple[str, int]]()
    async with asyncio.timeout(HANG_S):
        while len(await bus.open_groups(claim.job_id)) < 2 or len(told) < 2:  # it is told once both are open
            assert not playing.done(), playing.result()
            await asyncio.sleep(0.01)
            alerts = [event.data for event in await store.events.read(claim.job_id) if event.type == "alert"]
            told = [(alert["kind"], alert["step"]) for alert in alerts]
    await stop(playing)
    assert len(set(refused)) == 3
    assert (await bus.counters(claim.job_id))["dropped_redis_full"] == 3
    assert told == [("redis_full", 100), ("redis_has_room", 100)]


async def test_the_last_evaluation_waits_no_longer_than_others_may_take_to_free_some(
    bus: Bus, store: Store, claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job itself may fill the server, with groups that no step takes any more."""
    monkeypatch.setattr("services.trainer.groups.evaluation.RETRY_S", 0.0)

    async def dispatch(*_: Any, **__: Any) -> bool:
        raise OutOfMemory(AwayReason.OOM, "its memory is used up")

    monkeypatch.setattr(bus, "dispatch", dispatch)
    spec = JobSpec.model_validate(SPEC.model_dump() | {"evaluation": {"tasks": 2, "every": 1}})
    times = iter((0.0, 1.0, LAST_ROUND_WAITS_S - 1, LAST_ROUND_WAITS_S))
    intake = Intake(bus, claim.job_id)
    evaluator = Evaluator(claim, spec, bus, store, intake, [2], cast(Any, None), lambda: next(times))
    async with asyncio.timeout(HANG_S):
        await evaluator.play_last(100, 1)
    assert next(times, None) is None
    alerts = [event.data for event in await store.events.read(claim.job_id) if event.type == "alert"]
    assert [alert["message"].split(": ")[1].split(" (")[0] for alert in alerts] == [
        "it waits for some",
        "it is left out",
    ]


async def test_a_step_always_fits(bus: Bus, claim: Claim) -> None:
    """With fewer groups than a step takes, the job would wait for ever."""
    run = run_of(bus, claim, 1)
    await run._admission.admit()
    assert await bus.open_groups(claim.job_id) == [0, 1, 2]
    await bus.commit(claim.job_id, claim.token, 1, [1])
    run._lineage.settle([1])
    run._lineage.num_published = 1
    await run._admission.admit()
    assert await bus.open_groups(claim.job_id) == [0, 2, 3]
