"""An SGLang that is too old to train with is refused before anything starts, wherever it can be asked."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from gspo_core.cli import main
from services.launch import slurm_run

TOLD = "does not say which weights sampled a token: install 0.5.19 or newer there, or name another Python with --sglang"


def python_with(version: str, tmp_path: Path) -> str:
    """It answers with the version of its SGLang, and is good for nothing else."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {version}\n")
    python.chmod(0o755)
    return str(python)


def words_of(place: str, tmp_path: Path) -> list[str]:
    where = ["--data-dir", str(tmp_path / "data"), "--model", "m"]
    return ["up", *where, "--port", "0", "--plan"] if place == "up" else ["launch", place, *where]


def run_on_allocation(words: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(slurm_run, "node_names", lambda: ["n0"])
    monkeypatch.setattr(slurm_run, "addresses", lambda nodes: ["127.0.0.1"])
    where = ["--data-dir", str(tmp_path / "data"), "--model", "m", "--ports", "1,2,3,4,5"]
    monkeypatch.setattr(sys, "argv", ["slurm_run", *where, *words])
    return slurm_run.main()


@pytest.mark.parametrize("place", ["up", "slurm", "ray"])
def test_an_old_sglang_is_refused(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    python = python_with("0.5.18", tmp_path)
    assert main([*words_of(place, tmp_path), "--sglang", "--sglang-python", python]) == 1
    said = capsys.readouterr()
    assert f"--sglang: version 0.5.18 in {python} {TOLD}" in said.err
    assert said.out == ""
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("place", ["up", "slurm"])
@pytest.mark.parametrize("version", ["0.5.19", "of main"])
def test_one_that_can_train_and_one_built_by_hand_are_taken(
    place: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main([*words_of(place, tmp_path), "--sglang", "--sglang-python", python_with(version, tmp_path)]) == 0


def test_ray_comes_to_itself_with_an_sglang_that_can_train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    python = python_with("0.5.19", tmp_path)
    assert main([*words_of("ray", tmp_path), "--sglang", "--sglang-python", python]) == 1
    assert "Ray is not installed" in capsys.readouterr().err


def test_the_allocation_refuses_what_the_machine_where_its_script_was_written_did_not_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    python = str(tmp_path / "python")
    named = ["--sglang", "--sglang-python", python]
    assert main([*words_of("slurm", tmp_path), *named]) == 0
    said = capsys.readouterr()
    assert f"{python} is not here" in said.err
    assert f"--sglang-python={python}" in said.out
    assert run_on_allocation(named, tmp_path, monkeypatch) == 1
    assert f"{python} is not there" in capsys.readouterr().err
    python_with("0.5.18", tmp_path)
    assert run_on_allocation(named, tmp_path, monkeypatch) == 1
    assert TOLD in capsys.readouterr().err


def test_the_python_of_a_container_is_not_that_of_the_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    named = ["--sglang", "--sglang-python", python_with("0.5.18", tmp_path), "--container", "image.sqsh"]
    assert main([*words_of("slurm", tmp_path), *named]) == 0
    assert "is not here" not in capsys.readouterr().err
    monkeypatch.setattr(slurm_run, "run", lambda installation, steps, submission: 0)
    assert run_on_allocation(named, tmp_path, monkeypatch) == 0
