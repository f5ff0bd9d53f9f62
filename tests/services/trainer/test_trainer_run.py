"""The step loop at its edges: a job that has nothing left to train, a batch that must not be trained."""

from __future__ import annotations

import asyncio
import errno
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.trainer_utilisation import NoEngines
from gspo_core.codec import encode
from gspo_core.position import Position
from gspo_core.spec import JobSpec
from gspo_core.types import Split
from gspo_core.versions import WeightFile, WeightsManifest
from services.files.batch_log import BatchLog
from services.files.checkpoints import CheckpointStore
from services.files.job_dir import JobDir
from services.files.trained_log import TrainedLog
from services.files.weights import WeightStore
from services.state.queue import Append, Bus
from services.state.store import Claim, Store
from services.trainer.fleet.parity import LabelledWeights, engine_mismatch
from services.trainer.groups.evaluation import Evaluator
from services.trainer.groups.intake import Intake
from services.trainer.groups.run_context import Services
from services.trainer.groups.tasks import TaskSchedule, evaluation_group
from services.trainer.run import JobRun
from services.trainer.telling import reports
from services.trainer.telling.failure import JobFailure
from services.trainer.telling.status import JobStatusBoard
from tests.core import learner_support
from tests.core.learner_support import largest_difference, weights
from tests.services.trainer.trainer_kit import episode, group, stop

STEPS = 3
SPEC = JobSpec.model_validate(
    {
        "model": "m",
        "environments": [{"ref": "a:B"}],
        "rollout": {"group_size": 2, "max_staleness": 1},
        "groups_per_step": 1,
        "checkpoint_every": 50,
        "steps": STEPS,
        "evaluation": {"tasks": 1, "every": 50},
    }
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return learner_support.write_model(tmp_path_factory.mktemp("model"))


def run_of(claim: Claim, store: Store, bus: Bus, job_dir: Path, model_dir: Path) -> JobRun:
    services = Services(
        bus=bus,
        store=store,
        status=JobStatusBoard(store, claim),
        engines=cast(Any, NoEngines()),
        intake=Intake(bus, claim.job_id),
        weights=WeightStore(JobDir(job_dir)),
        batch_log=BatchLog(JobDir(job_dir)),
        checkpoints=CheckpointStore(JobDir(job_dir)),
        job_dir=JobDir(job_dir),
    )
    return JobRun(claim, SPEC, services, lambda: learner_support.make_learner(model_dir))


async def test_a_job_whose_last_steps_come_from_logs_alone_ends_whole(
    claim: Claim, store: Store, bus: Bus, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trainer was lost after it had logged the last step, and before it saved."""
    job = claim.job_id
    job_dir = tmp_path / job
    log, checkpoints = BatchLog(JobDir(job_dir)), CheckpointStore(JobDir(job_dir))
    checkpoints.begin_epoch(1, Position(0, 0))
    for step in range(1, STEPS + 1):
        extra = {"num_dispatched": step, "dropped": {}, "staleness": {"0": 0}}
        log.write(1, step, [group(step - 1, [1.0, 0.0])], extra)
    await store.environments.describe(job, 0, {"num_tasks": {"train": 4, "eval": 1}})
    await store.jobs.release(job, claim.token)
    heir = await store.jobs.claim("heir")
    assert heir is not None
    played: list[int] = []

    async def play(_: Evaluator, step: int, version: int) -> None:
        played.append(step)

    for name in ("play", "play_last"):
        monkeypatch.setattr(Evaluator, name, play)
    run = run_of(heir, store, bus, job_dir, model_dir)
    await run.run()
    newest = checkpoints.newest_first()[0]
    assert (newest.position, newest.lineage.step) == (Position(2, STEPS), STEPS)
    assert list(newest.lineage.owed()) == []
    published = await store.versions.current(job)
    assert published is not None
    assert published.step == STEPS
    assert WeightStore(JobDir(job_dir)).versions() == [published.version]
    assert played == [STEPS], "the end is measured, and once"
    saved = learner_support.make_learner(model_dir)
    saved.load_state(newest.learner_dir)
    exported = learner_support.make_learner(WeightStore(JobDir(job_dir)).path(published.version))
    assert largest_difference(weights(exported), weights(saved)) == 0


async def test_rounds_of_evaluation_that_a_lost_trainer_began_leave_the_queue(
    claim: Claim, store: Store, bus: Bus, tmp_path: Path, model_dir: Path
) -> None:
    job, token = claim.job_id, claim.token
    run: Any = run_of(claim, store, bus, tmp_path, model_dir)
    eval_group = evaluation_group(claim.epoch - 1, 0, 1, 0)
    await bus.dispatch(job, token, eval_group, size=1, split=Split.EVAL, task_index=0)
    await bus.dispatch(job, token, 0, size=1, split=Split.TRAIN, task_index=0)
    run._lineage.num_dispatched = 1
    await run._batches.commit_again()
    assert await bus.open_groups(job) == [0], "what is owed stays"
    counters = await bus.counters(job)
    assert (counters["dropped_trainer_lost"], counters.get("trained", 0)) == (1, 0)


async def test_a_full_disk_costs_no_evaluation_and_no_attempt(
    claim: Claim, store: Store, bus: Bus, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: Any = run_of(claim, store, bus, tmp_path, model_dir)
    append, faults = reports.append_line, [OSError(errno.ENOSPC, "No space left on device")]

    def full_at_first(path: Path, line: bytes) -> None:
        if faults:
            raise faults.pop()
        append(path, line)

    monkeypatch.setattr(reports, "append_line", full_at_first)
    monkeypatch.setattr("services.trainer.telling.disk_waits.RETRY_S", 0.01)
    await run._report_evaluation(3, {"reward/mean": 0.5})
    [line] = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["eval/reward/mean"] == 0.5
    alerts = [event.data["kind"] for event in await store.events.read(claim.job_id) if event.type == "alert"]
    assert alerts == ["disk_full", "disk_has_room"]


async def test_what_the_parity_gate_refuses_is_not_logged(
    claim: Claim, store: Store, bus: Bus, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that takes over trains what was logged without asking again."""
    run: Any = run_of(claim, store, bus, tmp_path, model_dir)
    job, schedule = claim.job_id, TaskSchedule(0, [4], [1.0])
    run._staleness.add(0, 0)
    run._context.held = LabelledWeights(0, f"{job}/{claim.epoch}/0")
    run._context.newest = WeightsManifest(job, 0, claim.epoch, 0, (WeightFile("w", 1, "0" * 64),))
    run._admission.schedule = schedule
    await run._admission.admit()
    token = await bus.join("worker")
    for lease in await bus.lease(job, "worker", token, 2):
        key = lease.key
        segments = episode(key.group, key.member, float(key.member), [0, 0]).segments
        parts = [encode(replace(one, key=key)) for one in segments]
        appends = [Append(key, 0, index, part, index == len(parts) - 1, 0) for index, part in enumerate(parts)]
        await bus.append(job, token, appends)
    assert [one.group for one in await bus.ready_groups(job)] == [0]

    async def refuse(*_: object) -> None:
        raise engine_mismatch("another engine")

    monkeypatch.setattr(run._gate, "check", refuse)
    reading = asyncio.create_task(run._services.intake.run())
    try:
        with pytest.raises(JobFailure, match="another engine"):
            await run._step(learner_support.make_learner(model_dir))
    finally:
        await stop(reading)
    assert BatchLog(JobDir(tmp_path)).steps() == []
    assert (await bus.counters(job)).get("trained", 0) == 0
    assert 0 in await bus.open_groups(job)


def test_the_log_of_a_step_that_is_written_while_others_are_removed_stays(tmp_path: Path) -> None:
    """A checkpoint is followed by removals in a thread, and the next step is logged meanwhile."""

    class Meanwhile(BatchLog):
        def written(self) -> list[Position]:
            found = super().written()
            if not self.path(1, 4).exists():
                self.write(1, 4, [], {})
                trained.write(1, 4, {})
            return found

    log, trained = Meanwhile(JobDir(tmp_path)), TrainedLog(JobDir(tmp_path))
    for step in (1, 2, 3):
        BatchLog(JobDir(tmp_path)).write(1, step, [], {})
        trained.write(1, step, {})
    services = SimpleNamespace(batch_log=log, job_dir=JobDir(tmp_path))
    run = SimpleNamespace(
        _services=services, _spec=SimpleNamespace(checkpoints=SimpleNamespace(keep_batches=0, archive="none"))
    )
    JobRun._collect_batches(cast("JobRun", run), 2)
    assert BatchLog(JobDir(tmp_path)).steps() == [(1, 3), (1, 4)]
    assert [step for step in range(1, 5) if trained.path(1, step).exists()] == [3, 4]
