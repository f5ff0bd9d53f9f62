"""Results that the README shows are those that are kept."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CELLS = {cell["name"]: cell for cell in json.loads((ROOT / "benchmarks" / "results" / "baselines.json").read_text())}
ROWS = [
    ("GSPO", ["gspo_s0", "gspo_s4", "gspo_s16", "long_gspo_s16"]),
    ("GSPO, anchored on the sampler", ["behavior_s0", "behavior_s4", "behavior_s16", "long_behavior_s16"]),
    ("GRPO on tokens, corrected and gated alike", ["grpo_s0", "grpo_s4", "grpo_s16", "long_grpo_s16"]),
    ("GSPO, no gates", ["gates_off_s16", "long_gates_off_s16"]),
    ("GSPO, nothing done about staleness", ["naive_s16", "long_naive_s16"]),
    ("GRPO, nothing done about staleness", ["grpo_naive_s16", "long_grpo_naive_s16"]),
]


@pytest.mark.parametrize(("label", "names"), ROWS)
def test_the_table_of_baselines(label: str, names: list[str]) -> None:
    row = next(line for line in README.splitlines() if line.startswith(f"| {label} |"))
    shown = [tuple(map(int, found)) for found in re.findall(r"(\d+) % \((\d+) to (\d+)\)", row)]
    ends = [[run["evaluations"][-1][1] for run in CELLS[name]["runs"]] for name in names]
    assert all(len(seeds) >= 3 for seeds in ends)
    assert shown == [tuple(round(100 * of(end)) for of in (statistics.fmean, min, max)) for end in ends]
