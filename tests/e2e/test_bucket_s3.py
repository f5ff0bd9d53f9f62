"""Snapshots over the protocol of S3, and a job that moves through them. The store is moto, a stand-in, or with
`make real-s3` Ceph's object gateway: no store of a cloud is asked here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from examples.demo.demo import NO_KEYS, demo_spec
from gspo_core.cli import main
from gspo_core.client import Client
from services.files import snapshots
from services.files.batch_log import BatchLog
from services.files.bucket import Bucket, BucketRefused
from services.files.checkpoints import CheckpointStore
from services.files.data_dir import DataDir
from services.launch.engine_command import EngineCommand
from services.launch.stack import Stack, StackConfig
from services.process.ports import free_port
from tests.apparatus.radosgw import REGION, Account, make_bucket, radosgw
from tests.e2e.audited import BIT_FOR_BIT, audited
from tests.e2e.test_learning import changed
from tests.services.files.test_continuous_snapshots import installation as a_small_installation
from tests.services.files.test_continuous_snapshots import killed_again_and_again

pytestmark = pytest.mark.third_party

START_S = 60
RADOSGW = os.environ.get("GSPO_TEST_RADOSGW", "")
"""The folder that has it."""


@contextmanager
def moto(folder: Path) -> Iterator[Account]:
    """In a virtual environment of its own. It asks for no signature."""
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "moto[s3,server]==5.2.5"], check=True)
    address = f"http://127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [folder / "bin" / "moto_server", "-p", address.rpartition(":")[2]], stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and process.poll() is None:
            try:
                httpx.get(address, timeout=1.0)
                break
            except httpx.TransportError:
                time.sleep(0.1)
        yield Account(address, "a", "b")
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Account]:
    folder = tmp_path_factory.mktemp("store")
    with radosgw(Path(RADOSGW), folder) if RADOSGW else moto(folder) as account:
        make_bucket(account, "training")
        yield account


@pytest.fixture
def s3(server: Account, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    values = {"ENDPOINT_URL": server.address, "ACCESS_KEY_ID": server.key, "SECRET_ACCESS_KEY": server.secret}
    for name, value in (values | {"REGION": REGION}).items():
        monkeypatch.setenv(f"AWS_{name}", value)
    if RADOSGW:  # of an object in several parts it keeps the last one
        monkeypatch.setattr(snapshots, "PIECE_BYTES", 1 << 30)
    return f"s3://training/{tmp_path.name}"


def fill(root: Path) -> None:
    job = root / "jobs" / "job_a"
    (job / "batches").mkdir(parents=True)
    (job / "batches" / "ep000001-step000001").write_bytes(
        os.urandom(20 << 20)
    )  # in several parts, where the store keeps them
    for number in range(1200):  # listings have pages of 1,000
        (job / "batches" / f"{number}").write_text(str(number))
    (job / "job.json").write_text("{}")


def contents(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_data_directory_goes_through_s3(s3: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    fill(here)
    assert main(["snapshot", "save", s3, "--data-dir", str(here)]) == 0
    assert "new: 1202 files" in capsys.readouterr().out
    assert main(["snapshot", "save", s3, "--data-dir", str(here)]) == 0
    assert "new: 0 files" in capsys.readouterr().out
    assert main(["snapshot", "restore", s3, "--data-dir", str(there), "--job", "job_a"]) == 0
    assert contents(there) == contents(here)
    assert main(["snapshot", "prune", s3, "--keep", "1"]) == 0
    assert len(snapshots.names(Bucket.at(s3))) == 1


def test_who_saves_again_and_again_to_s3_may_be_killed_at_any_moment(s3: str, tmp_path: Path) -> None:
    here = a_small_installation(tmp_path / "here")
    killed_again_and_again(here, tmp_path / "there", f"{s3}/now", pace_s=0.1, lives=8)


@pytest.mark.usefixtures("s3")
def test_a_bucket_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(BucketRefused, match="s3://nowhere/x"):
        snapshots.save(tmp_path, Bucket.at("s3://nowhere/x"), snapshots.Tally())


STEPS, MOVED_AT = 8, 5
ADDRESS = ("--model", "{model}", "--host", "{host}", "--port", "{port}")
ENGINE = EngineCommand((sys.executable, "-m", "tests.apparatus.repeatable_engine", *ADDRESS))
# Episodes one after the other, so that the engine is asked in the same order, and nothing is older than its weights.
ONE_EPISODE = {"max_processes": 1, "sessions_per_process": 1}
IN_ORDER = {
    "environments": [{"ref": "environments.calculator:Calculator", "host": ONE_EPISODE}],
    "rollout": {"group_size": 8, "max_staleness": 0},
    "groups_per_step": 2,
    "steps": STEPS,
    "checkpoint_every": 2,
    "checkpoints": {"keep": 100, "keep_batches": 1000, "keep_versions": 1000},
    "evaluation": None,
}


def installation(data_dir: Path, model_dir: Path) -> Stack:
    return Stack(StackConfig(data_dir, model_dir, port=0, engine=ENGINE, threads=1, environment=NO_KEYS))


def learned(data_dir: Path, job: str) -> dict[str, bytes]:
    """The files of the newest checkpoint: weights, moments, counters."""
    newest = CheckpointStore(DataDir(data_dir).jobs.job(job)).newest_first()[0]
    return contents(newest.learner_dir)


def sampled(data_dir: Path, job: str) -> dict[int, list[tuple[object, ...]]]:
    """By step, the tokens and log-probs that it was trained on, to the last bit."""
    log = BatchLog(DataDir(data_dir).jobs.job(job))
    return {
        at.step: [
            (one.key.group, one.key.member, piece.token_ids.tobytes(), piece.behavior_logprobs.tobytes())
            for one in log.read(at.epoch, at.step).trajectories
            for piece in one.segments
        ]
        for at in log.steps()
    }


def test_a_job_that_moves_through_the_bucket_alone_ends_at_the_weights_of_the_one_that_stayed(
    s3: str, model_dir: Path, tmp_path: Path
) -> None:
    """The model goes, too: when the second installation starts, nothing but the bucket is left of the first."""
    here, there, model = tmp_path / "here", tmp_path / "there", tmp_path / "model"
    shutil.copytree(model_dir, model)
    spec = changed(demo_spec(model, 0), IN_ORDER)
    with installation(here, model_dir) as stack, Client(stack.api_url) as client:
        job = client.create_job(spec)["id"]
        for event in client.events(job):
            if event.type == "step" and event.data["step"] == MOVED_AT:
                assert main(["snapshot", "save", s3, "--data-dir", str(here)]) == 0
        assert client.job(job)["status"] == "succeeded"
    stayed, stayed_on = learned(here, job), sampled(here, job)
    shutil.rmtree(here)
    shutil.rmtree(model)
    assert main(["snapshot", "restore", s3, "--data-dir", str(there), "--job", job, "--models"]) == 0
    assert max(sampled(there, job)) < STEPS
    with installation(there, model_dir) as stack, Client(stack.api_url) as client:
        for _ in client.events(job):
            pass
        record = client.job(job)
        assert (record["status"], record["step"]) == ("succeeded", STEPS), record["status_reason"]
    assert sampled(there, job) == stayed_on
    assert learned(there, job) == stayed
    said = audited(there, job)
    assert BIT_FOR_BIT in said
    print(said)
    told = {step: (len(pieces), sum(len(ids) // 4 for *_, ids, _ in pieces)) for step, pieces in stayed_on.items()}
    print("segments and tokens by step", told, "bytes", {name: len(content) for name, content in stayed.items()})
