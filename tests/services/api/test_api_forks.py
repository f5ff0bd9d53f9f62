"""Forks and resumed jobs over HTTP: what is asked is checked against what is kept, and what cannot be is not made."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from redis.asyncio import Redis

from gspo_core.cli import main
from gspo_core.client import Client
from gspo_core.position import Position
from gspo_core.replay.past import Past
from services.files.job_dir import JobDir, JobsDir
from services.files.origin import plan
from services.state.jobs import JobStatus
from services.state.kept_replies import KeptReplies
from services.state.queue import Bus
from services.state.store import Store
from tests.chaos.disk import Disk
from tests.core.learner_support import write_model
from tests.core.past_kit import MadePast, make_past, spec_of
from tests.services.api.api_kit import application, error_of, http_to
from tests.services.api.recorded_job import write_model as with_tokenizer


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadePast:
    model = write_model(tmp_path_factory.mktemp("model"))
    shutil.copy(with_tokenizer(tmp_path_factory.mktemp("tokenizer") / "model") / "tokenizer.json", model)
    return make_past(tmp_path_factory.mktemp("jobs") / "job_made", spec_of(model))


@pytest.fixture
async def http(store: Store, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with application(store, jobs_dir=tmp_path / "jobs") as app, http_to(app) as http:
        yield http


@pytest.fixture
async def job(http: httpx.AsyncClient, store: Store, tmp_path: Path, made: MadePast) -> str:
    return await over(store, made, tmp_path / "jobs")


async def over(store: Store, made: MadePast, jobs: Path) -> str:
    """A job that took six steps, with what they left."""
    job = (await store.jobs.create(made.spec)).id
    await store.jobs.claim("trainer")
    claim_token = (await store._functions.redis.hget(f"gspo:{{{job}}}:trainer", "token") or b"").decode()
    for status in (JobStatus.RUNNING, JobStatus.SUCCEEDED):
        await store.jobs.update_progress(job, claim_token, 6, 6)
        await store.jobs.set_status(job, status, token=claim_token)
    shutil.copytree(made.folder, jobs / job, ignore=shutil.ignore_patterns("job.json"), dirs_exist_ok=True)
    if not (jobs / job / "job.json").exists():
        shutil.copy(made.folder / "job.json", jobs / job)
    return job


async def test_a_fork_is_a_job_with_a_parent_and_its_files(http: httpx.AsyncClient, job: str, tmp_path: Path) -> None:
    body = {"step": 3, "set": {"optimizer.lr": 1e-4, "steps": 9}, "same_batches": True, "name": "slower"}
    plan = await http.post(f"/v1/jobs/{job}/fork?dry_run=true", json=body)
    assert plan.status_code == 200
    assert plan.json() | {"object": ""} == {
        "object": "",
        "parent": job,
        "step": 3,
        "from_checkpoint": 2,
        "replayed_steps": 1,
        "same_batches": 3,
    }
    answer = await http.post(f"/v1/jobs/{job}/fork", json=body)
    assert answer.status_code == 201, answer.text
    child = answer.json()
    assert child["parent"] == {"job": job, "step": 3, "same_batches": True, "last": None, "without": []}
    assert (child["name"], child["steps"], child["status"]) == ("slower", 9, "queued")
    config = (await http.get(f"/v1/jobs/{child['id']}/config")).json()["config"]
    assert config["optimizer"]["lr"] == 1e-4
    assert "name" not in config["objective"], "its parent had none, so it brings no other bounds than that had"
    origin = JobDir(tmp_path / "jobs" / child["id"]).origin
    assert sorted(path.name for path in origin.batches.iterdir()) == [f"ep000001-step00000{n}" for n in (3, 4, 5, 6)]
    assert [one["id"] for one in (await http.get(f"/v1/jobs?parent={job}")).json()["data"]] == [child["id"]]
    assert (await http.get(f"/v1/jobs/{job}")).json()["parent"] is None


async def test_a_repeated_fork_makes_one_job(http: httpx.AsyncClient, job: str) -> None:
    headers = {"Idempotency-Key": "fork-1"}
    answers = [await http.post(f"/v1/jobs/{job}/fork", json={"step": 2}, headers=headers) for _ in range(3)]
    assert len({one.json()["id"] for one in answers}) == 1
    assert len((await http.get(f"/v1/jobs?parent={job}")).json()["data"]) == 1


async def test_a_repeated_fork_of_the_newest_step_is_that_of_then(
    http: httpx.AsyncClient, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API was killed before it kept its answer, and the parent went on meanwhile."""
    newest = iter((3, 4, 5))
    monkeypatch.setattr("services.api.routes.forks._newest", lambda _: next(newest))
    monkeypatch.setattr(KeptReplies, "keep", lambda self, name, _, owner, __: self.drop(name, owner))
    headers = {"Idempotency-Key": "fork-1"}
    answers = [await http.post(f"/v1/jobs/{job}/fork", json={}, headers=headers) for _ in range(2)]
    assert [one.status_code for one in answers] == [201, 201]
    assert len({one.json()["id"] for one in answers}) == 1
    other = await http.post(f"/v1/jobs/{job}/fork", json={}, headers={"Idempotency-Key": "fork-2"})
    assert (other.status_code, other.json()["parent"]["step"]) == (201, 4)


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"step": 9, "set": {"steps": 20}}, 409, "nothing that is kept leads to step 9; there is a way to 0-6"),
        ({"step": 99}, 409, "nothing that is kept leads to step 99; there is a way to 0-6"),
        ({"step": 9_999_999, "set": {"steps": 10**7}}, 409, "there is a way to 0-6"),
        ({"step": 2**53, "set": {"steps": 2**53 + 1}}, 422, "steps may be at most 10,000,000"),
        ({"step": -1}, 422, "step"),
        ({"step": 2**53 + 1}, 422, "step"),
        ({"step": "two"}, 422, "step"),
        ({"step": 2, "set": {"optimizer.lrr": 1}}, 422, "optimizer.lrr is not a setting of a job"),
        ({"step": 2, "set": {"model": "elsewhere"}}, 422, "model: a fork goes on with the weights of its parent"),
        ({"step": 2, "set": {"learner.lora": {"rank": 2}}}, 422, "learner.lora: a fork goes on with the weights"),
        (
            {"step": 2, "set": {"optimizer.moments": "8bit"}},
            422,
            "optimizer.moments: a fork goes on with the moments of its parent, which has float32",
        ),
        ({"step": 6}, 422, "steps: 6 are over"),
        ({"steps": 6}, 422, "steps"),
        ({"step": 2, "last": 4}, 422, "last: of what it is fed; set same_batches"),
        ({"step": 2, "without": ["3"]}, 422, "without: of what it is fed; set same_batches"),
        ({"step": 2, "last": 2, "same_batches": True}, 422, "2 is not after the step 2"),
        ({"step": 2, "last": 9, "same_batches": True}, 409, "step 7: its batch is not kept"),
        ({"step": 2, "without": ["999"], "same_batches": True}, 422, "group 999: not in the batches that it would be"),
        (
            {"step": 2, "without": [""], "same_batches": True},
            422,
            "without[0]: string should have at least 1 character",
        ),
        ({"step": 2, "without": ["frm"], "same_batches": True}, 422, "a reward part 'frm': not in the batches"),
    ],
)
async def test_what_cannot_be_forked_is_refused_and_nothing_is_made(
    http: httpx.AsyncClient, job: str, body: dict[str, object], status: int, said: str
) -> None:
    answer = await http.post(f"/v1/jobs/{job}/fork", json=body)
    assert answer.status_code == status, answer.text
    assert said in error_of(answer)["message"]
    dry = await http.post(f"/v1/jobs/{job}/fork", json=body, params={"dry_run": True})
    assert (dry.status_code, error_of(dry)["message"]) == (status, error_of(answer)["message"])
    assert len((await http.get("/v1/jobs")).json()["data"]) == 1


async def test_a_fork_of_the_first_step_may_keep_its_moments_otherwise(http: httpx.AsyncClient, job: str) -> None:
    """There are none yet."""
    answer = await http.post(f"/v1/jobs/{job}/fork", json={"step": 0, "set": {"optimizer.moments": "8bit"}})
    assert answer.status_code == 201, answer.text


async def test_a_dry_run_of_a_job_with_a_parent_looks_at_the_parent(
    http: httpx.AsyncClient, job: str, made: MadePast
) -> None:
    """It said that the job was valid, and the job was refused."""
    spec = made.spec.model_dump(mode="json") | {"steps": 9}
    for at, status in (
        ({"step": 3, "without": ["999"]}, 422),
        ({"step": 7}, 409),
        ({"step": 3, "job": "job_x"}, 404),
        ({"step": 3}, 200),
    ):
        body = spec | {"parent": {"job": job, "same_batches": True} | at}
        answer = await http.post("/v1/jobs?dry_run=true", json=body)
        assert answer.status_code == status, answer.text


async def test_a_dry_run_refuses_what_the_fork_would_be_refused_for(http: httpx.AsyncClient, job: str) -> None:
    body = {"step": 3, "set": {"steps": 10**8}}
    for query in ({}, {"dry_run": True}):
        answer = await http.post(f"/v1/jobs/{job}/fork", json=body, params=query)
        assert (answer.status_code, error_of(answer)["param"]) == (422, "steps"), query


async def test_a_fork_that_is_refused_in_the_end_leaves_nothing(
    http: httpx.AsyncClient, job: str, tmp_path: Path
) -> None:
    """Its environments are looked at last, and what it was to be brought takes room."""
    body = {"step": 3, "set": {"environments": [{"ref": "nowhere"}]}}
    assert (await http.post(f"/v1/jobs/{job}/fork", json=body)).status_code == 422
    assert [path.name for path in (tmp_path / "jobs").iterdir()] == [job]


async def test_a_fork_whose_first_request_died_is_made_by_the_next_one(
    http: httpx.AsyncClient, store: Store, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under one key; it died after it had brought everything and taken the key. There is one job and one directory."""
    headers, body = {"Idempotency-Key": "fork-1"}, {"step": 3}

    class Killed(Exception):
        pass

    async def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("services.state.job_table.JobTable._accept", killed)
        assert (await http.post(f"/v1/jobs/{job}/fork", json=body, headers=headers)).status_code == 500
    [left] = [path for path in (tmp_path / "jobs").iterdir() if path.name != job]
    assert [path.name for path in left.iterdir()] == ["origin"]
    answer = await http.post(f"/v1/jobs/{job}/fork", json=body, headers=headers)
    assert (answer.status_code, answer.json()["id"]) == (201, left.name)
    assert sorted(path.name for path in (tmp_path / "jobs").iterdir()) == sorted([job, left.name])
    assert [one["id"] for one in (await http.get(f"/v1/jobs?parent={job}")).json()["data"]] == [left.name]


async def test_a_fork_of_a_fork_that_has_not_begun_says_the_whole_way(
    redis_client: Redis, bus: Bus, made: MadePast, tmp_path: Path
) -> None:
    """It has no checkpoint of its own yet, so its child begins with what it was brought."""
    jobs = tmp_path / "jobs"
    store = Store(redis_client, jobs_dir=JobsDir(jobs))
    await store.load_functions()
    job, asked = await over(store, made, jobs), {"step": 3, "set": {"optimizer.lr": 1e-4}}
    async with application(store, jobs_dir=jobs) as app, http_to(app) as http:
        child = (await http.post(f"/v1/jobs/{job}/fork", json={"step": 3, "same_batches": True})).json()["id"]
        said = (await http.post(f"/v1/jobs/{child}/fork?dry_run=true", json=asked)).json()
        assert (said["from_checkpoint"], said["replayed_steps"]) == (2, 1)
        grandchild = (await http.post(f"/v1/jobs/{child}/fork", json=asked)).json()
        assert grandchild["parent"]["job"] == child
        refused = await http.post(f"/v1/jobs/{child}/fork", json={"step": 5})
        assert "nothing that is kept leads to step 5; there is a way to 3" in error_of(refused)["message"]
        newest = await http.post(f"/v1/jobs/{child}/fork?dry_run=true", json={})
        assert (newest.status_code, newest.json()["step"]) == (200, 3), newest.text
    assert Past(jobs / grandchild["id"] / "origin").journey_to(3) == ((1, 2), 1)


async def test_two_forks_at_once_are_two_jobs(http: httpx.AsyncClient, job: str, tmp_path: Path) -> None:
    answers = await asyncio.gather(*(http.post(f"/v1/jobs/{job}/fork", json={"step": 3}) for _ in range(5)))
    assert [one.status_code for one in answers] == [201] * 5
    assert len({one.json()["id"] for one in answers}) == 5
    for one in answers:
        assert plan(JobDir(tmp_path / "jobs" / one.json()["id"]).origin, 3).num_replayed == 1


async def test_files_that_a_running_parent_moves_meanwhile_are_followed(
    http: httpx.AsyncClient, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its newest checkpoint is removed while it is being linked: an older one leads there too."""
    parent, link = JobDir(tmp_path / "jobs" / job), os.link

    def removed(source: Path, target: Path) -> None:
        if "ep000001-step000004" in source.parts and "checkpoints" in source.parts:
            (parent.checkpoints / "ep000001-step000004").rename(parent.checkpoints / ".tmp-removed")
        link(source, target)

    monkeypatch.setattr("services.files.origin.os.link", removed)
    answer = await http.post(f"/v1/jobs/{job}/fork", json={"step": 5})
    assert answer.status_code == 201, answer.text
    found = plan(JobDir(tmp_path / "jobs" / answer.json()["id"]).origin, 5)
    assert (found.start, found.num_replayed) == ((1, 2), 3)


@pytest.mark.parametrize("has_links", [True, False])
async def test_what_a_fork_is_brought_is_as_old_as_at_its_parents(
    http: httpx.AsyncClient, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    """Old episodes are erased by the age of their log (`services.api.forgetting`). Another disk takes copies."""

    def refused(source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    if not has_links:
        monkeypatch.setattr("services.files.origin.os.link", refused)
    parent = JobDir(tmp_path / "jobs" / job)
    key = Past(parent.path).batch(5).trajectories[0].key
    body = {"step": 3, "same_batches": True, "without": [f"{key.group}/{key.member}"]}
    for step in (4, 5):
        os.utime(parent.batch(Position(1, step)), (1e9 + step, 1e9 + step))
    answer = await http.post(f"/v1/jobs/{job}/fork", json=body)
    assert answer.status_code == 201, answer.text
    origin = JobDir(tmp_path / "jobs" / answer.json()["id"]).origin
    # The last of them is another log, without the episode.
    assert [origin.batch(Position(1, step)).stat().st_mtime for step in (4, 5)] == [1e9 + 4, 1e9 + 5]
    is_same = [origin.batch(Position(1, step)).samefile(parent.batch(Position(1, step))) for step in (4, 5)]
    assert is_same == [has_links, False]


async def test_two_who_resume_at_once_from_other_steps_leave_one_history(
    http: httpx.AsyncClient, job: str, tmp_path: Path
) -> None:
    """The refused one has left nothing, neither in the files nor in what the job says."""
    wishes = [http.post(f"/v1/jobs/{job}/resume?from_step={step}&steps=8") for step in (2, 3, 4, 5)]
    answers = await asyncio.gather(*wishes)
    assert sorted(one.status_code for one in answers) == [200, 409, 409, 409]
    [step] = [one.json()["step"] for one in answers if one.status_code == 200]
    past = Past(tmp_path / "jobs" / job)
    assert list(past.batches) == list(range(1, step + 1))
    assert past.forks == {1: (0, 0), 2: (1, step)}


async def test_a_resumption_that_dies_half_way_has_changed_nothing_or_is_made_whole(
    http: httpx.AsyncClient, store: Store, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the job has gone back its history is whole; after it, whoever looks next writes down where it went."""
    folder = tmp_path / "jobs" / job

    class Killed(Exception):
        pass

    async def killed(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("services.state.job_table.JobTable.reopen", killed)
        assert (await http.post(f"/v1/jobs/{job}/resume?from_step=4")).status_code == 500
    assert list(Past(folder).batches) == list(range(1, 7))
    with monkeypatch.context() as patch:
        patch.setattr("services.api.submission.resuming._write_down", lambda *_: None)
        assert (await http.post(f"/v1/jobs/{job}/resume?from_step=4&steps=8")).status_code == 200
    assert (await store.jobs.get(job)).went_back == (2, (1, 4))
    await http.post(f"/v1/jobs/{job}/cancel")
    assert (await http.post(f"/v1/jobs/{job}/resume?steps=9")).status_code == 200
    assert list(Past(folder).batches) == list(range(1, 5))
    await http.post(f"/v1/jobs/{job}/cancel")
    assert (await http.post(f"/v1/jobs/{job}/resume?from_step=6&steps=9")).status_code == 409


async def test_a_job_that_is_over_goes_on_or_back(http: httpx.AsyncClient, job: str, tmp_path: Path) -> None:
    refused = await http.post(f"/v1/jobs/{job}/resume")
    assert refused.status_code == 422
    assert "would end at 6" in error_of(refused)["message"]
    answer = await http.post(f"/v1/jobs/{job}/resume?from_step=4&steps=8")
    assert answer.status_code == 200, answer.text
    assert {name: answer.json()[name] for name in ("status", "step", "steps", "finished_at")} == {
        "status": "queued",
        "step": 4,
        "steps": 8,
        "finished_at": None,
    }
    again = await http.post(f"/v1/jobs/{job}/resume?from_step=4")
    assert again.status_code == 409
    missing = await http.post("/v1/jobs/job_none/resume?from_step=4")
    assert missing.status_code == 404
    names = sorted(path.name for path in JobDir(tmp_path / "jobs" / job).checkpoints.glob("epoch*[0-9].json"))
    assert names == ["epoch000001.json", "epoch000002.json"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path / "disk", 64)
    if not disk.is_mounted:
        pytest.skip("mounting takes the rights of root")
    yield disk
    disk.empty()
    disk.close()


async def test_a_full_disk_is_told_and_what_was_asked_is_done_once_there_is_room(
    redis_client: Redis, bus: Bus, made: MadePast, disk: Disk, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a fork, a resumption and a bundle. Nothing is lost, and nothing is left of what was refused."""
    jobs = disk.place / "jobs"
    store = Store(redis_client, jobs_dir=JobsDir(jobs))
    await store.load_functions()
    job = await over(store, made, jobs)
    bundle = ["bundle", f"{jobs / job}@3-4", "--to", str(disk.place / "steps.gspo")]
    async with application(store, jobs_dir=jobs) as app, http_to(app) as http:
        asked = {"fork": {"json": {"step": 3}}, "resume?from_step=4&steps=8": {}}
        assert disk.fill()
        before = everything(disk.place)
        for what, body in asked.items():
            refused = await http.post(f"/v1/jobs/{job}/{what}", **body)  # type: ignore[arg-type]
            assert (refused.status_code, error_of(refused)["code"]) == (503, "disk_full")
        assert await asyncio.to_thread(main, bundle) == 1
        assert "No space left" in capsys.readouterr().err
        assert everything(disk.place) == before
        assert (await store.jobs.get(job)).status is JobStatus.SUCCEEDED
        disk.empty()
        assert await asyncio.to_thread(main, bundle) == 0
        for what, body in asked.items():
            answer = await http.post(f"/v1/jobs/{job}/{what}", **body)  # type: ignore[arg-type]
            assert answer.status_code in (200, 201), answer.text
    assert list(Past(jobs / job).batches) == list(range(1, 5))
    assert len(list(jobs.iterdir())) == 2


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_client_has_both() -> None:
    assert Client.fork.__doc__
    assert Client.plan_fork.__doc__
