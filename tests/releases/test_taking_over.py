"""Every release that was made is taken over in the middle of its work: nothing is lost, and nothing is trained twice.

``make.py`` keeps the installations. What differs between two releases shows here before a user meets it.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

import pytest
import redis

from gspo_core.types import Group
from services.files.batch_log import BatchLog
from services.files.job_dir import JobDir
from tests.releases.installation import API, ENGINE, TRAINER, WORKER, Installation, extract_tree, installed
from tests.releases.make import STEPS, about, unpack, write_world_and_model

# An installation is started, upgraded and played to its end: each wait has a deadline of its own.
pytestmark = pytest.mark.timeout(900)

RELEASES = sorted(Path(__file__).parent.glob("*.tar.xz"))
NAMES = [path.name.removesuffix(".tar.xz") for path in RELEASES]
ENDED_S = 120.0
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
def test_an_installation_that_was_killed_in_mid_job_is_taken_over(release: Path, tmp_path: Path) -> None:
    unpack(release, tmp_path)
    record = about(release)
    with installed(tmp_path) as present:
        present.start(ENGINE, API, TRAINER, WORKER)
        running, waiting = record["jobs"]
        assert present.job(running)["step"] >= record["step"]  # nothing that was reported is gone
        for job in (running, waiting):
            present.wait_for(f"the end of {job}", lambda job=job: succeeded(present, job), ENDED_S)  # type: ignore[misc]
            check_that_all_is_well(present, job)
        assert present.job(running)["attempt"] == 2


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
