"""What members of an allocation are started with, on stand-ins of Slurm's commands."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.files.data_dir import DataDir
from services.launch import slurm_steps
from services.launch.placement import Member, PlacementRequest, place
from services.launch.slurm_steps import SlurmStep, SlurmSteps
from services.launch.topology import Site
from tests.patience import HANG_S

SRUN = """#!/bin/sh
printf '%s\\n' "$@" >"$SAID/srun.new"
mv "$SAID/srun.new" "$SAID/srun"
"""
RUNS = """#!/bin/sh
trap 'echo terminated >>"$SAID/srun"; exit 0' TERM
echo begun >>"$SAID/srun"
while :; do sleep 0.01; done
"""
# Slow or refusing until told otherwise.
SQUEUE = """#!/bin/sh
echo "$@" >>"$SAID/squeue"
[ -e "$SAID/is_slow" ] && exec sleep 100
[ -e "$SAID/is_away" ] && exit 1
cat "$SAID/steps"
"""
SCANCEL = """#!/bin/sh
echo "$@" >>"$SAID/scancel"
[ -e "$SAID/is_slow" ] && exec sleep 100
true
"""


class Slurm:
    """Commands in a folder that is searched first, and what they were told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data_dir = DataDir(folder / "data")

    def program(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def start(self, *more: str) -> SlurmStep:
        return SlurmSteps(["n1"], self.data_dir, more).start(trainer(), ["the-program"], {"SAID": str(self.folder)})

    def said(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []


def trainer() -> Member:
    members = place(PlacementRequest(gpus_per_node=0), Site.BATCH)
    return next(one for one in members if one.name == "trainer")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SAID", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    return Slurm(tmp_path)


def test_a_step_has_our_settings_whatever_the_site_exports_unless_its_user_says_otherwise(slurm: Slurm) -> None:
    slurm.program("srun", SRUN)
    step = slurm.start("--export=NONE")
    assert step._srun.wait(HANG_S) == 0
    assert [word for word in slurm.said("srun") if word.startswith("--export")] == ["--export=ALL", "--export=NONE"]


@pytest.fixture
def running(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmStep]:
    """The trainer, with a controller that can be slow."""
    for pause in ("ASK_AGAIN_S", "LISTED_S"):
        monkeypatch.setattr(slurm_steps, pause, 0.0)
    for name, text in {"srun": RUNS, "squeue": SQUEUE, "scancel": SCANCEL}.items():
        slurm.program(name, text)
    (slurm.folder / "steps").write_text("7.0|redis\n7.1|trainer\n")
    step = slurm.start()
    deadline = time.monotonic() + HANG_S
    while not slurm.said("srun"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield step
    step._srun.kill()
    step._srun.wait()


def test_a_signal_that_is_refused_is_sent_again(slurm: Slurm, running: SlurmStep) -> None:
    slurm.program("scancel", SCANCEL.replace("true", '[ -e "$SAID/works" ]'))
    running.ask_to_leave()
    assert running.poll() is None
    (slurm.folder / "works").touch()
    assert [running.poll(), running.poll()] == [None, None]
    assert slurm.said("scancel") == ["--ctld --signal=TERM 7.1"] * 3
    assert slurm.said("srun") == ["begun"]


@pytest.mark.parametrize("trouble", ["is_slow", "is_away"])
def test_who_cannot_be_asked_to_leave_yet_is_asked_again_and_not_killed(
    slurm: Slurm, running: SlurmStep, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`srun` would kill its task; as long as the controller does not say that there is no step, it is left alone."""
    (slurm.folder / trouble).touch()
    with monkeypatch.context() as hasty:
        hasty.setattr(slurm_steps, "COMMAND_S", 0.2)
        running.ask_to_leave()
        assert running.poll() is None
    (slurm.folder / trouble).unlink()
    assert running.poll() is None
    assert slurm.said("scancel") == ["--ctld --signal=TERM 7.1"]
    num_asked = len(slurm.said("squeue"))
    assert running.poll() is None
    assert len(slurm.said("squeue")) == num_asked, "it was asked already: a second signal is one for haste"
    assert slurm.said("srun") == ["begun"]


def test_a_signal_that_takes_long_is_not_sent_twice(
    slurm: Slurm, running: SlurmStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.program("scancel", SCANCEL.replace("is_slow", "steps"))
    with monkeypatch.context() as hasty:
        hasty.setattr(slurm_steps, "COMMAND_S", 5.0)
        running.ask_to_leave()
    assert running.poll() is None
    assert len(slurm.said("scancel")) == 1
    assert slurm.said("srun") == ["begun"]


def test_a_step_that_has_not_begun_is_not_started(slurm: Slurm, running: SlurmStep) -> None:
    (slurm.folder / "steps").write_text("7.0|redis\n")
    running.ask_to_leave()
    assert running._srun.wait(HANG_S) == 0
    assert slurm.said("srun") == ["begun", "terminated"]


def test_who_does_not_leave_is_killed_however_slow_the_controller_is(
    slurm: Slurm, running: SlurmStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    (slurm.folder / "is_slow").touch()
    monkeypatch.setattr(slurm_steps, "COMMAND_S", 0.2)
    running.kill()
    assert running.poll() == -signal.SIGKILL


def test_the_steps_are_asked_for_once_for_all_members(
    slurm: Slurm, running: SlurmStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would wait for a controller that hangs."""
    for pause in ("ASK_AGAIN_S", "LISTED_S"):
        monkeypatch.setattr(slurm_steps, pause, HANG_S)
    (slurm.folder / "is_away").touch()
    listed, asked = running._listed, len(slurm.said("squeue"))
    for step in (running, SlurmStep("redis", running._srun, listed)):
        step.ask_to_leave()
    assert len(slurm.said("squeue")) == asked + 1
    assert slurm.said("scancel") == []
