"""What members of an allocation are started with, on stand-ins of Slurm's commands."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.files.data_dir import DataDir
from services.launch.placement import Member, PlacementRequest, place
from services.launch.slurm_steps import SlurmStep, SlurmSteps
from services.launch.topology import Site
from tests.patience import HANG_S

SRUN = """#!/bin/sh
printf '%s\\n' "$@" >"$SAID/srun.new"
mv "$SAID/srun.new" "$SAID/srun"
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
