"""``python -m services.files.export_process JOB_DIRECTORY EPOCH STEP TARGET``: a checkpoint as a model directory.

Started by ``services.files.export``, whose callers have no torch. The directory appears whole or not at all.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Literal

from gspo_core.learner import Learner
from gspo_core.learner_config import LearnerConfig
from gspo_core.position import Position
from services.files.checkpoints import CheckpointStore
from services.files.durable import whole_directory
from services.files.job_dir import JobDir
from services.files.job_records import JobRecords

# Where an export holds the low-rank additions alone, for engines that serve them over the base model.
ADAPTER = "adapter"


def _write(job: JobDir, at: Position, target: Path) -> None:
    spec = JobRecords(job).accepted().job_spec
    options = dict(spec.learner) | {"dtype": _dtype_of(Path(spec.model))}
    config = LearnerConfig(optimizer=spec.optimizer, total_steps=spec.steps, **options)
    objective = spec.training_objective.model_copy(update={"kl_coef": 0.0})  # no reference model is needed
    learner = Learner(Path(spec.model), config, objective, seed=spec.seed)
    learner.load_state(CheckpointStore(job).learner_dir(at))
    with whole_directory(target) as temporary:
        learner.save_weights(temporary)
        if spec.learner.lora is not None:
            learner.save_adapter(temporary / ADAPTER)


def _dtype_of(model_dir: Path) -> Literal["float32", "bfloat16"]:
    """The dtype of the model that training started from: an engine that serves that one serves its successor."""
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
