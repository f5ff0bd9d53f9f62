"""An SGLang that is too old to train with is refused before anything starts, wherever it can be asked."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from gspo_core.cli import main
from services.launch import engine_versions, machine_checks, slurm_run

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


@pytest.mark.parametrize("place", ["up", "slurm"])
@pytest.mark.parametrize("version", ["0.5", "0.4.post1", "a warning; echo 0.5.18"])
def test_a_version_is_the_last_line_and_may_have_two_parts(
    place: str, version: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main([*words_of(place, tmp_path), "--sglang", "--sglang-python", python_with(version, tmp_path)]) == 1
    assert TOLD in capsys.readouterr().err


def answering(script: str, tmp_path: Path) -> str:
    python = Path(python_with("", tmp_path))
    python.write_text(f"#!/bin/sh\n{script}\n")
    return str(python)


def test_bytes_that_are_no_text_are_no_version_and_reach_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    python = answering(r"printf '\377\376\033[31m\n'", tmp_path)
    for place in ("up", "slurm"):
        assert main([*words_of(place, tmp_path), "--sglang", "--sglang-python", python]) == 0
    monkeypatch.setattr(machine_checks, "find_sglang", lambda: python)
    assert machine_checks.sglang().text.startswith("\ufffd\ufffd[31m in ")
    assert "\033" not in capsys.readouterr().out


def test_a_python_without_sglang_is_refused_where_it_would_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    named = ["--sglang", "--sglang-python", answering("exit 1", tmp_path)]
    assert main([*words_of("up", tmp_path), *named]) == 1
    assert f"{named[-1]} does not have it: install SGLang there" in capsys.readouterr().err
    assert main([*words_of("slurm", tmp_path), *named]) == 0
    assert f"{named[-1]} does not have it here" in capsys.readouterr().err
    assert run_on_allocation(named, tmp_path, monkeypatch) == 1


def test_a_python_that_hangs_is_killed_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_versions, "ANSWER_S", 0.5)
    pid_file = tmp_path / "pid"
    python = answering(f"sleep 100 & echo $! > {pid_file}; wait", tmp_path)
    begun = time.monotonic()
    with pytest.raises(engine_versions.Unanswered, match=r"did not answer within 0\.5 s"):
        engine_versions.sglang_version(python)
    assert time.monotonic() - begun < 20
    state = Path(f"/proc/{pid_file.read_text().strip()}/stat")
    for _ in range(100):
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("it lives")


def test_a_relative_python_is_that_of_where_the_command_was_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    python = python_with("0.5.23", tmp_path)
    for there in (True, False):
        assert main([*words_of("slurm", tmp_path), "--sglang", "--sglang-python", "./python"]) == 0
        assert f"--sglang-python={python}\n" in capsys.readouterr().out, there
        Path(python).unlink(missing_ok=True)
    assert main([*words_of("slurm", tmp_path), "--sglang", "--sglang-python", "python3-of-path"]) == 0
    assert "--sglang-python=python3-of-path" in capsys.readouterr().out


def test_the_python_of_an_image_has_to_be_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".venv-sglang/bin").mkdir(parents=True)
    shutil.move(python_with("0.5.23", tmp_path), tmp_path / ".venv-sglang/bin/python")
    assert main([*words_of("slurm", tmp_path), "--container", "image.sqsh", "--sglang"]) == 1
    said = capsys.readouterr()
    assert "name its Python that has SGLang, such as --sglang-python python3" in said.err
    assert said.out == ""


def test_the_stack_runs_in_an_allocation_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    where = ["--data-dir", str(tmp_path / "data"), "--model", "m", "--ports", "1,2,3,4,5"]
    monkeypatch.setattr(sys, "argv", ["slurm_run", *where])
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    assert slurm_run.main() == 1
    assert "this is no allocation of Slurm" in capsys.readouterr().err
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho no controller >&2\nexit 1\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[0-1]")
    assert slurm_run.main() == 1
    assert "scontrol show hostnames n[0-1] failed: no controller" in capsys.readouterr().err
