"""docs/plan.md: its command runs as it is printed, and its table is what the plan computes."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from benchmarks import what_fits
from benchmarks.model_shapes import QWEN3
from gspo_core.cli import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "plan.md").read_text()


def test_the_command_of_the_page_says_what_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3["Qwen3-8B"]))
    Path("job.yaml").write_text(f"model: {tmp_path}\nenvironments: [{{ref: environments.calculator:Calculator}}]\n")
    assert main(shlex.split(block)[1:]) == 0
    assert "it fits" in capsys.readouterr().out


def test_the_table_of_the_page_is_computed() -> None:
    table = "\n".join(what_fits.table())
    assert table in PAGE
    assert table in what_fits.RESULTS.read_text()
