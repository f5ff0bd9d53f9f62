"""A checkpoint as a plain Hugging Face directory: configuration, weights, tokenizer, chat template.

The rule kept here: the directory appears whole or not at all, and holds the weights of exactly the checkpoint that was
asked for; one that is damaged is refused. The caller needs no torch: the work is done by a process of its own
(``python -m services.export JOB_DIRECTORY EPOCH STEP TARGET``), whose memory goes with it. It decides nothing about
where exports are kept or for how long.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Literal

from gspo_core.spec import JobSpec
from services.children import die_with_parent
from services.durable import TEMPORARY_PREFIX, flush_directory, flush_tree
from services.job_directory import JobDirectory


class ExportFailed(Exception):
    """Nothing was exported; the message says why."""


class CheckpointNotFound(ExportFailed):
    """There is no checkpoint of this epoch and step."""


def checkpoint_path(job_dir: Path, epoch: int, step: int) -> Path:
    """Where the checkpoint of ``step`` lies, or would lie."""
    return job_dir / "checkpoints" / f"ep{epoch:06d}-step{step:06d}"


def export_checkpoint(job_dir: Path, epoch: int, step: int, target: Path) -> Path:
    """Write the weights of a checkpoint to ``target``, which must not exist; returns it. Blocks until done.

    Raises CheckpointNotFound, ExportFailed.
    """
    if not checkpoint_path(job_dir, epoch, step).is_dir():
        raise CheckpointNotFound(f"job {job_dir.name} keeps no checkpoint of epoch {epoch}, step {step}")
    if target.exists():
        raise ExportFailed(f"{target} exists; an export is written once")
    # -P keeps the caller's folder off the path: a user's own `services` must not shadow ours.
    argv = [sys.executable, "-P", "-m", "services.export", str(job_dir), str(epoch), str(step), str(target)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, preexec_fn=die_with_parent())
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"the process ended with {done.returncode}"]
        raise ExportFailed(said[-1])
    return target


def _write(job_dir: Path, epoch: int, step: int, target: Path) -> None:
    from gspo_core.learner import Learner
    from gspo_core.learner_config import LearnerConfig

    spec = JobSpec.model_validate_json(JobDirectory(job_dir).accepted().spec)
    options = dict(spec.learner) | {"dtype": _dtype_of(Path(spec.model))}
    config = LearnerConfig(optimizer=spec.optimizer, total_steps=spec.steps, **options)
    objective = spec.training_objective.model_copy(update={"kl_coef": 0.0})  # no reference model is needed
    learner = Learner(Path(spec.model), config, objective, seed=spec.seed)
    learner.load_state(checkpoint_path(job_dir, epoch, step) / "learner")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}")
    try:
        learner.save_weights(temporary)
        flush_tree(temporary)
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    flush_directory(target.parent)


def _dtype_of(model_dir: Path) -> Literal["float32", "bfloat16"]:
    """That of the model which training started from: what serves it serves its successor."""
    config = json.loads((model_dir / "config.json").read_text())
    return "bfloat16" if (config.get("dtype") or config.get("torch_dtype")) == "bfloat16" else "float32"


def main(arguments: list[str]) -> int:
    job_dir, epoch, step, target = arguments
    try:
        _write(Path(job_dir), int(epoch), int(step), Path(target))
    except (OSError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
