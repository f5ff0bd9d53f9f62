"""The whole gate over a made-up project: its last lines name what failed, and what is excused is told."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIVE = "tests/services/test_live.py::test_one[a b]"
PURE = "tests/core/test_pure.py::test_two"
PASSED = [
    {"test": "tests/services/test_first.py::test_x", "when": "call", "outcome": "passed", "worker": "gw0", "error": ""},
    {"test": "tests/other/test_y.py::test_y", "when": "call", "outcome": "passed", "worker": "gw1", "error": ""},
    {
        "test": "tests/other/test_y.py::test_s",
        "when": "setup",
        "outcome": "skipped",
        "worker": "gw1",
        "error": "no npm",
    },
]


def ended(test: str, outcome: str, error: str = "", when: str = "call") -> dict[str, str]:
    return {"test": test, "when": when, "outcome": outcome, "worker": "gw0", "error": error}


def failed(test: str, when: str = "call") -> dict[str, str]:
    return ended(test, "failed", "AssertionError: 1 == 2", when)


class Project:
    """Its targets say what a test gives them; its suite notes what is in `runs`, a file for each time it is run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / ".ci").mkdir()
        shutil.copy(ROOT / ".ci" / "run", root / ".ci" / "run")
        ignore = shutil.ignore_patterns("test_*.py", "__pycache__", "record.py")
        shutil.copytree(ROOT / "tests" / "gate", root / "tests" / "gate", ignore=ignore)
        (root / "tests" / "flakes.tsv").write_text("since\ttest\tload\terror\n")
        self.recipes = {
            "setup": ":",
            "test-data": "echo installed",
            "check": "echo clean",
            "demo": "echo 30.0 to 94.5",
            "chaos-ready": ":",
        }
        (root / "tests" / "chaos").mkdir()
        (root / "tests" / "chaos" / "seeds.txt").write_text("# two\n--seed 12 --faults 3\n--seed 12 --faults 3\n")
        (root / ".venv" / "bin").mkdir(parents=True)
        self.chaos("0")

    def chaos(self, *statuses: str) -> None:
        """How its runs end, one after the other."""
        path = self.root / ".venv" / "bin" / "python"
        path.write_text(
            "#!/usr/bin/env bash\n"
            'echo played "$@" >> plays\n'
            "echo 'oracle: process 7 was left behind'\n"
            "for number in {1..40}; do echo summary; done\n"
            "echo oracle: judged\n"
            f"statuses=({' '.join(statuses)})\n"
            "exit ${statuses[$(wc -l < plays) - 1]}\n"
        )
        path.chmod(0o755)

    def runs(self, *runs: Sequence[dict[str, str]]) -> None:
        for number, run in enumerate(runs):
            told = [*run, {"exit": 1}]
            (self.root / f"run.{number}").write_text("".join(json.dumps(line) + "\n" for line in told))
        (self.root / "suite.py").write_text(
            "import os, shutil, sys\n"
            "number = len([one for one in os.listdir('.') if one.startswith('asked.')])\n"
            "open(f'asked.{number}', 'w').write(sys.argv[2])\n"
            "shutil.copy(f'run.{number}', sys.argv[1])\n"
            "sys.exit('\"failed\"' in open(sys.argv[1]).read())\n"
        )
        self.recipes["suite"] = f"{sys.executable} suite.py $(RECORD) '$(subst ','\\'',$(TEST_FLAGS))'"

    def asked(self, number: int) -> str:
        return (self.root / f"asked.{number}").read_text()

    def gate(self) -> tuple[int, str]:
        """Its status and its last lines."""
        (self.root / "Makefile").write_text("".join(f"{name}:\n\t@{recipe}\n" for name, recipe in self.recipes.items()))
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        environment |= {"PYTHON": sys.executable, "LC_ALL": "C"}
        done = subprocess.run(
            ["bash", ".ci/run"],
            cwd=self.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert done.stderr == ""
        _, gate, lines = done.stdout.rpartition("\nGATE ")
        assert len(lines.splitlines()) <= 30
        return done.returncode, gate + lines


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_all_is_well(project: Project) -> None:
    project.runs(PASSED)
    status, told = project.gate()
    assert status == 0
    phases = re.findall(r"^PHASE   (\w+) +(\w+) +\d+ s *(.*)$", told, re.MULTILINE)
    assert phases == [
        ("setup", "ok", "installed"),
        ("checks", "ok", "clean"),
        ("tests", "ok", "2 passed, 1 skipped"),
        ("demo", "ok", "30.0 to 94.5"),
        ("chaos", "ok", "oracle: judged"),
    ]
    assert (project.root / "plays").read_text() == "played -m tests.chaos --seed 12 --faults 3\n"
    assert "SKIPPED 1 for a new reason: no npm" in told
    assert told.splitlines()[-1].startswith("VERDICT green")


def test_what_fails_again_alone_is_red_with_its_error_and_the_command_that_repeats_it(project: Project) -> None:
    project.runs([*PASSED, failed(LIVE)], [failed(LIVE)])
    status, told = project.gate()
    assert status == 1
    assert project.asked(1) == f"'{LIVE}'"
    assert f"RED     {LIVE}\n        AssertionError: 1 == 2\n        alone it failed again\n" in told
    assert f"again: .venv/bin/pytest '{LIVE}'" in told
    assert re.search(r"^PHASE   demo +ok", told, re.MULTILINE)  # what comes later ran all the same
    assert told.splitlines()[-1].startswith("VERDICT red: tests")


def test_what_fails_only_behind_its_neighbours_is_red_and_names_them(project: Project) -> None:
    project.runs([*PASSED, failed(LIVE)], [ended(LIVE, "passed")], [*PASSED, failed(LIVE)])
    status, told = project.gate()
    assert status == 1
    assert project.asked(2) == "tests/services/test_first.py tests/services/test_live.py"
    assert "alone it passed; behind tests/services/test_first.py it failed" in told


def test_what_passes_both_times_is_a_flake_told_loudly_and_excused(project: Project) -> None:
    project.runs([*PASSED, failed(LIVE)], [ended(LIVE, "passed")], [*PASSED, ended(LIVE, "passed")])
    status, told = project.gate()
    assert status == 0
    assert f"FLAKE   {LIVE}" in told
    assert f"python -m tests.gate.flakes '{LIVE}' 'AssertionError: 1 == 2'" in told
    assert re.search(r"^PHASE   tests +flaky", told, re.MULTILINE)


def test_what_is_left_open_every_time_is_red_and_the_test_that_leaves_it_is_named(project: Project) -> None:
    """At first its file is known, by its last test; when it is repeated each test is looked at."""
    last, guilty = "tests/services/test_live.py::test_last", "tests/services/test_live.py::test_guilty"
    left = "Failed: left open in test_live.py: ResourceWarning: subprocess 7 is still running"
    project.runs(
        [*PASSED, ended(last, "failed", left, "teardown")],
        [ended(last, "passed")],
        [ended(guilty, "failed", left, "teardown"), ended(last, "passed")],
    )
    status, told = project.gate()
    assert status == 1
    assert f"the test that leaves something open is {guilty}" in told


def test_what_strikes_another_test_when_it_is_repeated_is_red(project: Project) -> None:
    other = "tests/services/test_first.py::test_other"
    project.runs([*PASSED, failed(LIVE)], [ended(LIVE, "passed")], [failed(other), ended(LIVE, "passed")])
    status, told = project.gate()
    assert status == 1
    assert f"it passed, and this failed instead: {other}: AssertionError: 1 == 2" in told


def test_a_repeat_that_does_not_come_to_its_end_excuses_nothing(project: Project) -> None:
    project.runs([*PASSED, failed(LIVE)], [ended(LIVE, "passed")])
    path = project.root / "run.1"
    path.write_text(path.read_text().replace('{"exit": 1}', '{"exit": 3}'))
    status, told = project.gate()
    assert status == 1
    assert "alone it did not run to its end" in told


def test_a_fixture_that_fails_for_all_tests_of_a_file_is_one_failure(project: Project) -> None:
    tests = [f"tests/services/test_live.py::test_{number}" for number in range(5)]
    again = [ended(test, "passed") for test in tests]
    runs = [again] * 10
    project.runs([*PASSED, *(failed(test, "setup") for test in tests)], *runs)
    status, told = project.gate()
    assert status == 0
    assert told.count("FLAKE") == 5


def test_no_flake_excuses_a_run_that_did_not_come_to_its_end(project: Project) -> None:
    project.runs([*PASSED, failed(LIVE)], [ended(LIVE, "passed")], [*PASSED, ended(LIVE, "passed")])
    path = project.root / "run.0"  # an error of pytest itself: who knows what has not run
    path.write_text(path.read_text().replace('{"exit": 1}', '{"exit": 3}'))
    status, told = project.gate()
    assert status == 1
    assert f"FLAKE   {LIVE}" in told
    assert "RED     tests: status 2; again: make" in told


def test_a_flake_is_not_excused_for_more_than_a_week(project: Project) -> None:
    project.runs([*PASSED, failed(LIVE)], [ended(LIVE, "passed")], [*PASSED, ended(LIVE, "passed")])
    (project.root / "tests" / "flakes.tsv").write_text(f"since\ttest\n2026-01-01\t{LIVE}\t3.0\tonce\n")
    status, told = project.gate()
    assert status == 1
    assert "is a known flake since 2026-01-01, for more than 7 days" in told


@pytest.mark.parametrize(
    ("run", "why"),
    [
        ([failed(PURE)], "what it judges is never excused"),
        ([failed("tests/services/hosts/test_walls.py::test_a_wall")], "what it judges is never excused"),
        ([failed("tests/services/test_broken.py", "collect")], "cannot be repeated by its name"),
        ([failed(f"tests/services/test_live.py::test_{number}") for number in range(3)], "3 tests failed: so many"),
    ],
)
def test_what_is_never_excused(project: Project, run: list[dict[str, str]], why: str) -> None:
    again = [ended(one["test"], "passed") for one in run]
    project.runs([*PASSED, *run], again, again)
    status, told = project.gate()
    assert status == 1
    assert why in told


def test_tests_that_end_red_without_a_failed_test_are_red_with_their_last_words(project: Project) -> None:
    project.recipes["suite"] = "echo an interpreter ended; exit 3"
    status, told = project.gate()
    assert status == 1
    assert "RED     tests: status 2; again: make --no-print-directory suite" in told
    assert "        an interpreter ended" in told


@pytest.mark.parametrize(("target", "phase"), [("check", "checks"), ("demo", "demo")])
def test_another_phase_that_fails_says_its_last_words_and_ends_nothing(
    project: Project, target: str, phase: str
) -> None:
    project.runs(PASSED)
    project.recipes[target] = "echo a reason >&2; exit 3"
    status, told = project.gate()
    assert status == 1
    assert f"RED     {phase}: status 2" in told
    assert "        a reason" in told
    assert "2 passed" in told
    assert told.splitlines()[-1].startswith(f"VERDICT red: {phase},")


@pytest.mark.parametrize(
    ("statuses", "num_plays", "is_red"), [(["1"], 1, True), (["3", "0"], 2, False), (["3", "3"], 2, True)]
)
def test_chaos_that_came_late_is_played_once_more_and_what_is_wrong_is_not(
    project: Project, statuses: list[str], num_plays: int, is_red: bool
) -> None:
    project.runs(PASSED)
    project.chaos(*statuses)
    status, told = project.gate()
    assert status == is_red
    assert len((project.root / "plays").read_text().splitlines()) == num_plays
    assert ("FLAKE   chaos: late at the first try: oracle: process 7 was left behind" in told) == (num_plays == 2)
    assert re.search(rf"^RED     chaos.*: status {statuses[-1]}", told, re.MULTILINE) if is_red else "RED" not in told
    assert ("        oracle: process 7 was left behind\n" in told) == is_red


def test_without_a_set_up_there_is_nothing_to_run(project: Project) -> None:
    project.runs(PASSED)
    project.recipes["setup"] = "exit 1"
    status, told = project.gate()
    assert status == 1
    assert "checks" not in told
