"""Sends every number of a job to Weights & Biases if an operator enables it (the extra ``wandb``).

Rule: nothing is imported or sent before the first number, and only numbers are sent: no source code, no console, no
machine description. wandb finds its own key (``WANDB_API_KEY``).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

# A job has one run across all its trainers; repeated steps are sent again.
STEP = "step"


class WandbMissing(ImportError):
    """The package is not installed."""


def require_wandb() -> None:
    """Raises WandbMissing."""
    if importlib.util.find_spec("wandb") is None:
        raise WandbMissing("the package wandb is not installed: pip install 'gspo[wandb]'")


class WandbRun:
    """``directory`` is the job's and holds unsent data."""

    def __init__(
        self, project: str, mode: Literal["online", "offline"], directory: Path, job: str, name: str | None
    ) -> None:
        self._project, self._mode, self._directory, self._job, self._name = project, mode, directory, job, name
        self._run: Any = None

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        if self._run is None:
            self._run = self._begin()
        self._run.log({STEP: step, **scalars})

    def close(self) -> None:
        """Send the rest."""
        if self._run is not None:
            self._run.finish()

    def _begin(self) -> Any:
        wandb: Any = importlib.import_module("wandb")
        silent = wandb.Settings(
            silent=True,
            host="-",
            console="off",
            disable_git=True,
            disable_code=True,
            save_code=False,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        run = wandb.init(
            project=self._project,
            id=self._job,
            name=self._name or self._job,
            dir=str(self._directory),
            mode=self._mode,
            resume="allow",
            reinit="finish_previous",
            settings=silent,
        )
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP)
        return run
