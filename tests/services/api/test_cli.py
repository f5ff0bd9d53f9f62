"""The ``gspo`` command as a person meets it, against a real API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from gspo_core.cli import main
from services.state.queue import Bus
from services.state.server import RedisServer
from services.state.store import Store
from tests.services.api.api_kit import SPEC, ApiProcess
from tests.services.api.recorded_job import record_job, write_model


@pytest.fixture(scope="module")
def api(redis_server: RedisServer) -> Iterator[ApiProcess]:
    with ApiProcess(redis_server.url) as api:
        yield api


@pytest.fixture(autouse=True)
def _no_jobs(api: ApiProcess, redis_client: Redis) -> None:
    api.forget_jobs()


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    file = tmp_path / "job.json"
    file.write_text(json.dumps(SPEC))
    return file


def submitted(api: ApiProcess, job_file: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["submit", str(job_file), "--url", api.url]) == 0
    return capsys.readouterr().out.strip()


def test_the_list_shows_every_id_whole_and_why_a_job_waits(
    api: ApiProcess, store: Store, job_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["jobs", "--url", api.url]) == 0
    assert "gspo submit FILE" in capsys.readouterr().out
    job = submitted(api, job_file, capsys)
    assert main(["jobs", "--url", api.url]) == 0
    header, summary, reason = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["ID", "STATUS", "STEP", "REWARD"]
    assert summary.split()[:5] == [job, "queued", "0/200", "-", "-"]
    assert reason.strip() == "no trainer has taken the job yet; each trains one job at a time"


def test_what_a_user_wrote_does_not_steer_the_terminal(
    api: ApiProcess, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.json"
    file.write_text(json.dumps(SPEC | {"name": "\x1b]0;owned\x07\x1b[2J\u202ename"}))
    assert main(["submit", str(file), "--url", api.url]) == 0
    capsys.readouterr()
    assert main(["jobs", "--url", api.url]) == 0
    said = capsys.readouterr().out
    assert "\\x1b]0;owned\\x07\\x1b[2J\\u202ename" in said
    assert said.isprintable() or set(said) - set(filter(str.isprintable, said)) == {"\n"}
    assert main(["jobs", "--url", "http://["]) == 1
    assert capsys.readouterr().err.count("\n") == 1


async def test_cancelling_a_running_job_says_that_it_will_end_and_a_queued_one_that_it_has(
    api: ApiProcess, store: Store, job_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    claimed = submitted(api, job_file, capsys)
    assert await store.jobs.claim("trainer") is not None
    queued = submitted(api, job_file, capsys)
    assert main(["cancel", claimed, "--url", api.url]) == 0
    assert "asked to end" in capsys.readouterr().out
    assert main(["cancel", queued, "--url", api.url]) == 0
    assert capsys.readouterr().out == f"{queued} is cancelled\n"


async def test_settings_are_changed_and_a_drain_is_asked_for(
    api: ApiProcess, store: Store, job_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = submitted(api, job_file, capsys)
    assert await store.jobs.claim("trainer") is not None
    assert main(["set", job, "optimizer.lr=0.5", "rollout.on_stale=drop", "--url", api.url]) == 0
    assert '"optimizer.lr": 0.5' in capsys.readouterr().out
    assert (await store.jobs.get(job)).settings == {"optimizer.lr": 0.5, "rollout.on_stale": "drop"}
    assert main(["set", job, "seed=3", "--url", api.url]) == 1
    assert "seed cannot change" in capsys.readouterr().err
    assert main(["set", job, "seed", "--url", api.url]) == 1
    assert "KEY=VALUE" in capsys.readouterr().err
    assert main(["cancel", job, "--drain", "--checkpoint", "--url", api.url]) == 0
    assert (await store.jobs.get(job)).cancel_manner == "drain+checkpoint"


async def test_pausing_and_resuming_say_what_was_asked_and_what_holds(
    api: ApiProcess, store: Store, job_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = submitted(api, job_file, capsys)
    claim = await store.jobs.claim("trainer")
    assert claim is not None
    await store.jobs.set_status(job, "running", token=claim.token)
    assert main(["pause", job, "--url", api.url]) == 0
    assert capsys.readouterr().out == f"{job} is running; it was asked to pause\n"
    assert (await store.jobs.get(job)).desired_state == "paused"
    assert main(["resume", job, "--url", api.url]) == 0
    assert capsys.readouterr().out == f"{job} is running\n"
    assert (await store.jobs.get(job)).desired_state == "running"


def test_an_api_that_is_not_there_and_a_job_that_is_not_there_are_one_line_each(
    api: ApiProcess, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["jobs", "--url", "http://127.0.0.1:9"]) == 1
    assert capsys.readouterr().err.startswith("gspo: no API answers at http://127.0.0.1:9.")
    assert main(["watch", "job_nope", "--url", api.url]) == 1
    assert capsys.readouterr().err.count("\n") == 1


async def test_episodes_are_listed_and_read(
    api: ApiProcess, store: Store, bus: Bus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = await record_job(store, bus, api.jobs_dir, write_model(tmp_path / "model"), num_steps=2)
    assert main(["episodes", job.id, "--step", "2", "--max-reward", "0", "--url", api.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert all(line.startswith(f"{job.id}/") and "reward 0 " in line for line in lines)
    assert main(["episodes", f"{job.id}/2/2", "--url", api.url]) == 0
    said = capsys.readouterr().out
    for text in (
        "system: ",
        "tools: calculate\n",
        "--- turn 1",
        "user: What is",
        "unreadable call (invalid_json)",
        'policy calls calculate {"expression"',
    ):
        assert text in said
    assert main(["episodes", f"{job.id}/2/9", "--url", api.url]) == 1
