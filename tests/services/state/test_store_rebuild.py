"""Redis is lost, in whole or in part: the control plane comes back from the directories of its jobs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from gspo_core.types import Split
from gspo_core.versions import WeightFile, WeightsManifest
from services.files.job_dir import JobDir, JobsDir
from services.files.job_records import AcceptedJob, DamagedRecord, JobRecords, RecordConflict, VersionRecord
from services.state.keys import job_key
from services.state.queue import Bus, Fenced
from services.state.rebuild import Rebuild
from services.state.refusals import Conflict
from services.state.store import Claim, JobConflict, JobNotFound, JobRecord, JobStatus, Store
from tests.patience import HANG_S

pytestmark = pytest.mark.every_server


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def jobs_dir(tmp_path: Path) -> Path:
    return tmp_path / "jobs"


@pytest.fixture
async def store(redis_client: Redis, jobs_dir: Path) -> Store:
    store = Store(redis_client, jobs_dir=JobsDir(jobs_dir))
    await store.load_functions()
    return store


@pytest.fixture
async def claim(store: Store) -> Claim:
    await store.jobs.create('{"name": "test"}', idempotency_key="key")
    claim = await store.jobs.claim("trainer-0")
    assert claim is not None
    return claim


def manifest(job: str, version: int, epoch: int, step: int) -> WeightsManifest:
    return WeightsManifest(job, version, epoch, step, (WeightFile("m", 1, f"{epoch * 1000 + version:064x}"),))


async def publish(store: Store, claim: Claim, step: int) -> WeightsManifest:
    version = await store.versions.next(claim.job_id, claim.token)
    published = manifest(claim.job_id, version, claim.epoch, step)
    await store.versions.publish(claim.job_id, claim.token, published)
    await store.jobs.update_progress(claim.job_id, claim.token, step, version)
    return published


async def everything(store: Store) -> list[dict[str, Any]]:
    return [job.to_dict() for job in await store.jobs.page(100)]


async def test_after_a_total_loss_the_same_jobs_are_listed(store: Store, claim: Claim, redis_client: Redis) -> None:
    job = claim.job_id
    await store.jobs.set_status(job, "running", token=claim.token)
    published = [await publish(store, claim, step) for step in range(3)]
    await store.environments.describe(job, 0, {"num_tasks": {"train": 7, "eval": 2}})
    await store.environments.get(job, 0)  # as the trainer does: what it knows is on disk
    waiting = await store.jobs.create('{"name": "waiting"}')
    over = await store.jobs.create('{"name": "over"}')
    await store.jobs.set_desired_state(over.id, "cancelled")
    before = await everything(store)
    assert [one["status"] for one in before] == ["running", "queued", "cancelled"]
    await redis_client.flushall()
    assert await everything(store) == before
    assert await store.environments.get(job, 0) == {"num_tasks": {"train": 7, "eval": 2}}
    assert await store.versions.all(job) == published
    assert await store.versions.current(job) == published[-1]
    assert (await store.jobs.get(waiting.id)).spec_data == {"name": "waiting"}
    assert await store.jobs.served() == [job]
    # the key of a client that never got its answer still names the same job
    assert (await store.jobs.create('{"name": "test"}', idempotency_key="key")).id == job


@pytest.mark.parametrize("notice", ["get", "list", "create", "claim", "rebuild"])
async def test_whoever_comes_first_notices_the_loss(
    store: Store, claim: Claim, redis_client: Redis, notice: str
) -> None:
    await redis_client.flushall()
    notices = {
        "get": lambda: store.jobs.get(claim.job_id),
        "list": store.jobs.page,
        "create": lambda: store.jobs.create("{}"),
        "claim": lambda: store.jobs.claim("heir"),
        "rebuild": store.rebuild,
    }
    await notices[notice]()
    assert await redis_client.exists(job_key(claim.job_id, "job"))
    assert len(await store.jobs.page()) == (2 if notice == "create" else 1)


async def test_a_running_system_goes_on_and_the_former_owner_is_fenced(
    store: Store, bus: Bus, claim: Claim, redis_client: Redis
) -> None:
    job = claim.job_id
    await store.jobs.set_status(job, "running", token=claim.token)
    await bus.dispatch(job, claim.token, 0, size=1, split=Split.TRAIN, task_index=0)
    token = await bus.join("w")
    await redis_client.flushall()
    for late in (
        bus.dispatch(job, claim.token, 1, size=1, split=Split.TRAIN, task_index=0),
        bus.beat("w", token),
        store.jobs.beat(job, claim.token),
        store.versions.next(job, claim.token),
    ):
        with pytest.raises(Fenced):
            await late
    heir = await store.jobs.claim("trainer-1")
    assert heir is not None
    assert (heir.job_id, heir.epoch, heir.attempt) == (job, claim.epoch + 1, claim.attempt + 1)
    for late in (store.jobs.beat(job, claim.token), store.jobs.set_status(job, "running", token=claim.token)):
        with pytest.raises(Fenced):
            await late
    await store.jobs.set_status(job, "running", token=heir.token)
    assert await bus.dispatch(job, heir.token, 0, size=1, split=Split.TRAIN, task_index=0)
    assert await bus.counters(job) == {"dispatched": 1, "trained": 0, "evaluated": 0, "in_flight": 1}


async def test_a_wish_that_was_acknowledged_is_not_forgotten(store: Store, claim: Claim, redis_client: Redis) -> None:
    await store.jobs.set_desired_state(claim.job_id, "cancelled")
    await redis_client.flushall()
    job = await store.jobs.get(claim.job_id)
    assert (job.desired_state, job.status) == ("cancelled", "starting")


async def test_a_client_that_resumes_its_events_is_told_of_the_gap(
    store: Store, claim: Claim, redis_client: Redis
) -> None:
    seen = await store.events.add(claim.job_id, "step", {"step": 1})
    await asyncio.sleep(0.002)  # the ids of both streams are milliseconds
    await redis_client.flushall()
    await store.jobs.get(claim.job_id)
    events = await store.events.read(claim.job_id, seen)
    assert [event.type for event in events] == ["gap", "job.status"]
    assert events[0].data["resumed_after"] == seen
    assert await store.events.read(claim.job_id, events[-1].id) == []


async def test_metrics_come_back_from_the_file_of_the_job(
    store: Store, claim: Claim, redis_client: Redis, jobs_dir: Path
) -> None:
    lines = [{"step": 1, "version": 1, "epoch": 1, "reward/mean": 0.25}, {"step": 2, "reward/mean": 0.5, "note": "x"}]
    (jobs_dir / claim.job_id / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "rew'
    )
    await redis_client.flushall()
    await store.jobs.get(claim.job_id)
    assert await store.metrics.read(claim.job_id) == [{"step": 1, "reward/mean": 0.25}, {"step": 2, "reward/mean": 0.5}]


async def test_metrics_of_a_history_that_was_left_do_not_come_back(
    store: Store, claim: Claim, redis_client: Redis, jobs_dir: Path
) -> None:
    lines: list[dict[str, float]] = [
        {"step": 30, "version": 31, "epoch": 1, "loss": 1.0},
        {"step": 30, "epoch": 1, "eval/reward/mean": 0.25},
        {"step": 31, "version": 32, "epoch": 1, "loss": 1.5},
        {"step": 30, "version": 34, "epoch": 3, "loss": 2.0},
        {"step": 30, "epoch": 3, "eval/reward/low": 0.5},
    ]
    (jobs_dir / claim.job_id / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    await redis_client.flushall()
    await store.jobs.get(claim.job_id)
    assert await store.metrics.read(claim.job_id) == [
        {"step": 30, "eval/reward/low": 0.5, "loss": 2.0},
        {"step": 31, "loss": 1.5},
    ]


async def test_a_server_that_lost_its_newest_writes_is_told_what_it_forgot(
    store: Store, claim: Claim, redis_client: Redis
) -> None:
    """A failover to a replica that was behind: nothing is missing, but all of it is old."""
    job = claim.job_id
    await store.jobs.set_status(job, "running", token=claim.token)
    old = {name: await redis_client.dump(job_key(job, name)) for name in ("job", "trainer")}
    versions = [(await publish(store, claim, step)).version for step in range(2)]
    later = await store.jobs.create('{"name": "later"}')
    await store.jobs.release(job, claim.token)
    heir = await store.jobs.claim("trainer-1")
    assert heir is not None
    await store.jobs.set_desired_state(job, "paused")
    for name, dumped in old.items():
        await redis_client.restore(job_key(job, name), 0, dumped, replace=True)
    await redis_client.delete(job_key(job, "versions"), job_key(later.id, "job"))
    assert await store.rebuild() == 2
    record = await store.jobs.get(job)
    assert (record.epoch, record.attempt, record.desired_state, record.status) == (2, 2, "paused", "starting")
    assert record.policy_version == versions[-1]
    assert (await store.jobs.get(later.id)).status == "queued"
    assert await store.rebuild() == 0


async def test_what_is_acknowledged_after_the_server_went_back_in_time_holds(
    store: Store, claim: Claim, redis_client: Redis
) -> None:
    """It counts revisions again that are on disk with another content; nobody has told it yet."""
    job = claim.job_id
    old = await redis_client.dump(job_key(job, "job"))
    for desired in ("paused", "running", "paused"):
        await store.jobs.set_desired_state(job, desired)
    await redis_client.restore(job_key(job, "job"), 0, old, replace=True)
    await store.jobs.set_desired_state(job, "cancelled")
    await redis_client.flushall()
    assert (await store.jobs.get(job)).desired_state == "cancelled"


async def test_an_epoch_that_the_server_forgot_is_not_handed_out_again(
    store: Store, claim: Claim, redis_client: Redis
) -> None:
    """Even when nobody has told the server: its number would name two histories."""
    job = claim.job_id
    await store.jobs.release(job, claim.token)
    old = await redis_client.dump(job_key(job, "job"))
    second = await store.jobs.claim("t")
    assert second is not None
    await store.jobs.release(job, second.token)
    await redis_client.restore(job_key(job, "job"), 0, old, replace=True)
    third = await store.jobs.claim("t")
    assert third is not None
    assert (second.epoch, third.epoch) == (2, 3)
    assert (await store.jobs.get(job)).epoch == 3


async def test_a_version_is_never_reused_whatever_the_server_forgets(
    store: Store, claim: Claim, redis_client: Redis, jobs_dir: Path
) -> None:
    job = claim.job_id
    names = {(await publish(store, claim, step)).label for step in range(3)}
    # handed out, its weights written, never published
    unpublished = await store.versions.next(job, claim.token)
    (jobs_dir / job / "weights" / f"v{unpublished}").mkdir(parents=True)
    await redis_client.flushall()
    heir = await store.jobs.claim("heir")
    assert heir is not None
    after = await publish(store, heir, 1)
    assert after.version == unpublished + 1
    assert after.label not in names
    assert [one.version for one in await store.versions.all(job)] == [0, 1, 2, 4]


async def test_two_that_publish_one_number_are_told_apart_on_disk(
    store: Store, claim: Claim, redis_client: Redis
) -> None:
    job = claim.job_id
    await publish(store, claim, 0)
    await redis_client.delete(job_key(job, "versions"))
    await redis_client.hdel(job_key(job, "job"), "published_version")
    with pytest.raises(Conflict):
        await store.versions.publish(job, claim.token, manifest(job, 0, 9, 9))


async def test_a_fenced_trainer_leaves_nothing_on_disk(
    store: Store, claim: Claim, redis_client: Redis, jobs_dir: Path
) -> None:
    await store.jobs.release(claim.job_id, claim.token)
    await store.jobs.claim("heir")
    before = sorted(path for path in (jobs_dir / claim.job_id).rglob("*"))
    for write in (
        lambda: store.versions.publish(claim.job_id, claim.token, manifest(claim.job_id, 0, 1, 0)),
        lambda: store.jobs.set_status(claim.job_id, "failed", token=claim.token),
    ):
        with pytest.raises(Fenced):
            await write()
    assert sorted(path for path in (jobs_dir / claim.job_id).rglob("*")) == before


async def test_what_was_written_last_holds_however_late_others_write(
    store: Store, claim: Claim, jobs_dir: Path
) -> None:
    directory = JobRecords(JobDir(jobs_dir / claim.job_id))
    revision, fields = directory.newest_status()
    await store.jobs.set_status(claim.job_id, "running", token=claim.token)
    directory.write_status(revision - 1, {**fields, "status": "failed"})  # wakes up now
    assert directory.newest_status()[1]["status"] == "running"
    assert directory.newest_status()[0] == revision + 1


async def test_the_same_key_with_another_body_is_a_conflict_even_after_a_loss(
    store: Store, claim: Claim, redis_client: Redis
) -> None:
    await redis_client.flushall()
    with pytest.raises(JobConflict):
        await store.jobs.create('{"name": "another"}', idempotency_key="key")


async def test_a_job_that_was_accepted_and_no_more_is_queued(store: Store, redis_client: Redis, jobs_dir: Path) -> None:
    job = await store.jobs.create('{"name": "x"}')
    for path in (jobs_dir / job.id / "status").iterdir():
        path.unlink()
    await redis_client.flushall()
    again = await store.jobs.get(job.id)
    assert again == job


async def test_one_damaged_directory_keeps_no_other_job_away(
    store: Store, claim: Claim, redis_client: Redis, jobs_dir: Path
) -> None:
    damaged = await store.jobs.create('{"name": "damaged"}')
    (jobs_dir / damaged.id / "job.json").write_bytes(b'{"spec": ')
    (jobs_dir / "not a job").mkdir()
    (jobs_dir / "not a job" / "job.json").write_bytes(b"{}")
    await redis_client.flushall()
    assert [job.id for job in await store.jobs.page()] == [claim.job_id]
    with pytest.raises(JobNotFound):
        await store.jobs.get(damaged.id)


async def test_a_wipe_in_the_middle_of_a_rebuild_is_noticed(
    store: Store, redis_client: Redis, jobs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = {(await store.jobs.create("{}")).id for _ in range(4)}
    await redis_client.flushall()
    read, wiped = JobRecords.accepted, []

    def wipe_after_two(directory: JobRecords) -> object:
        wiped.append(directory)
        return read(directory)

    monkeypatch.setattr(JobRecords, "accepted", wipe_after_two)
    listing = asyncio.create_task(store.jobs.page())
    async with asyncio.timeout(HANG_S):
        while len(wiped) < 2:
            await asyncio.sleep(0)
    await redis_client.flushall()
    await listing
    assert {job.id for job in await store.jobs.page()} == jobs


async def test_many_processes_rebuild_at_once(
    store: Store, redis_client: Redis, jobs_dir: Path, new_client: Any
) -> None:
    jobs = [(await store.jobs.create("{}")).id for _ in range(5)]
    await redis_client.flushall()
    others = [Store(new_client(), jobs_dir=JobsDir(jobs_dir)) for _ in range(4)]
    for listed in await asyncio.gather(*(other.jobs.page() for other in others)):
        assert [job.id for job in listed] == jobs


async def test_a_store_without_directories_writes_no_file(redis_client: Redis, jobs_dir: Path) -> None:
    store = Store(redis_client)
    job = await store.jobs.create("{}")
    assert await store.rebuild() == 0
    assert JobsDir(jobs_dir).accepted() == {}
    assert JobRecords(JobDir(jobs_dir / job.id)).newest_status() == (0, {})
    await redis_client.flushall()
    with pytest.raises(JobNotFound):
        await store.jobs.get(job.id)


def test_a_version_file_names_one_thing(tmp_path: Path) -> None:
    directory = JobRecords(JobDir(tmp_path / "job"))
    directory.write_version(VersionRecord(3, 2, "{}"))
    directory.write_version(VersionRecord(3, 2, "{}"))
    with pytest.raises(RecordConflict):
        directory.write_version(VersionRecord(3, 1, "{}"))
    assert directory.versions() == [VersionRecord(3, 2, "{}")]
    assert directory.highest_version() == 3
    (tmp_path / "job" / "status").mkdir()
    (tmp_path / "job" / "status" / "00000001.json").write_text("[]")
    with pytest.raises(DamagedRecord):
        directory.newest_status()


async def test_a_server_that_is_wiped_while_a_state_is_written_down_gets_the_whole_job_back(
    store: Store, redis_client: Redis, claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, written = asyncio.get_running_loop(), JobRecords.write_status

    def wipe(*_: object) -> bool:
        monkeypatch.setattr(JobRecords, "write_status", written)
        asyncio.run_coroutine_threadsafe(redis_client.flushall(), loop).result(60)
        return False  # as where the server counts again what is on disk

    monkeypatch.setattr(JobRecords, "write_status", wipe)
    await store.jobs.set_status(claim.job_id, JobStatus.RUNNING, token=claim.token)
    assert [job.id for job in await store.jobs.page()] == [claim.job_id]
    assert (await store.jobs.get(claim.job_id)).spec_data == {"name": "test"}


async def test_versions_are_given_back_to_a_job_that_is_known_only(
    store: Store, redis_client: Redis, claim: Claim
) -> None:
    await publish(store, claim, 1)
    await redis_client.flushall()
    rebuild = store._rebuild
    assert rebuild is not None
    records = JobRecords(rebuild._jobs_dir.job(claim.job_id)).versions()
    assert records
    await rebuild._restore_versions(claim.job_id, records)
    assert await redis_client.keys() == []


@pytest.mark.parametrize("after", ["_seen", "_own_epoch"])
async def test_a_server_that_is_wiped_in_the_middle_of_a_claim_is_claimed_from_again(
    store: Store, redis_client: Redis, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    job = (await store.jobs.create("{}")).id
    real = getattr(store.jobs, after)

    async def then_wipe(*args: Any) -> Any:
        answer = await real(*args)
        await redis_client.flushall()
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(store.jobs, after, then_wipe)
        first = await store.jobs.claim("trainer")
    if first is not None:  # it was restored in time, and somebody may have it: this one is fenced
        with pytest.raises(Fenced):
            await store.jobs.beat(job, first.token)
    claim = await store.jobs.claim("trainer")
    assert claim is not None
    assert claim.job_id == job
    await store.jobs.beat(job, claim.token)


async def test_a_server_that_is_wiped_while_it_gets_its_jobs_back_gets_them_once_more(
    store: Store, redis_client: Redis, claim: Claim, jobs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (jobs_dir / claim.job_id / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    await redis_client.flushall()
    wipes = [redis_client.flushall]
    restore = Rebuild._restore_environments

    async def then_wipe(self: Rebuild, job: str, directory: JobRecords) -> None:
        await restore(self, job, directory)
        if wipes:
            await wipes.pop()()

    monkeypatch.setattr(Rebuild, "_restore_environments", then_wipe)
    assert await store.rebuild() == 1
    assert [record["step"] for record in await store.metrics.read(claim.job_id)] == [1]


@pytest.mark.parametrize("is_wiped_again", [False, True])
async def test_one_job_of_a_key_though_the_server_is_wiped_before_the_first_is_on_disk(
    redis_client: Redis, store: Store, jobs_dir: Path, monkeypatch: pytest.MonkeyPatch, is_wiped_again: bool
) -> None:
    """The one through another API process finds neither the key nor the job, and is answered first."""
    accept, loop, answers = JobRecords.accept, asyncio.get_running_loop(), list[JobRecord]()

    async def wipe_and_ask_elsewhere() -> None:
        await redis_client.flushall()
        other = Store(redis_client, jobs_dir=JobsDir(jobs_dir))
        answers.append(await other.jobs.create("{}", idempotency_key="key", job_id="job_b"))
        if is_wiped_again:
            await redis_client.flushall()

    def late(self: JobRecords, wanted: AcceptedJob) -> AcceptedJob:
        monkeypatch.undo()
        asyncio.run_coroutine_threadsafe(wipe_and_ask_elsewhere(), loop).result(30)
        return accept(self, wanted)

    monkeypatch.setattr(JobRecords, "accept", late)
    answers.append(await store.jobs.create("{}", idempotency_key="key", job_id="job_a"))
    assert [job.id for job in answers] == ["job_b", "job_b"]
    assert [job.id for job in await store.jobs.page()] == ["job_b"]
    await redis_client.flushall()
    assert [job.id for job in await store.jobs.page()] == ["job_b"]


@pytest.mark.parametrize("first", ["job_a", "job_b"])
async def test_a_key_is_not_taken_while_a_wiped_server_has_not_its_keys_back(
    redis_client: Redis, store: Store, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """It was whole when it was looked at, and lost everything before the key was asked for."""
    await store.jobs.create("{}", idempotency_key="key", job_id=first)
    ensure, wipes = Rebuild.ensure, [redis_client.flushall]

    async def then_wipe(self: Rebuild) -> None:
        await ensure(self)
        if wipes:
            await wipes.pop()()

    monkeypatch.setattr(Rebuild, "ensure", then_wipe)
    other = "job_b" if first == "job_a" else "job_a"
    assert (await store.jobs.create("{}", idempotency_key="key", job_id=other)).id == first
    assert [job.id for job in await store.jobs.page()] == [first]


async def test_of_two_jobs_under_one_key_the_one_that_was_answered_is_brought_back(
    redis_client: Redis, store: Store, jobs_dir: Path
) -> None:
    """The other was written down by a process that died before it could withdraw it."""
    await store.jobs.create("{}", idempotency_key="key", job_id="job_b")
    answered = JobRecords(JobsDir(jobs_dir).job("job_b")).accepted()
    JobRecords(JobsDir(jobs_dir).job("job_a")).accept(answered)
    await redis_client.flushall()
    assert [job.id for job in await store.jobs.page()] == ["job_b"]
