"""A checkpoint as a plain Hugging Face directory: configuration, weights, tokenizer, chat template.

The rule kept here: the directory appears whole or not at all, and holds the weights of exactly the checkpoint that was
asked for; one that is damaged is refused. The caller needs no torch: the work is done by a process of its own
(``python -m services.export JOB_DIRECTORY EPOCH STEP TARGET``), whose memory goes with it. It does not decide where
exports are kept or for how long.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Literal

from gspo_core.staleness import Position
from services.checkpoints import CheckpointStore
from services.children import die_with_parent
from services.durable import whole_directory
from services.job_dir import JobDir
from services.records import JobRecords


class ExportFailed(Exception):
    """Nothing was exported; the message says why."""


class CheckpointNotFound(ExportFailed):
    """There is no checkpoint of this epoch and step."""


def export_checkpoint(job: JobDir, epoch: int, step: int, target: Path) -> Path:
    """Write the weights of a checkpoint to ``target``, which must not exist; returns it. Blocks until done.

    Raises CheckpointNotFound, ExportFailed.
    """
    if not CheckpointStore(job).has(Position(epoch, step)):
        raise CheckpointNotFound(f"job {job.id} keeps no checkpoint of epoch {epoch}, step {step}")
    if target.exists():
        raise ExportFailed(f"{target} exists; an export is written once")
    # -P keeps the caller's folder off the path: a user's own `services` must not shadow ours.
    argv = [sys.executable, "-P", "-m", "services.export", str(job.path), str(epoch), str(step), str(target)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, preexec_fn=die_with_parent())
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"the process ended with {done.returncode}"]
        raise ExportFailed(said[-1])
    return target


def _write(job: JobDir, at: Position, target: Path) -> None:
    from gspo_core.learner import Learner
    from gspo_core.learner_config import LearnerConfig

    spec = JobRecords(job).accepted().job_spec
    options = dict(spec.learner) | {"dtype": _dtype_of(Path(spec.model))}
    config = LearnerConfig(optimizer=spec.optimizer, total_steps=spec.steps, **options)
    objective = spec.training_objective.model_copy(update={"kl_coef": 0.0})  # no reference model is needed
    learner = Learner(Path(spec.model), config, objective, seed=spec.seed)
    learner.load_state(CheckpointStore(job).learner_dir(at))
    with whole_directory(target) as temporary:
        learner.save_weights(temporary)


def _dtype_of(model_dir: Path) -> Literal["float32", "bfloat16"]:
    """The type of the model that training started from: an engine that serves it serves its successor."""
    config = json.loads((model_dir / "config.json").read_text())
    return "bfloat16" if (config.get("dtype") or config.get("torch_dtype")) == "bfloat16" else "float32"


def main(arguments: list[str]) -> int:
    job_dir, epoch, step, target = arguments
    try:
        _write(JobDir(Path(job_dir)), Position(int(epoch), int(step)), Path(target))
    except (OSError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
