"""Episodes erased over HTTP: by episode and by user, in the queue, the logs of a job and of its forks; what stays."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import threading
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from gspo_core.api_answers import ErasedEpisodes
from gspo_core.cli.traffic import tell
from gspo_core.codec import decode, encode
from gspo_core.log import layout
from gspo_core.log.batches import LoggedBatch, decode_batch
from gspo_core.log.records import AcceptedJob, encode_record
from gspo_core.position import Position
from gspo_core.types import Asked, EpisodeKey, Group, Split, Trajectory
from services.api.forgetting import Forgetting
from services.files import erasing
from services.files.batch_log import BatchLog
from services.files.job_dir import JobDir, JobsDir
from services.files.trained_log import TrainedLog
from services.state.jobs import JobStatus
from services.state.queue import Append, Bus
from services.state.queue_records import ErasedWord
from services.state.store import Store
from tests.patience import HANG_S
from tests.services.api.api_kit import application, error_of, http_to
from tests.services.api.recorded_job import RecordedJob, record_job, write_model
from tests.services.state.test_bus_erasing import everything_in


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
async def job(store: Store, bus: Bus, tmp_path: Path, model_dir: Path) -> RecordedJob:
    """Members 1 and 3 of each group were asked for by ann, the others by bob."""
    recorded = await record_job(store, bus, tmp_path, model_dir)
    for path in (tmp_path / recorded.id / layout.BATCHES).iterdir():
        batch = decode_batch(path.read_bytes())
        path.unlink()
        BatchLog(JobDir(tmp_path / recorded.id)).write(
            *batch.position, [_named(one) for one in batch.groups], batch.extra
        )
    return recorded


def _named(group: Group) -> Group:
    episodes = []
    for one in group:
        user = "ann" if one.key.member % 2 else "bob"
        first = replace(one.segments[0], asked=Asked(None, "", "messages", "m", 1, 0), user=user)
        episodes.append(Trajectory((first, *one.segments[1:])))
    return Group(group.job, group.group, group.split, group.task_index, group.size, tuple(episodes))


@pytest.fixture
async def http(store: Store, tmp_path: Path, job: RecordedJob) -> AsyncIterator[httpx.AsyncClient]:
    async with application(store, jobs_dir=tmp_path) as app, http_to(app) as http:
        yield http


async def read(http: httpx.AsyncClient, path: str) -> Any:
    answer = await http.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


def logs(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted((folder / layout.BATCHES).iterdir()))


def all_files(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


async def test_what_a_running_job_may_train_again_is_not_erased(
    http: httpx.AsyncClient, job: RecordedJob, tmp_path: Path
) -> None:
    before = logs(tmp_path / job.id)
    refused = await http.delete(f"/v1/episodes/{job.id}/0/1")
    assert (refused.status_code, error_of(refused)["code"]) == (409, "episode_in_use")
    assert "step 1 may have to be trained again" in error_of(refused)["message"]
    told = (await http.delete(f"/v1/jobs/{job.id}/episodes?user=ann")).json()
    assert (told["erased"], len(told["not_yet"])) == ([], 24)
    assert logs(tmp_path / job.id) == before


async def test_steps_of_a_checkpoint_are_erased_while_the_job_runs(
    http: httpx.AsyncClient, job: RecordedJob, tmp_path: Path
) -> None:
    (tmp_path / job.id / layout.CHECKPOINTS / layout.step_name(Position(job.claim.epoch, 4))).mkdir(parents=True)
    told = (await http.delete(f"/v1/jobs/{job.id}/episodes?user=ann")).json()
    assert sorted({one["step"] for one in told["erased"]}) == [1, 2, 3, 4]
    assert sorted({one["step"] for one in told["not_yet"]}) == [5, 6]


async def test_an_episode_is_erased_and_its_step_is_still_counted(
    http: httpx.AsyncClient, store: Store, job: RecordedJob, tmp_path: Path
) -> None:
    await store.jobs.set_status(job.id, JobStatus.FAILED)
    address = f"/v1/episodes/{job.id}/2/1"
    before = await read(http, f"{address}?include=tokens")
    assert (before["users"], before["is_erased"], before["step"]) == (["ann"], False, 2)
    assert any(before["tokens"]["id"])
    told = (await http.delete(address)).json()
    assert told["erased"] == [{"episode": f"{job.id}/2/1", "step": 2, "epoch": job.claim.epoch, "in_job": job.id}]
    assert told["stays"][0].startswith("the weights since step 2")
    for asked in (address, f"{address}?include=tokens", f"{address}/events"):
        gone = await http.get(asked)
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "episode_erased")
    lines = (await http.get(f"/v1/jobs/{job.id}/episodes.jsonl?include=tokens")).text.splitlines()
    (after,) = (one for one in map(json.loads, lines) if one["is_erased"])
    assert after["users"] == []
    assert "was erased" in after["note"]
    same = ("reward", "reward_parts", "advantage", "versions", "num_tokens", "num_actions", "num_turns", "stop_reason")
    assert {name: after[name] for name in same} == {name: before[name] for name in same}
    assert set(after["tokens"]["id"]) == {0}
    assert (set(after["tokens"]["logprob"]), set(after["tokens"]["ratio"])) == ({0.0}, {None})
    assert all(not turn["text"] and not turn["messages"] for turn in after["turns"])
    assert (2, 1) not in TrainedLog(JobDir(tmp_path / job.id)).read(job.claim.epoch, 2)
    group = await read(http, f"/v1/groups/{job.id}/2")
    assert [one["is_erased"] for one in group["episodes"]] == [False, True, False, False]
    again = await http.delete(address)
    assert (again.status_code, again.json()["erased"]) == (200, [])
    lines = (await http.get(f"/v1/jobs/{job.id}/episodes.jsonl")).text.splitlines()
    assert sum(json.loads(line)["is_erased"] for line in lines) == 1


async def test_a_user_is_erased_in_every_step(
    http: httpx.AsyncClient, store: Store, job: RecordedJob, tmp_path: Path
) -> None:
    await store.jobs.set_status(job.id, JobStatus.FAILED)
    of_ann = (await read(http, f"/v1/jobs/{job.id}/episodes?user=ann&limit=100"))["data"]
    told = (await http.delete(f"/v1/jobs/{job.id}/episodes?user=ann")).json()
    assert sorted(one["episode"] for one in told["erased"]) == sorted(one["id"] for one in of_ann)
    assert {(one["in_job"], one["step"]) for one in told["erased"]} == {(job.id, step) for step in range(1, 7)}
    assert b"ann" not in logs(tmp_path / job.id)
    assert (await read(http, f"/v1/jobs/{job.id}/episodes?user=ann"))["data"] == []
    assert len((await read(http, f"/v1/jobs/{job.id}/episodes?user=bob&limit=100"))["data"]) == 24
    assert (await http.delete(f"/v1/jobs/{job.id}/episodes?user=ann")).json()["erased"] == []
    assert (await http.delete(f"/v1/jobs/{job.id}/episodes")).status_code == 422


async def test_what_forks_were_brought_is_erased_too(
    http: httpx.AsyncClient, store: Store, job: RecordedJob, tmp_path: Path
) -> None:
    """Their logs are other names of the same files, or copies."""
    await store.jobs.set_status(job.id, JobStatus.FAILED)
    spec = json.dumps({"model": "m", "environments": [{"ref": "a:B"}], "parent": {"job": job.id, "step": 3}})
    child = tmp_path / "job_child"
    accepted = AcceptedJob(spec, hashlib.sha256(spec.encode()).hexdigest(), "2026-01-01T00:00:00.000Z")
    brought = child / layout.ORIGIN / layout.BATCHES
    brought.mkdir(parents=True)
    (child / layout.ACCEPTED).write_bytes(encode_record(accepted))
    name = layout.step_name(Position(job.claim.epoch, 3))
    os.link(tmp_path / job.id / layout.BATCHES / name, brought / name)
    told = (await http.delete(f"/v1/jobs/{job.id}/episodes?user=ann")).json()
    assert [one["step"] for one in told["erased"] if one["in_job"] == "job_child"] == [3] * 4
    assert b"ann" not in (brought / name).read_bytes()


async def test_a_log_that_cannot_be_read_is_told(
    http: httpx.AsyncClient, store: Store, job: RecordedJob, tmp_path: Path
) -> None:
    await store.jobs.set_status(job.id, JobStatus.FAILED)
    path = JobDir(tmp_path / job.id).batch(Position(job.claim.epoch, 2))
    path.write_bytes(path.read_bytes()[:-1])
    told = (await http.delete(f"/v1/jobs/{job.id}/episodes?user=ann")).json()
    assert len(told["erased"]) == 20
    assert path.name in told["unreadable"][0]


async def name_in_queue(bus: Bus, job: RecordedJob, users: Mapping[int, str]) -> str:
    """In another group members are played for these users; gives the token of who holds them."""
    group = job.open_group + 1
    await bus.dispatch(job.id, job.claim.token, group, size=4, split=Split.TRAIN, task_index=0)
    token = await bus.join("gateway-0")
    leases = await bus.lease(job.id, "gateway-0", token, 10)
    (first, *_) = [decode(one) for one in await bus.read_episode(EpisodeKey(job.id, job.open_group, 1))]
    for lease in (one for one in leases if one.key.group == group and one.key.member in users):
        asked = Asked(None, "", "messages", "m", 1, 0)
        segment = replace(first, key=lease.key, asked=asked, user=users[lease.key.member])
        await bus.append(job.id, token, [Append(lease.key, 0, 0, encode(segment), final=False)])
    return token


async def test_a_user_is_erased_from_the_queue_and_others_stay(
    http: httpx.AsyncClient, store: Store, bus: Bus, job: RecordedJob, tmp_path: Path
) -> None:
    await name_in_queue(bus, job, {0: "ann-of-the-test", 1: "bob-of-the-test", 2: "ann-of-the-test"})
    address, group = f"/v1/jobs/{job.id}/episodes?user=ann-of-the-test", job.open_group + 1
    assert b"ann-of-the-test" in await everything_in(store._functions.redis)
    told = (await http.delete(address)).json()
    assert told["queued"] == [f"{job.id}/{group}/0", f"{job.id}/{group}/2"]
    assert (told["in_use"], told["erased"], told["not_yet"], told["unreadable"]) == ([], [], [], [])
    assert any("append-only file" in one for one in told["stays"])
    everything = await everything_in(store._functions.redis)
    assert b"ann-of-the-test" not in everything
    assert b"bob-of-the-test" in everything
    assert b"ann-of-the-test" not in all_files(tmp_path)
    (view,) = await bus.groups(job.id, after=group - 1, limit=1)
    assert [one.stage for one in view.episodes] == ["dead", "held", "dead", "held"]
    assert (await read(http, f"/v1/groups/{job.id}/{group}"))["id"]
    assert (await http.delete(address)).json()["queued"] == []


async def test_an_episode_is_erased_from_the_queue_at_any_stage(
    http: httpx.AsyncClient, bus: Bus, job: RecordedJob
) -> None:
    for member in range(4):  # one that has ended, one that is played, two that nobody has begun
        address = f"/v1/episodes/{job.id}/{job.open_group}/{member}"
        told = (await http.delete(address)).json()
        assert told["queued"] == [f"{job.id}/{job.open_group}/{member}"]
        assert (await http.delete(address)).json() == told  # asked again
        assert await bus.read_episode(EpisodeKey(job.id, job.open_group, member)) == []
    (ready,) = await bus.ready_groups(job.id)
    assert (ready.group, ready.erased) == (job.open_group, (0, 1, 2, 3))


async def test_what_is_being_written_into_a_log_is_told(http: httpx.AsyncClient, bus: Bus, job: RecordedJob) -> None:
    await name_in_queue(bus, job, {0: "cem", 3: "cem"})
    group = job.open_group + 1
    await bus.seal(job.id, job.claim.token, {group: [0]})
    refused = await http.delete(f"/v1/episodes/{job.id}/{group}/0")
    assert (refused.status_code, error_of(refused)["code"]) == (409, "episode_in_use")
    assert "being written into a batch log" in error_of(refused)["message"]
    told = (await http.delete(f"/v1/jobs/{job.id}/episodes?user=cem")).json()
    assert told["queued"] == []
    assert [one["episode"] for one in told["in_use"]] == [f"{job.id}/{group}/0", f"{job.id}/{group}/3"]
    assert all("being written" in one["why"] for one in told["in_use"])


async def test_an_api_that_dies_halfway_is_asked_again(
    http: httpx.AsyncClient, store: Store, bus: Bus, job: RecordedJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    await name_in_queue(bus, job, {0: "cem", 1: "cem", 2: "cem"})
    real, num_calls = Bus.erase, 0

    async def dies(self: Bus, key: EpisodeKey) -> ErasedWord:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise ConnectionAbortedError
        return await real(self, key)

    address, group = f"/v1/jobs/{job.id}/episodes?user=cem", job.open_group + 1
    with monkeypatch.context() as patch:
        patch.setattr(Bus, "erase", dies)
        assert (await http.delete(address)).status_code == 500
    assert b"cem" in await everything_in(store._functions.redis)
    told = (await http.delete(address)).json()
    assert told["queued"] == [f"{job.id}/{group}/1", f"{job.id}/{group}/2"]
    assert b"cem" not in await everything_in(store._functions.redis)


async def test_a_segment_of_the_queue_that_cannot_be_read_is_told(
    http: httpx.AsyncClient, bus: Bus, job: RecordedJob
) -> None:
    token = await name_in_queue(bus, job, {0: "cem"})
    other = EpisodeKey(job.id, job.open_group + 1, 1)
    await bus.append(job.id, token, [Append(other, 0, 0, b"of another release", final=False)])
    told = (await http.delete(f"/v1/jobs/{job.id}/episodes?user=cem")).json()
    assert len(told["queued"]) == 1
    (said,) = told["unreadable"]
    assert said.startswith("a segment in the queue: ")


async def test_nobody_erases_what_was_never_there(http: httpx.AsyncClient, store: Store, job: RecordedJob) -> None:
    await store.jobs.set_status(job.id, JobStatus.FAILED)
    for place, code in (("2/7", "episode_not_found"), ("999/0", "group_not_found")):
        answer = await http.delete(f"/v1/episodes/{job.id}/{place}")
        assert (answer.status_code, error_of(answer)["code"]) == (404, code)


def test_the_command_names_what_left_the_queue_and_what_could_not(capsys: pytest.CaptureFixture[str]) -> None:
    nothing: dict[str, Any] = {"object": "episodes.erased", "erased": [], "not_yet": [], "unreadable": [], "stays": []}
    done = cast(ErasedEpisodes, {**nothing, "queued": ["job_a/3/1"], "in_use": []})
    assert tell(done) == 0
    assert "erased: 1 episode not trained before, nor from now on\n  job_a/3/1\n" in capsys.readouterr().out
    done["in_use"] = [{"episode": "job_a/4/0", "why": "its group is being written"}]
    assert tell(done) == 1
    assert "not yet: job_a/4/0: its group is being written\n" in capsys.readouterr().out


# --- by age

NOW = 1_900_000_000.0


def accept(tmp_path: Path, job: RecordedJob) -> None:
    spec = json.dumps({"model": "m", "environments": [{"ref": "a:B"}]})
    accepted = AcceptedJob(spec, hashlib.sha256(spec.encode()).hexdigest(), "2026-01-01T00:00:00.000Z")
    (tmp_path / job.id / layout.ACCEPTED).write_bytes(encode_record(accepted))


def age(tmp_path: Path, job: RecordedJob, days: Mapping[int, float]) -> None:
    """Makes the logs of these steps so old, and the others new."""
    for step in range(1, 7):
        at = NOW - days.get(step, 0.0) * 86_400
        os.utime(JobDir(tmp_path / job.id).batch(Position(job.claim.epoch, step)), (at, at))


async def steps_left(http: httpx.AsyncClient, job: RecordedJob) -> set[int]:
    shown = (await read(http, f"/v1/jobs/{job.id}/episodes?limit=100"))["data"]
    found = [await http.get(f"/v1/episodes/{one['id']}") for one in shown]
    gone = [one for one in found if one.status_code != 200]
    assert {(one.status_code, one.json()["error"]["code"]) for one in gone} <= {(404, "episode_erased")}
    return {one.json()["step"] for one in found if one.status_code == 200}


async def test_what_is_older_than_is_to_be_kept_is_erased(
    http: httpx.AsyncClient, store: Store, job: RecordedJob, tmp_path: Path
) -> None:
    accept(tmp_path, job)
    age(tmp_path, job, {1: 40, 2: 31, 3: 29})
    await store.jobs.set_status(job.id, JobStatus.FAILED)
    forgetting = Forgetting(store, JobsDir(tmp_path), lambda: NOW)
    running = asyncio.create_task(forgetting.run(30.0, every_s=1e9))
    async with asyncio.timeout(HANG_S):
        while await steps_left(http, job) != {3, 4, 5, 6}:
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.wait([running])
    age_of_first = NOW - JobDir(tmp_path / job.id).batch(Position(job.claim.epoch, 1)).stat().st_mtime
    assert age_of_first == 40 * 86_400  # it is as old as before
    assert await forgetting.forget(NOW - 30 * 86_400) == 0
    assert await forgetting.forget(NOW - 28 * 86_400) == 8


async def test_what_a_job_may_train_again_is_forgotten_with_its_next_checkpoint(
    http: httpx.AsyncClient, store: Store, job: RecordedJob, tmp_path: Path
) -> None:
    accept(tmp_path, job)
    age(tmp_path, job, dict.fromkeys(range(1, 7), 40))
    forgetting = Forgetting(store, JobsDir(tmp_path), lambda: NOW)
    assert await forgetting.forget(NOW) == 0
    (tmp_path / job.id / layout.CHECKPOINTS / layout.step_name(Position(job.claim.epoch, 4))).mkdir(parents=True)
    assert await forgetting.forget(NOW) == 4 * 8
    assert await steps_left(http, job) == {5, 6}


def bring_third(tmp_path: Path, job: RecordedJob, kind: str, days: float) -> Path:
    """Another job whose directory holds the third log, so old."""
    spec = json.dumps({"model": "m", "environments": [{"ref": "a:B"}], "parent": {"job": job.id, "step": 2}})
    accepted = AcceptedJob(spec, hashlib.sha256(spec.encode()).hexdigest(), "2026-01-01T00:00:00.000Z")
    at = Position(job.claim.epoch, 3)
    path = tmp_path / "job_child" / kind / layout.step_name(at)
    path.parent.mkdir(parents=True)
    (tmp_path / "job_child" / layout.ACCEPTED).write_bytes(encode_record(accepted))
    path.write_bytes(JobDir(tmp_path / job.id).batch(at).read_bytes())
    os.utime(path, (NOW - days * 86_400,) * 2)
    return path


@pytest.mark.parametrize(
    "kind", [f"{layout.RECORDED}/{layout.BATCHES}", f"{layout.ORIGIN}/{layout.BATCHES}", layout.BATCHES]
)
async def test_what_another_job_was_brought_is_forgotten_when_it_is_old_there(
    http: httpx.AsyncClient, store: Store, job: RecordedJob, tmp_path: Path, kind: str
) -> None:
    """It was read into that job's log, or written anew, long after it was played."""
    accept(tmp_path, job)
    age(tmp_path, job, dict.fromkeys(range(1, 7), 40))
    await store.jobs.set_status(job.id, JobStatus.FAILED)
    brought = bring_third(tmp_path, job, kind, 5)
    (tmp_path / "job_child" / layout.CHECKPOINTS / layout.step_name(Position(1, 4))).mkdir(parents=True)
    forgetting = Forgetting(store, JobsDir(tmp_path), lambda: NOW)
    assert await forgetting.forget(NOW - 30 * 86_400) == 6 * 8
    assert b"ann" in brought.read_bytes()
    assert await forgetting.forget(NOW - 4 * 86_400) == 8
    assert b"ann" not in brought.read_bytes()


async def test_what_a_job_was_brought_and_is_yet_to_be_fed_is_kept(
    http: httpx.AsyncClient, store: Store, job: RecordedJob, tmp_path: Path
) -> None:
    brought = bring_third(tmp_path, job, f"{layout.RECORDED}/{layout.BATCHES}", 40)
    (tmp_path / "job_child" / layout.CHECKPOINTS / layout.step_name(Position(1, 2))).mkdir(parents=True)
    forgetting = Forgetting(store, JobsDir(tmp_path), lambda: NOW)
    assert await forgetting.forget(NOW) == 0
    assert b"ann" in brought.read_bytes()
    (tmp_path / "job_child" / layout.CHECKPOINTS / layout.step_name(Position(1, 3))).mkdir(parents=True)
    assert await forgetting.forget(NOW) == 8


async def test_a_job_whose_files_cannot_be_written_holds_up_no_other(
    http: httpx.AsyncClient, store: Store, job: RecordedJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept(tmp_path, job)
    age(tmp_path, job, dict.fromkeys(range(1, 7), 40))
    await store.jobs.set_status(job.id, JobStatus.FAILED)
    (tmp_path / "a_first").symlink_to(tmp_path / job.id)
    real = erasing.erase_old

    def refuses(place: JobDir, name: str, **given: Any) -> erasing.Erasure:
        if name == "a_first":
            raise PermissionError(13, "Permission denied")
        return real(place, name, **given)

    monkeypatch.setattr(erasing, "erase_old", refuses)
    assert await Forgetting(store, JobsDir(tmp_path), lambda: NOW).forget(NOW - 30 * 86_400) == 6 * 8


def test_two_who_erase_at_once_put_nothing_back(
    job: RecordedJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, real, others = JobDir(tmp_path / job.id), erasing.read_batch, list[threading.Thread]()
    has_tried = threading.Event()

    def erase(user: str) -> None:
        erasing.erase(place, job.id, erasing.of_user(user), {}, safe_until=None)

    def locks(file: Any, how: int) -> None:
        if others and threading.current_thread() is others[0]:
            has_tried.set()
        fcntl.flock(file, how)

    def reads(path: Path) -> LoggedBatch:
        batch = real(path)
        if not others:
            others.append(threading.Thread(target=erase, args=("ann",)))
            others[0].start()
            assert has_tried.wait(HANG_S)
        return batch

    monkeypatch.setattr(erasing, "read_batch", reads)
    monkeypatch.setattr(erasing, "fcntl", SimpleNamespace(flock=locks, LOCK_EX=fcntl.LOCK_EX))
    erase("bob")
    others[0].join(HANG_S)
    assert not others[0].is_alive()
    left = logs(tmp_path / job.id)
    assert (b"ann" in left, b"bob" in left) == (False, False)


def test_a_log_that_is_removed_while_it_is_erased_ends_nothing(
    job: RecordedJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, real = JobDir(tmp_path / job.id), erasing.read_batch
    gone = place.batch(Position(job.claim.epoch, 2))

    def reads(path: Path) -> LoggedBatch:
        batch = real(path)
        if path == gone:
            path.unlink()
        return batch

    monkeypatch.setattr(erasing, "read_batch", reads)
    found = erasing.erase(place, job.id, erasing.of_user("ann"), {}, safe_until=None)
    assert {one.step for one in found.erased} == {1, 3, 4, 5, 6}
    assert not gone.exists()


async def test_without_a_setting_everything_is_kept(store: Store, job: RecordedJob, tmp_path: Path) -> None:
    accept(tmp_path, job)
    age(tmp_path, job, dict.fromkeys(range(1, 7), 4000))
    await store.jobs.set_status(job.id, JobStatus.FAILED)
    before = logs(tmp_path / job.id)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await Forgetting(store, JobsDir(tmp_path), lambda: NOW).run(None)
    assert logs(tmp_path / job.id) == before
