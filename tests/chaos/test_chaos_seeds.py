"""A run follows from its seed, which is drawn where none is given; what it says at its end is true."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.__main__ import command_of, nothing_is_missing, options_of, parse
from tests.chaos.coverage import Coverage, told
from tests.chaos.jobs import LEARNERS, NUM_KINDS, ON_STALE, TRANSPORTS, job_spec, kind_of_player, kinds_of
from tests.chaos.players import AGENTS
from tests.chaos.runner import RACED, Options, Run
from tests.chaos.schedule import OF_AGENTS, WEIGHTS, plan
from tests.chaos.worlds import WORLDS

KINDS_OF_JOBS = {
    *(f"world {world.__name__}" for world in WORLDS),
    *(f"stale {name}" for name in ON_STALE),
    *(f"learner {name}" for name in LEARNERS),
    *(f"weights by {name}" for name in TRANSPORTS),
}
KINDS_OF_AGENTS = {kind_of_player(ref) for ref in AGENTS}


def test_a_seed_is_drawn_where_none_is_given() -> None:
    assert parse([]).seed is None


@pytest.mark.parametrize(
    "argv", [[], ["--faults", "500"], ["--kinds", "flushall,kill api", "--minutes", "0.5", "--least-jobs", "1"]]
)
def test_the_command_that_is_printed_plays_the_same_run(argv: list[str]) -> None:
    arguments = parse(argv)
    options = options_of(arguments, 4711)
    program, _, flags = command_of(arguments, 4711).partition(" --")
    assert program == "python -m tests.chaos"
    again = [part.strip('"') for part in re.findall(r'"[^"]*"|\S+', f"--{flags}")]
    assert options_of(parse(again), parse(again).seed) == options


def test_schedule_and_jobs_follow_from_the_seed(tmp_path: Path) -> None:
    def everything(seed: int) -> object:
        return plan(seed, 320, 180.0), [job_spec(number, tmp_path, 24, seed, players="both") for number in range(8)]

    assert everything(777) == everything(777)
    assert everything(777) != everything(778)


def test_a_run_that_brings_its_own_disturbance_plans_no_fault() -> None:
    assert plan(12, 0, 0.0) == []


@pytest.mark.parametrize("seed", range(20))
def test_a_few_jobs_are_of_every_kind(seed: int, tmp_path: Path) -> None:
    def kinds(players: str) -> set[str]:
        numbers = range(NUM_KINDS)
        specs = [job_spec(one, tmp_path, 24, seed, transports=TRANSPORTS, players=players) for one in numbers]
        return set().union(*map(kinds_of, specs))

    assert kinds("worlds") == KINDS_OF_JOBS
    assert kinds("both") == KINDS_OF_JOBS | KINDS_OF_AGENTS
    assert kinds("agents") >= KINDS_OF_AGENTS
    assert not kinds("agents") & {kind_of_player(f"tests.chaos.worlds:{world.__name__}") for world in WORLDS}


@pytest.mark.parametrize("are_installed", [True, False])
def test_a_run_promises_what_its_flags_say(
    are_installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    if are_installed:
        python.touch()
    monkeypatch.setattr("tests.chaos.runner.AGENT_PYTHON", python)
    usual = Options(1, 320, 3.0, players="both")
    run = Run(tmp_path / "a", usual)
    run.disk.close()
    agents = KINDS_OF_AGENTS if are_installed else set()
    assert run.coverage.promised | set(run.faults.impossible()) == {*WEIGHTS, *KINDS_OF_JOBS, *agents, RACED}
    assert OF_AGENTS.isdisjoint(run.faults.impossible()) == are_installed
    assert ("agents" in run._without()) != are_installed
    run = Run(tmp_path / "b", replace(usual, kinds=("kill api",), least_jobs=1))
    run.disk.close()
    assert run.coverage.promised == {"kill api", RACED, *kinds_of(run._spec(0))}
    assert {*run.faults.kinds, *run.users.kinds} == set(WEIGHTS)


def test_what_was_promised_and_never_ran_fails_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    coverage = Coverage(["kill api", "flushall"])
    coverage.ran("flushall")
    coverage.ran("stall redis")
    assert coverage.never_ran() == ["kill api"]
    assert told(coverage.to_dict()["ran"], coverage.never_ran(), ["disk full"]) == (  # type: ignore[arg-type]
        "2 kinds of faults and jobs ran; never ran: kill api; left out by the flags: disk full"
    )
    (tmp_path / "end.json").write_text('{"coverage": {"ran": {}, "never_ran": ["kill api"]}}')
    assert not nothing_is_missing(tmp_path)
    assert "promised and never ran: kill api" in capsys.readouterr().out
    (tmp_path / "end.json").write_text('{"coverage": {"ran": {}, "never_ran": []}}')
    assert nothing_is_missing(tmp_path)
