"""``python -m services.files.export_process JOB_DIRECTORY EPOCH STEP TARGET``: a checkpoint as a model directory.

Started by ``services.files.export``, whose callers have no torch, with an empty ``TARGET`` that it makes whole or
removes. Rule: nothing is written outside of ``TARGET``, nor where a job was that is removed meanwhile; and of the
checkpoint the weights alone come into memory, without the moments of training, which are twice as large.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Literal

from gspo_core.learner import Learner
from gspo_core.learner_config import LearnerConfig
from gspo_core.position import Position
from services.files.checkpoints import CheckpointStore
from services.files.job_dir import JobDir
from services.files.job_records import JobRecords

# Where an export holds the low-rank additions alone, for engines that serve them over the base model.
ADAPTER = "adapter"
# How several ranks train says nothing of the weights; one process could neither be divided so, nor compile.
ALONE = {"context_parallel": 1, "replicas": 1, "compile_layers": False}


def _write(job: JobDir, at: Position, target: Path) -> None:
    spec = JobRecords(job).accepted().job_spec
    model_dir = Path(spec.model).absolute()
    options = dict(spec.learner) | ALONE | {"dtype": _dtype_of(model_dir)}
    config = LearnerConfig(optimizer=spec.optimizer, total_steps=spec.steps, **options)
    objective = spec.training_objective.model_copy(update={"kl_coef": 0.0})  # no reference model is needed
    learner = Learner(model_dir, config, objective, seed=spec.seed, device="cpu")  # GPUs train, or sample
    learner.load_weights(CheckpointStore(job).learner_dir(at))
    target.mkdir(exist_ok=True)
    with contextlib.chdir(target):  # a name would be made anew, with the folders above it, where the job was removed
        learner.save_weights(Path())
        if spec.learner.lora is not None:
            learner.save_adapter(Path(ADAPTER))


def _dtype_of(model_dir: Path) -> Literal["float32", "bfloat16"]:
    """The dtype of the model that training started from: an engine that serves that one serves its successor."""
    config = json.loads((model_dir / "config.json").read_text())
    return "bfloat16" if (config.get("dtype") or config.get("torch_dtype")) == "bfloat16" else "float32"


def main(arguments: list[str]) -> int:
    job_dir, epoch, step, target = arguments
    try:
        _write(JobDir(Path(job_dir).absolute()), Position(int(epoch), int(step)), Path(target))
    except (OSError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
