"""Weights & Biases is told numbers, and nothing else; without its package the reason is a sentence."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from services.trainer.telling.wandb_run import WandbMissing, require_wandb

ROOT = Path(__file__).parents[3]
WRITER = """
import sys
from pathlib import Path
from services.trainer.telling.wandb_run import WandbRun
run = WandbRun("project", "offline", Path(sys.argv[1]), "job_a", "a name")
for step in (1, 2, 2):
    run.add(step, {"reward/mean": step / 8})
run._run.finish()
"""


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_without_its_package_the_operator_is_told_what_to_install() -> None:
    with pytest.raises(WandbMissing, match=r"gspo\[wandb\]"):
        require_wandb()


@pytest.mark.third_party
def test_an_offline_run_holds_the_numbers_by_step(tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", "wandb==0.31.0"], check=True)
    (tmp_path / "job").mkdir()
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    environment = clean | {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    subprocess.run([python, "-c", WRITER, tmp_path / "job"], check=True, env=environment)
    written = next((tmp_path / "job" / "wandb").glob("offline-run-*/*.wandb")).read_bytes()
    # Each value is there as it was told, and once more in the summary of a step.
    assert [written.count(value) >= count for value, count in ((b"reward/mean", 3), (b"0.125", 1), (b"0.25", 2))] == [
        True
    ] * 3
    assert socket.gethostname().encode() not in written
    assert [path.name for path in (tmp_path / "job").rglob("files/*")] == []
