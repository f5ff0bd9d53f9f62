"""A running job says what keeps it from moving, and stops saying so when that is over; on a real server."""

from __future__ import annotations

import pytest

from services.state.fleet_records import MIN_UNHEARD, WorkerRecord
from services.state.jobs import JobStatus, StatusReason
from services.state.store import Claim, Store
from services.trainer.telling.blockers import RETELL_S, SILENCE_S, Blockers
from services.trainer.telling.failure import JobFailure
from services.trainer.telling.unhealthy_environments import (
    MIN_PATIENCE_S,
    PATIENCE_FACTOR,
    UnhealthyEnvironments,
    complaint_of,
)
from tests.services.trainer.trainer_kit import make_spec

ERROR = "reset: connection refused"


class Stage:
    def __init__(self, store: Store, claim: Claim) -> None:
        self.store, self.claim, self.now = store, claim, 0.0
        self.gone: str | None = None
        self.proven: set[int] = set()
        self.has_trained = False
        spec = make_spec(environments=[{"ref": "worlds:Away"}, {"ref": "worlds:Well"}], limits={"reset_timeout_s": 60})
        self.ill = UnhealthyEnvironments(spec, lambda: self.proven, lambda: self.has_trained, clock=lambda: self.now)
        self.watch = Blockers(store, claim, self, self.ill, clock=lambda: self.now, now=lambda: self.now)

    def absence(self) -> str | None:
        return self.gone

    async def register(self, worker: str, error: str | None = None, **changes: object) -> None:
        job = self.claim.job_id
        ill = {} if error is None else {job: {"worlds:Away": error}}
        record = {"id": worker, "jobs": (job,), "ill_environments": ill} | changes
        await self.store.fleet.register_worker(WorkerRecord(**record))  # type: ignore[arg-type]

    async def look(self) -> tuple[JobStatus, str, str]:
        await self.watch.look()
        job = await self.store.jobs.get(self.claim.job_id)
        reason = job.status_reason
        return job.status, reason.code if reason else "", reason.message if reason else ""

    async def look_for(self, seconds: float, error: str | None, **changes: object) -> None:
        """A worker lives on, complaining, for so long."""
        for _ in range(int(seconds) // 5):
            await self.register("rollout-0", error, **changes)
            await self.look()
            self.now += 5


@pytest.fixture
async def stage(store: Store) -> Stage:
    await store.jobs.create("{}")
    claim = await store.jobs.claim("trainer")
    assert claim is not None
    await store.jobs.set_status(claim.job_id, JobStatus.RUNNING, token=claim.token)
    return Stage(store, claim)


# --- what is said -----------------------------------------------------------------------------------------------------


async def test_a_job_says_that_its_environment_is_ill_until_it_is_well_again(stage: Stage) -> None:
    await stage.register("rollout-0")
    well = await stage.look()
    await stage.register("rollout-0", ERROR)
    await stage.register("rollout-1")
    said = f"worlds:Away fails on 1 of 2 workers; rollout-0: {ERROR}"
    for _ in range(2):
        assert await stage.look() == (JobStatus.RUNNING, "env_unhealthy", said)
    await stage.register("rollout-0")
    assert await stage.look() == well


async def test_a_job_without_any_engine_says_which_were_there_and_since_when(stage: Stage) -> None:
    await stage.register("rollout-0")
    well = await stage.look()
    stage.now, stage.gone = 3600.0, "http://e is gone: connection refused"
    said = "no engine has served this job since 01:00:00 UTC; last there: http://e is gone: connection refused"
    assert await stage.look() == (JobStatus.RUNNING, "no_engine_for_model", said)
    assert stage.watch.excuse == said
    stage.now += 1
    assert (await stage.look())[2] == said
    stage.gone = None
    assert await stage.look() == well
    assert stage.watch.excuse == ""


async def test_words_that_change_with_every_look_are_told_now_and_then(stage: Stage) -> None:
    await stage.register("rollout-0")
    for words in "abcd":
        stage.gone = words
        assert (await stage.look())[2].endswith("; last there: a")
    stage.now += RETELL_S
    await stage.register("rollout-0")
    assert (await stage.look())[2].endswith("; last there: d")


async def test_a_job_without_any_worker_says_who_was_there(stage: Stage) -> None:
    await stage.register("rollout-0")
    well = await stage.look()
    for _ in range(3):
        assert await stage.look() == well
        stage.now += SILENCE_S / 3
    said = "no rollout worker has been alive since 00:00:15 UTC; last there: rollout-0"
    assert await stage.look() == (JobStatus.RUNNING, "no_rollout_worker", said)
    await stage.register("rollout-1")
    assert await stage.look() == well


async def test_a_job_whose_agents_ask_for_nothing_says_so(stage: Stage) -> None:
    silent = {"agents/asked_nothing": MIN_UNHEARD}
    await stage.register("rollout-0", counters={"agents/asked_nothing": MIN_UNHEARD - 1})
    well = await stage.look()
    await stage.register("rollout-0", counters=silent)
    said = "agents end without a request: can they reach the gateway under GSPO_GATEWAY_URL?"
    assert (await stage.look())[1:] == ("env_unhealthy", said)
    await stage.register("rollout-0", counters=silent | {"turns/asked": 1})
    assert await stage.look() == well


async def test_a_worker_that_has_left_plays_no_more(stage: Stage) -> None:
    await stage.register("rollout-0", draining=True, num_episodes=1)
    assert (await stage.look())[1] == "waiting_for_trajectories"
    await stage.register("rollout-0", draining=True)
    assert (await stage.look())[1] == "no_rollout_worker"


async def test_a_job_of_agents_waits_for_a_gateway_and_one_of_environments_does_not(stage: Stage) -> None:
    ill = UnhealthyEnvironments(make_spec(), lambda: set(), lambda: False, clock=lambda: stage.now)
    await stage.register("gateway-0", kind="gateway")
    assert (await stage.look())[2].startswith("no rollout worker has been alive")
    await stage.register("rollout-0")
    assert (await stage.look())[1] == "waiting_for_trajectories"
    stage.watch = Blockers(stage.store, stage.claim, stage, ill, "gateway", clock=lambda: stage.now, now=lambda: 0.0)
    assert (await stage.look())[1] == "waiting_for_trajectories"
    await stage.register("gateway-0", kind="gateway", draining=True)
    assert (await stage.look())[1:] == (
        *("no_rollout_worker", "no gateway has been alive since 00:00:00 UTC; last there: gateway-0"),
    )


async def test_two_blockers_are_both_told(stage: Stage) -> None:
    stage.gone = "http://e was drained"
    _, code, message = await stage.look()
    assert code == "no_engine_for_model"
    assert "no rollout worker" in message
    stage.gone = None
    assert (await stage.look())[1] == "no_rollout_worker"


async def test_what_was_said_before_is_said_again_afterwards(stage: Stage) -> None:
    await stage.register("rollout-0")
    before = StatusReason("user_cancelled", "cancelled; what is under way is trained first")
    job, token = stage.claim.job_id, stage.claim.token
    await stage.store.jobs.set_status(job, JobStatus.RUNNING, token=token, reason=before)
    stage.gone = "http://e was drained"
    assert (await stage.look())[1] == "no_engine_for_model"
    stage.gone = None
    assert await stage.look() == (JobStatus.RUNNING, before.code, before.message)


async def test_a_worker_that_died_ill_complains_no_more(stage: Stage) -> None:
    for _ in range(3):
        await stage.register("rollout-1")
        await stage.look()
        stage.now += SILENCE_S / 3
    await stage.register("rollout-0", ERROR)
    for _ in range(3):  # it gives no sign, and is looked at all the while
        await stage.register("rollout-1")
        assert (await stage.look())[1] == "env_unhealthy"
        stage.now += SILENCE_S / 3
    await stage.register("rollout-1")
    assert (await stage.look())[1] == "waiting_for_trajectories"


async def test_a_paused_job_stays_paused(stage: Stage) -> None:
    job, token = stage.claim.job_id, stage.claim.token
    for status in (JobStatus.PAUSING, JobStatus.PAUSED):
        await stage.store.jobs.set_status(job, status, token=token)
    await stage.look_for(1000, ERROR)
    assert (await stage.look())[0] is JobStatus.PAUSED


async def test_no_other_complaint_hides_that_images_are_shown(stage: Stage) -> None:
    """Whichever worker says it."""
    for last in (False, True):
        await stage.register("rollout-0", "timed out" if last else "images: screenshot shows one")
        await stage.register("rollout-1", "images: screenshot shows one" if last else "timed out")
        workers = await stage.store.fleet.workers()
        with pytest.raises(JobFailure, match="screenshot shows one"):
            stage.ill.judge(stage.claim.job_id, workers)


def test_what_other_jobs_suffer_from_is_not_said() -> None:
    worker = WorkerRecord(id="w", jobs=("a", "b"), ill_environments={"b": {"x:Y": "gone"}})
    assert complaint_of("a", [worker]) is None
    assert complaint_of("b", [worker, WorkerRecord(id="idle")]) == "x:Y fails on 1 of 1 workers; w: gone"


# --- what ends the job ------------------------------------------------------------------------------------------------


async def test_an_environment_that_never_worked_ends_the_job_with_its_error(stage: Stage) -> None:
    await stage.look_for(60, ERROR)
    with pytest.raises(JobFailure, match=rf"no episode of worlds:Away .* for 60 s .*rollout-0: {ERROR}") as failure:
        await stage.look_for(5, ERROR)
    assert failure.value.code == "environment_failed"


async def test_one_that_recovers_in_time_is_given_all_the_time_again(stage: Stage) -> None:
    await stage.look_for(55, ERROR)
    await stage.look_for(5, None)
    await stage.look_for(55, ERROR)
    assert (await stage.look())[1] == "env_unhealthy"


@pytest.mark.parametrize("change", [{"proven": {0}}, {"has_trained": True}])
async def test_one_that_ever_worked_is_waited_for(stage: Stage, change: dict[str, object]) -> None:
    vars(stage).update(change)
    await stage.look_for(1000, ERROR)
    assert (await stage.look())[1] == "env_unhealthy"


async def test_that_another_environment_works_proves_nothing(stage: Stage) -> None:
    stage.proven = {1}
    with pytest.raises(JobFailure, match="worlds:Away"):
        await stage.look_for(100, ERROR)


async def test_a_worker_that_may_still_prove_it_gives_it_more_time(stage: Stage) -> None:
    async def look_for(seconds: int) -> None:
        for _ in range(seconds // 5):
            await stage.register("rollout-1", num_episodes=3)
            await stage.look_for(5, ERROR)

    await look_for(60 * PATIENCE_FACTOR)
    with pytest.raises(JobFailure, match="fails on 1 of 2 workers"):
        await look_for(5)


async def test_images_end_the_job_with_the_first_episode(stage: Stage) -> None:
    said = "models read text only here, but a user message holds content of type image_url"
    await stage.register("rollout-0", f"images: {said}")
    with pytest.raises(JobFailure, match=f"^worlds:Away: {said}$") as failure:
        await stage.look()
    assert failure.value.code == "images_unsupported"


async def test_images_of_one_that_worked_end_the_job_too(stage: Stage) -> None:
    """Only episodes that are shown none would be trained: a tool that answers with images would be unlearned."""
    stage.proven = {0}
    await stage.register("rollout-0", "images: an image")
    with pytest.raises(JobFailure, match=r"^worlds:Away: an image$") as failure:
        await stage.look()
    assert failure.value.code == "images_unsupported"


def test_a_short_start_does_not_make_the_trainer_impatient() -> None:
    assert MIN_PATIENCE_S >= 30
