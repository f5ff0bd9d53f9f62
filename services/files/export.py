"""A checkpoint as a plain Hugging Face directory: configuration, weights, tokenizer, chat template.

The rule kept here: the directory appears whole or not at all, and holds the weights of exactly the checkpoint that was
asked for; a damaged one is refused. The caller needs no torch: a process of its own does the work and takes its memory
with it (``python -m services.files.export_process JOB_DIRECTORY EPOCH STEP TARGET``). Callers decide where exports are
kept, and for how long.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from gspo_core.position import Position
from services.files.checkpoints import CheckpointStore
from services.files.job_dir import JobDir
from services.process.children import die_with_parent

NO_TORCH = "no torch is installed here: export it where a trainer runs (docs/operations.md, Models out of containers)"


class ExportFailed(Exception):
    """Nothing was exported; the message says why."""


class CheckpointNotFound(ExportFailed):
    """There is no checkpoint of this epoch and step."""


def export_checkpoint(job: JobDir, epoch: int, step: int, target: Path) -> Path:
    """Write the weights of a checkpoint to ``target``, which must not exist; returns it. Blocks until done.

    Raises CheckpointNotFound, ExportFailed.
    """
    if not CheckpointStore(job).has(Position(epoch, step)):
        raise CheckpointNotFound(f"job {job.id} has no checkpoint of epoch {epoch}, step {step}")
    if find_spec("torch") is None:
        raise ExportFailed(NO_TORCH)
    if target.exists():
        raise ExportFailed(f"{target} already exists; an export is written only once")
    # -P keeps the caller's folder off the path: a user's own `services` must not shadow ours.
    argv = [
        sys.executable,
        "-P",
        "-m",
        "services.files.export_process",
        str(job.path),
        str(epoch),
        str(step),
        str(target),
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, preexec_fn=die_with_parent())
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"the process ended with {done.returncode}"]
        raise ExportFailed(said[-1])
    return target
