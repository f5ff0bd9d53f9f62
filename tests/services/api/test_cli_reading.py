"""Commands that read: which job is meant, what has happened to it, its numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from gspo_core.api_answers import CheckpointDetail
from gspo_core.cli import main
from gspo_core.cli.job_table import HEADER, duration, table
from gspo_core.client import Client
from gspo_core.position import Position
from services.files.job_dir import step_name
from services.state.server import RedisServer
from services.state.store import Store
from tests.services.api.api_kit import SPEC, ApiProcess


@pytest.fixture(scope="module")
def api(redis_server: RedisServer) -> Iterator[ApiProcess]:
    with ApiProcess(redis_server.url) as process:
        yield process


@pytest.fixture(autouse=True)
def _no_jobs(api: ApiProcess, redis_client: Redis) -> None:
    api.forget_jobs()


def run(api: ApiProcess, capsys: pytest.CaptureFixture[str], *words: str, ends: int = 0) -> str:
    assert main([*words, "--url", api.url]) == ends
    said = capsys.readouterr()
    return (said.err if ends else said.out).strip()


@pytest.fixture
def submit(api: ApiProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def submitted(name: str) -> str:
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(SPEC | {"name": name}))
        return run(api, capsys, "submit", str(file))

    return submitted


async def trained(store: Store, job: str, rewards: list[float]) -> None:
    claim = await store.jobs.claim("trainer")
    assert claim is not None
    assert claim.job_id == job
    await store.jobs.set_status(job, "running", token=claim.token)
    for step, reward in enumerate(rewards, 1):
        numbers = {"reward/mean": reward, "gspo/loss": -0.5}
        await store.metrics.add(job, step, numbers, token=claim.token)
        await store.events.add(job, "step", {"step": step, **numbers}, token=claim.token)
        await store.jobs.update_progress(job, claim.token, step, step)


async def test_a_job_is_named_in_short(
    api: ApiProcess, store: Store, submit: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "there are no jobs yet" in run(api, capsys, "pause", "last", ends=1)
    first, second = submit("first"), submit("second")
    for text, meant in (("last", second), ("first", first), (first[:-4], first), (second[4:], second)):
        assert run(api, capsys, "logs", text, "--json").count("queued"), text
        assert meant in run(api, capsys, "pause", text)
    assert "may be 2 jobs" in run(api, capsys, "pause", first[:5], ends=1)
    assert "there is no job 'third'" in run(api, capsys, "pause", "third", ends=1)


async def test_the_table_has_what_one_compares(
    api: ApiProcess, store: Store, submit: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    job = submit("first")
    await trained(store, job, [0.25, 0.5])
    header, line, _ = run(api, capsys, "jobs").splitlines()
    assert header.split() == " ".join(HEADER).split()
    assert line.split()[:4] == [job, "running", "2/200", "0.500"]
    assert SPEC["environments"][0]["ref"][-20:] in line
    assert line.endswith("first")


async def test_a_fork_that_was_only_evaluated_has_no_reward_yet(
    api: ApiProcess, store: Store, submit: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    other, job = submit("other"), submit("fork")
    for one, step, name in ((other, 1, "reward/mean"), (job, 40, "eval/reward/mean")):
        claim = await store.jobs.claim("trainer")
        assert claim is not None
        assert claim.job_id == one
        await store.metrics.add(one, step, {name: 0.5}, token=claim.token)
        await store.jobs.update_progress(one, claim.token, step, step)
    rows = [line.split() for line in run(api, capsys, "jobs").splitlines()]
    assert {row[0]: row[2:4] for row in rows if row[0] in (other, job)} == {
        other: ["1/200", "0.500"],
        job: ["40/200", "-"],
    }
    assert "has no step that says where its time went" in run(api, capsys, "profile", job)


async def test_a_job_without_episodes_of_its_own_has_a_profile(
    api: ApiProcess, store: Store, submit: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    job = submit("retrained")
    claim = await store.jobs.claim("trainer")
    assert claim is not None
    await store.metrics.add(job, 1, {"reward/mean": 0.5, "time/train_s": 2.0}, token=claim.token)
    await store.jobs.update_progress(job, claim.token, 1, 1)
    assert "a step takes the trainer 2.00 s" in run(api, capsys, "profile", job)


def test_times_are_short() -> None:
    assert [duration(one) for one in (5, 65, 3_660, 90_000)] == ["5s", "1m05s", "1h01m", "1d01h"]


def test_jobs_of_a_release_before_have_no_environments() -> None:
    old: Any = {
        **{"id": "job_1", "status": "queued", "step": 0, "steps": 5, "model": "a/b", "name": None},
        **{"created_at": "2026-01-01T00:00:00Z", "started_at": None, "finished_at": None, "status_reason": None},
    }
    _, line = table([old], {"job_1": None}, datetime.now(UTC))
    assert line.split() == ["job_1", "queued", "0/5", "-", "-", "2026-01-01", "00:00", "-", "b"]


async def test_what_has_happened_and_the_numbers_are_printed(
    api: ApiProcess, store: Store, submit: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    job = submit("first")
    await trained(store, job, [0.25, 0.5, 0.75])
    said = run(api, capsys, "logs", job).splitlines()
    assert "queued" in said[0]
    assert "step    3/" in said[-1]
    assert [line.split() for line in run(api, capsys, "metrics", job, "--last", "2").splitlines()] == [
        *(["step", "reward/mean", "gspo/loss"], ["2", "0.5", "-0.5"], ["3", "0.75", "-0.5"]),
    ]
    assert run(api, capsys, "metrics", job, "--csv", "--last", "1").splitlines() == [
        "step,gspo/loss,reward/mean",
        "3,-0.5,0.75",
    ]
    rows = [json.loads(line) for line in run(api, capsys, "metrics", job, "--json").splitlines()]
    assert [row["reward/mean"] for row in rows] == [0.25, 0.5, 0.75]
    assert "reward/men is not a metric of this job; did you mean reward/mean?" in run(
        api, capsys, "metrics", job, "--names", "reward/men", ends=1
    )
    assert "no checkpoint" in run(api, capsys, "export", job, ends=1)


async def test_an_export_is_fetched_into_a_directory_that_is_not_there_yet(
    api: ApiProcess, submit: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job = submit("first")
    place = api.jobs_dir / job
    (place / "checkpoints" / step_name(Position(1, 20))).mkdir(parents=True)
    (place / "checkpoints" / step_name(Position(1, 20)) / "manifest.json").write_bytes(b"{}")
    export = place / "exports" / step_name(Position(1, 20))
    (export / "adapter").mkdir(parents=True)
    (export / "model.safetensors").write_bytes(bytes(range(256)) * 9000)
    (export / "adapter" / "adapter_config.json").write_text("{}")
    to = tmp_path / "models" / "mine"
    assert run(api, capsys, "export", f"{job}@20", "--to", str(to)) == str(to)
    found = {file.relative_to(to).as_posix(): file.read_bytes() for file in to.rglob("*") if file.is_file()}
    assert found == {"model.safetensors": bytes(range(256)) * 9000, "adapter/adapter_config.json": b"{}"}
    assert list(to.parent.iterdir()) == [to]
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for there in (to, tmp_path / "link"):
        assert "is there already" in run(api, capsys, "export", f"{job}@20", "--to", str(there), ends=1)
    assert run(api, capsys, "export", f"{job}/1/20", "--to", str(tmp_path / "other")) == str(tmp_path / "other")
    said = run(api, capsys, "export", f"{job}/2/20", ends=1)
    assert f"no checkpoint {job}/2/20 is kept: there are {job}/1/20" in said
    for unknown in (f"{job}@", f"{job}@x", f"{job}@1/20", "@20"):
        assert "write JOB, JOB@STEP or JOB/EPOCH/STEP" in run(api, capsys, "export", unknown, ends=1)


async def test_an_older_service_is_not_asked_for_an_export_that_it_cannot_give(
    api: ApiProcess, submit: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submit("first")
    place = api.jobs_dir / job / "checkpoints" / step_name(Position(1, 20))
    place.mkdir(parents=True)
    (place / "manifest.json").write_bytes(b"{}")
    asked = Client.checkpoint

    def older(client: Client, checkpoint: str) -> CheckpointDetail:
        detail = asked(client, checkpoint)
        del detail["export"]["files"]
        return detail

    monkeypatch.setattr(Client, "checkpoint", older)
    said = run(api, capsys, "export", job, "--to", str(tmp_path / "model"), ends=1)
    assert "the service is of an older release, which gives no files over HTTP; without --to it is written" in said
    assert "exporting" not in said


def test_an_address_needs_no_scheme(api: ApiProcess, capsys: pytest.CaptureFixture[str]) -> None:
    address = api.url.removeprefix("http://")
    assert main(["jobs", "--url", address]) == 0
    assert "no jobs yet" in capsys.readouterr().out
    main(["doctor", "--url", address])
    [told] = [line for line in capsys.readouterr().out.splitlines() if line.split()[1:2] == ["api"]]
    assert f"{api.url} is ready" in told or f"{api.url} answers" in told


def test_a_misspelt_command_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["sumbit", "job.yaml"])
    assert "there is no command 'sumbit'; did you mean `submit`?" in capsys.readouterr().err
    assert main(["version"]) == 0
    assert capsys.readouterr().out[0].isdigit()


async def test_what_is_removed_is_named_whole_or_confirmed(
    api: ApiProcess, store: Store, submit: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (submit(name) for name in ("first", "second", "third"))
    for job in (first, second, third):
        run(api, capsys, "cancel", job)
    assert f"that would remove {third}" in run(api, capsys, "rm", "last", ends=1)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    asked = list[str]()

    def answers(text: str) -> str:
        asked.append(text)
        return "y" if len(asked) > 1 else ""

    monkeypatch.setattr("builtins.input", answers)
    assert "nothing is removed" in run(api, capsys, "rm", "last", ends=1)
    assert run(api, capsys, "rm", "last") == f"{third} is removed"
    assert third in asked[0]
    assert run(api, capsys, "rm", "second", "--yes") == f"{second} is removed"
    assert run(api, capsys, "rm", first, first) == f"{first} is removed"
    assert len(asked) == 2
    assert run(api, capsys, "rm", first, ends=1) == f"gspo: there is no job {first}"
