"""Names of files are written and read in one place, both ways, and have not changed by a byte."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_core.position import Position
from services.files.data_dir import NOT_SAVED, DataDir
from services.files.job_dir import (
    JobDir,
    JobsDir,
    numbered_in,
    parse_step_name,
    parse_version_name,
    positions_in,
    step_name,
    version_name,
    versions_in,
)

numbers = st.integers(0, 10**12)


@given(numbers, numbers)
def test_a_step_has_one_name(epoch: int, step: int) -> None:
    at = Position(epoch, step)
    assert parse_step_name(step_name(at)) == at


@given(numbers)
def test_a_version_has_one_name(version: int) -> None:
    assert parse_version_name(version_name(version)) == version


@given(st.text("ep-step0123456789v.", max_size=30))
def test_only_names_that_are_written_are_read(name: str) -> None:
    at, version = parse_step_name(name), parse_version_name(name)
    assert at is None or step_name(at) == name
    assert version is None or version_name(version) == name


@pytest.mark.parametrize("name", ["ep1-step2", "ep0000001-step000002", ".tmp-ep000001-step000002", "v01", "v-1", "v"])
def test_what_is_nearly_a_name_is_none(name: str) -> None:
    assert parse_step_name(name) is None
    assert parse_version_name(name) is None


def test_the_files_of_a_job_lie_where_they_lay() -> None:
    job, at = DataDir(Path("data")).jobs.job("job_a"), Position(2, 1_000_017)
    assert [path.as_posix().removeprefix("data/jobs/job_a/") for path in (job.batch(at), job.trained_at(at))] == [
        "batches/ep000002-step1000017",
        "trained/ep000002-step1000017",
    ]
    paths = {
        "job.json": job.accepted,
        "status/00000042.json": job.status(42),
        "environments/0.json": job.environment(0),
        "versions/00000007.json": job.version_record(7),
        "metrics.jsonl": job.metrics,
        "tensorboard": job.tensorboard,
        "checkpoints": job.checkpoints,
        "exports/ep000002-step1000017": job.export(at),
        "weights/v7": job.version(7),
    }
    assert {path.as_posix() for path in paths.values()} == {f"data/jobs/job_a/{name}" for name in paths}
    assert job.shown(job.version(7)) == "jobs/job_a/weights/v7"
    assert (job.id, JobDir.around(job.batch(at)).id) == ("job_a", "job_a")


def test_what_lies_beside_the_jobs_lies_where_it_lay() -> None:
    data = DataDir(Path("data"))
    paths = {
        "environments/shop/00000001.json": data.environments.record("shop", 1),
        "environments/shop/00000001.removed": data.environments.removed("shop", 1),
        "environments/shop/00000001.report-0002.json": data.environments.report("shop", 1, 2),
        "environments/.uploads/abc": data.environments.upload("abc"),
        "keys/abc.json": data.keys.record("abc"),
        "keys/abc.revoked": data.keys.revoked("abc"),
        "audit.jsonl": data.audit,
        "logs": data.logs,
        "venvs": data.venvs,
        "redis/server.log": data.redis_log,
        "engine.port": data.port_of("engine"),
        "engine-1.port": data.port_of("engine", 1),
        "models/tiny": data.model("tiny"),
        "demo": data.demo,
    }
    assert {path.as_posix() for path in paths.values()} == {f"data/{name}" for name in paths}
    assert data.witness() != data.witness()
    assert {data.redis.name, data.venvs.name, data.logs.name} < NOT_SAVED


def test_listings_are_in_order_and_pass_over_what_is_no_name(tmp_path: Path) -> None:
    job = JobsDir(tmp_path).job("job_a")
    assert (positions_in(job.batches), versions_in(job.weights), dict(numbered_in(job.statuses))) == ([], [], {})
    assert JobsDir(tmp_path / "none").accepted() == {}
    for path in (job.batch(Position(2, 1)), job.batch(Position(1, 1_000_000)), job.batch(Position(1, 2))):
        path.mkdir(parents=True)
    (job.batches / ".tmp-ep000001-abc").touch()
    for version in (10, 9):
        job.version(version).mkdir(parents=True)
    assert positions_in(job.batches) == [(1, 2), (1, 1_000_000), (2, 1)]
    assert versions_in(job.weights) == [9, 10]
    assert JobsDir(tmp_path).accepted() == {}
    job.accepted.touch()
    assert JobsDir(tmp_path).accepted() == {"job_a": job}
    assert not JobsDir(tmp_path).is_empty()
