"""What has been run: one small file for each cell and seed, under the working directory.

Rule: a file is complete or absent, and counts only as long as it was made under the conditions that would hold now.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.baselines.cells import Cell, Sizes
from benchmarks.baselines.training import Result

HARNESS = 1
"""Raised when the code changes what a cell computes."""


@dataclass(frozen=True)
class Run:
    """One cell with one seed, as it was stored."""

    cell: str
    seed: int
    conditions: dict[str, Any]
    host: dict[str, Any]
    result: Result


def conditions(cell: Cell, seed: int, sizes: Sizes) -> dict[str, Any]:
    """All that a result depends on besides the code and the model."""
    spec = cell.job(Path("model"), seed, sizes)
    job = spec.model_dump(mode="json", exclude={"model"}, exclude_unset=True)
    objective = spec.training_objective.model_dump(mode="json")
    about = {"staleness": cell.staleness, "model": cell.model, "attribution": cell.attribution}
    later: dict[str, Any] = {}  # what came later is named where it is used, so that earlier runs stay valid
    if cell.schedule != "halving":
        later |= {"schedule": cell.schedule}
    if cell.only_successes:
        later |= {"only_successes": True}
    if cell.judged_at:
        later |= {"judged_at": list(cell.judged_at), "judged_times": cell.judged_times}
    return {"harness": HARNESS, **about, "job": job, "objective": objective, **later}


class Store:
    def __init__(self, work: Path) -> None:
        self._directory = work / "cells"

    def read(self, cell: Cell, seed: int, sizes: Sizes) -> Run | None:
        """None where there is none, or one of other conditions."""
        path = self._path(cell, seed)
        if not path.is_file():
            return None
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["conditions"] != json.loads(json.dumps(conditions(cell, seed, sizes))):
            return None
        return Run(**{**found, "result": Result(**found["result"])})

    def seeds(self, cell: Cell) -> list[int]:
        """With which it has run, whatever the conditions."""
        names = (path.stem.rpartition("-") for path in self._directory.glob(f"{cell.name}-*.json"))
        return sorted(int(seed) for name, _, seed in names if name == cell.name)

    def write(self, cell: Cell, seed: int, sizes: Sizes, result: Result) -> None:
        import torch

        host = {
            "cpus": os.cpu_count(),
            "load": round(os.getloadavg()[0], 1),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }
        run = Run(cell.name, seed, conditions(cell, seed, sizes), host, result)
        path = self._path(cell, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".part")
        scratch.write_text(json.dumps(asdict(run)) + "\n", encoding="utf-8")
        scratch.rename(path)

    def _path(self, cell: Cell, seed: int) -> Path:
        return self._directory / f"{cell.name}-{seed}.json"
