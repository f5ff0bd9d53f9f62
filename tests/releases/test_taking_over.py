"""Every release that was made is taken over in the middle of its work: nothing is lost, and nothing is trained twice.

``make.py`` keeps the installations. What differs between two releases shows here before a user meets it.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import torch
from safetensors.torch import load_file

from gspo_core.cli import main
from gspo_core.spec import JobSpec
from gspo_core.types import Group
from services.files.batch_log import BatchLog
from services.files.checkpoints import CheckpointStore
from services.files.export import export_checkpoint
from services.files.job_dir import JobDir
from tests.apparatus.warm_python import WarmPython
from tests.patience import HANG_S
from tests.releases.installation import API, ENGINE, TRAINER, WORKER, Installation, extract_tree, installed
from tests.releases.make import STEPS, about, unpack, write_world_and_model

# An installation is started, upgraded and played to its end: each wait has a deadline of its own.
pytestmark = pytest.mark.timeout(900)

RELEASES = sorted(Path(__file__).parent.glob("*.tar.xz"))
NAMES = [path.name.removesuffix(".tar.xz") for path in RELEASES]
ENDED_S = HANG_S
# The last one with another library of functions in Redis. It was never tagged, and is used.
OLDER_LIBRARY = "84ec78a"


def succeeded(installation: Installation, job: str) -> bool:
    record = installation.job(job)
    assert record["status"] not in ("failed", "cancelled"), record["status_reason"]
    return bool(record["status"] == "succeeded")


def trained_groups(installation: Installation, job: str) -> Counter[int]:
    """How often each group was trained in the lineage that holds: of each step the log of the newest epoch."""
    log = BatchLog(JobDir(installation.work / "data" / "jobs" / job))
    newest: dict[int, int] = {}
    for epoch, step in log.steps():
        newest[step] = max(epoch, newest.get(step, 0))
    assert sorted(newest) == list(range(1, STEPS + 1))
    groups: list[Group] = [group for step, epoch in newest.items() for group in log.read(epoch, step).groups]
    return Counter(group.group for group in groups)


def check_that_all_is_well(installation: Installation, job: str) -> None:
    assert set(trained_groups(installation, job).values()) == {1}
    with redis.Redis.from_url(installation.redis_url) as client:
        assert client.hlen(f"gspo:{{{job}}}:groups") == 0
        counts = {name: int(count) for name, count in client.hgetall(f"gspo:{{{job}}}:counters").items()}
    assert counts.pop(b"dispatched") == sum(counts.values())


@pytest.mark.parametrize("release", RELEASES, ids=NAMES)
def test_an_installation_that_was_killed_in_mid_job_is_taken_over(
    release: Path, tmp_path: Path, warm_python: WarmPython
) -> None:
    unpack(release, tmp_path)
    record = about(release)
    with installed(tmp_path, str(warm_python.path)) as present:
        present.start(ENGINE, API, TRAINER, WORKER)
        running, waiting = record["jobs"]
        assert present.job(running)["step"] >= record["step"]  # nothing that was reported is gone
        for job in (running, waiting):
            present.wait_for(f"the end of {job}", lambda job=job: succeeded(present, job), ENDED_S)  # type: ignore[misc]
            check_that_all_is_well(present, job)
        assert present.job(running)["attempt"] == 2


@pytest.mark.parametrize("release", RELEASES, ids=NAMES)
def test_a_checkpoint_of_a_release_is_exported_as_what_it_published(
    release: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpack(release, tmp_path)
    monkeypatch.chdir(tmp_path)  # its job names the model by a path from there
    job = JobDir(tmp_path / "data" / "jobs" / about(release)["jobs"][0])
    (at,) = CheckpointStore(job).positions()
    export_checkpoint(job, at.epoch, at.step, job.export(at))
    published = job.path / "weights" / f"v{at.step}"
    exported, expected = (load_file(folder / "model.safetensors") for folder in (job.export(at), published))
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], expected[name]) for name in expected)
    for kept in ("config.json", "tokenizer.json"):
        assert json.loads((job.export(at) / kept).read_text()) == json.loads((published / kept).read_text())


def tree_of(revision: str, directory: Path) -> Path:
    try:
        return extract_tree(revision, directory)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this checkout does not hold {revision}: {error.stderr.decode().strip()}")


@pytest.mark.slow
@pytest.mark.parametrize("order", [(TRAINER, WORKER), (WORKER, TRAINER)], ids=" before ".join)
@pytest.mark.parametrize("release", RELEASES, ids=NAMES)
def test_a_rolling_upgrade_goes_on_in_either_order(release: Path, order: tuple[str, str], tmp_path: Path) -> None:
    """The processes of an earlier release that still run are replaced one by one."""
    tree = tree_of(about(release)["revision"], tmp_path / "tree")
    home = tmp_path / "home"
    home.mkdir()
    write_world_and_model(home, tree)
    with installed(home) as mixed:
        mixed.start(ENGINE, API, TRAINER, WORKER, tree=tree)
        job = mixed.submit(0, STEPS)
        mixed.wait_for("a step", lambda: mixed.job(job)["step"] >= 1)
        for name in order:
            at_least = mixed.job(job)["step"] + 1
            mixed.kill(name)
            mixed.start(name)
            mixed.wait_for(f"a step after {name} was replaced", lambda: mixed.job(job)["step"] >= at_least)  # noqa: B023
        mixed.kill(API)
        mixed.start(API)
        mixed.wait_for("the end", lambda: succeeded(mixed, job), ENDED_S)
        check_that_all_is_well(mixed, job)


def test_a_job_is_stored_with_no_key_that_the_last_release_does_not_know(tmp_path: Path) -> None:
    """Unless it uses one: processes of the release refuse it as a whole."""
    unpack(RELEASES[-1], tmp_path)
    for job in about(RELEASES[-1])["jobs"]:
        stored = json.loads(json.loads((tmp_path / "data" / "jobs" / job / "job.json").read_text())["spec"])
        assert set(_keys(JobSpec.model_validate(stored).model_dump(mode="json"))) == set(_keys(stored))


def _keys(value: Any, place: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        yield from (f"{place}.{name}" for name in value)
        for name, inner in value.items():
            yield from _keys(inner, f"{place}.{name}")
    elif isinstance(value, list):
        for inner in value:
            yield from _keys(inner, place)


@pytest.mark.slow
def test_processes_of_the_last_release_play_a_job_that_the_present_api_accepted(tmp_path: Path) -> None:
    tree = tree_of(about(RELEASES[-1])["revision"], tmp_path / "tree")
    home = tmp_path / "home"
    home.mkdir()
    write_world_and_model(home, tree)
    with installed(home) as mixed:
        mixed.start(ENGINE, API, TRAINER, WORKER, tree=tree)
        before = mixed.submit(0, STEPS)
        mixed.wait_for("a step", lambda: mixed.job(before)["step"] >= 1)
        mixed.kill(API)
        mixed.start(API)
        job = mixed.submit(1, STEPS)
        mixed.wait_for("the end", lambda: succeeded(mixed, job), ENDED_S)
        check_that_all_is_well(mixed, job)


@pytest.mark.slow
def test_an_older_process_is_refused_at_the_door(tmp_path: Path) -> None:
    tree = tree_of(OLDER_LIBRARY, tmp_path / "tree")
    home = tmp_path / "home"
    home.mkdir()
    with installed(home) as present:
        present.start(API)
        present.start(WORKER, tree=tree)
        assert present.status(WORKER) != 0
        assert "upgrade this process" in present.logs()


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES, ids=NAMES)
def test_the_past_of_an_older_release_is_replayed_forked_and_gone_on_with(
    release: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its steps, whoever trained them. Their logs do not say on how many threads, and this is another machine than
    theirs, so the weights are alike and not bit for bit."""
    unpack(release, tmp_path)
    job = about(release)["jobs"][0]
    monkeypatch.chdir(tmp_path)  # paths of an installation that is moved are relative
    with installed(tmp_path) as present:
        present.start(ENGINE, API, TRAINER, WORKER)
        present.wait_for(f"the end of {job}", lambda: succeeded(present, job), ENDED_S)
        child = present.post({"step": 2, "set": {"steps": 4}}, f"/v1/jobs/{job}/fork")
        # One trainer: the other job of the installation comes first.
        present.wait_for(f"the end of {child}", lambda: succeeded(present, child), 3 * ENDED_S)
        present.post(None, f"/v1/jobs/{job}/resume?from_step=3&steps={STEPS}")
        present.wait_for("the end of what was resumed", lambda: succeeded(present, job), 3 * ENDED_S)
        assert set(trained_groups(present, job).values()) == {1}
    folder = f"data/jobs/{job}"
    assert main(["audit", folder]) == 0
    assert main(["bundle", f"{folder}@2", "--to", "steps.gspo"]) == 0
    capsys.readouterr()
    for where in (f"{folder}@2", "steps.gspo@2"):
        main(["replay", where, "--set", "optimizer.lr=1e-9", "--json"])
        found = json.loads(capsys.readouterr().out)
        assert found["steps"][0]["loss"] == pytest.approx(loss_of(Path(folder), 2), rel=1e-4)


def loss_of(folder: Path, step: int) -> float:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return next(float(row["gspo/loss"]) for row in rows if row["step"] == step and "gspo/loss" in row)
