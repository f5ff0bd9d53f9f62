"""The hostile world: its attacks do harm where they have room, none within its bounds, and nothing unwalled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gspo_core.env import EnvironmentFailed, Timeouts
from gspo_core.types import Split
from services.hosts.local import LocalHosts, WallPolicy
from services.hosts.server import HostOrder
from services.hosts.session import HostedEnvironment, SessionLost
from services.hosts.venv import Interpreters
from services.hosts.walls.tiers import Tier
from tests.chaos import attacking, judge_hostile
from tests.chaos.__main__ import options_of, parse
from tests.chaos.attacking import AT_ONCE, ATTACKS, HOST, attacks_in
from tests.chaos.evidence import Evidence
from tests.chaos.hostile import FIRST_HOSTILE, PROMISED, REF, is_possible, made_hostile
from tests.chaos.jobs import job_spec
from tests.chaos.runner import Run

LONG = Timeouts(reset_timeout_s=60.0, step_timeout_s=60.0, score_timeout_s=60.0, close_timeout_s=10.0)
ROOMY = {**HOST, "num_processes": 1024, "memory_mb": 4096, "disk_mb": 512}
BOUNDED = ("fork_bomb", "fill_memory", "fill_disk")
walled = pytest.mark.skipif(not is_possible(), reason="the kernel offers no wall here, which a run says")


async def resets(work: Path, hosting: dict[str, int]) -> None:
    """The world begins until every attack was tried, each time in a process of its own, which may not survive it."""
    order = HostOrder(REF, {"ledger": str(work / "ledger-0-0"), "in_turn": True}, hosting)
    policy = WallPolicy(Tier.WALL, writable=(str(work),))
    environment = await HostedEnvironment.open(order, boot=LocalHosts(Interpreters(work / "venvs"), policy).boot)
    try:
        task = await environment.task(Split.TRAIN, 0)
        for number in range(0, len(ATTACKS), AT_ONCE):
            session = environment.session(limits=LONG, episode_id=f"job/0/{number}")
            try:
                await session.start(task, seed=number)
            except (EnvironmentFailed, SessionLost):
                continue
            await session.close()
    finally:
        await environment.close()


def told(work: Path) -> set[tuple[str, str]]:
    lines = [json.loads(line) for line in attacks_in(work / "ledger-0-0").read_text().splitlines()]
    return {(one["attack"], one["told"]) for one in lines if one["told"] != "begun"}


def evidence(work: Path) -> Evidence:
    (work / "run.json").write_text('{"data_dir": ""}')
    return Evidence(work)


@walled
async def test_attacks_do_harm_where_they_have_room(tmp_path: Path) -> None:
    await resets(tmp_path, ROOMY)
    assert {(name, "harm") for name in BOUNDED} <= told(tmp_path)
    problems = list(judge_hostile.no_attack_succeeded(evidence(tmp_path)))
    assert any("fork_bomb" in one for one in problems)


@walled
async def test_no_attack_gets_more_than_the_bounds_of_the_job(tmp_path: Path) -> None:
    await resets(tmp_path, dict(HOST))
    found = evidence(tmp_path)
    assert list(judge_hostile.no_attack_succeeded(found)) == []
    assert set(judge_hostile.tried(found)) == set(ATTACKS)


def test_where_there_is_no_wall_nothing_is_attacked(tmp_path: Path) -> None:
    with pytest.raises(PermissionError):
        attacking.attack(str(tmp_path / "ledger-0-0"), "run", 0)
    assert list(tmp_path.iterdir()) == []


def test_a_run_promises_every_attack_and_room_for_who_tries_them(tmp_path: Path) -> None:
    options = options_of(parse(["--hostile"]), 4711)
    usual = options_of(parse([]), 4711)
    assert options.size.engines == usual.size.engines + 1, "honest jobs keep theirs"
    assert options.size.trainers == usual.size.trainers + 1
    run = Run(tmp_path / "run", options)
    try:
        assert run.coverage.promised >= PROMISED or not is_possible()
        assert ("hostile" in run._without()) is not is_possible()
    finally:
        run.disk.close()


def test_the_hostile_job_asks_for_the_wall(tmp_path: Path) -> None:
    spec: dict[str, Any] = made_hostile(job_spec(FIRST_HOSTILE, tmp_path, 24, 1), FIRST_HOSTILE, tmp_path)
    (environment,) = spec["environments"]
    assert environment["ref"] == REF
    assert environment["host"]["tier"] == "wall"
