"""A checkpoint as a plain Hugging Face directory: configuration, weights, tokenizer, chat template.

The rule kept here: the directory appears whole or not at all, and holds the weights of exactly the checkpoint that was
asked for; a damaged one is refused. The caller needs no torch: a process of its own does the work and takes its memory
with it (``python -m services.files.export_process JOB_DIRECTORY EPOCH STEP TARGET``). It computes on the CPU with few
threads, since a job may train beside it, and the kernel ends it first where memory runs out. Callers decide where
exports are kept, and for how long.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

from gspo_core.position import Position
from services.files.checkpoints import CheckpointStore
from services.files.durable import whole_directory
from services.files.job_dir import JobDir
from services.process.children import die_before_others

NO_TORCH = "no torch is installed here: export it where a trainer runs (docs/operations.md, Models out of containers)"
KILLED = (
    "its process was killed, most likely for want of memory: give the container that exports more memory, or export "
    "when no job trains beside it (docs/operations.md, Models out of containers)"
)
MAX_THREADS = 2
POLL_S = 0.5


class ExportFailed(Exception):
    """Nothing was exported; the message says why."""


class CheckpointNotFound(ExportFailed):
    """There is no checkpoint of this epoch and step."""


class ExportStopped(ExportFailed):
    """Nobody waits for it any more, or the caller ends."""


def can_export() -> bool:
    """Whether this installation of Python has what an export takes."""
    return find_spec("torch") is not None


def export_checkpoint(
    job: JobDir, epoch: int, step: int, target: Path, goes_on: Callable[[], bool] = lambda: True
) -> Path:
    """Write the weights of a checkpoint to ``target``, which must not exist; returns it. Blocks until done.

    ``goes_on`` is asked twice a second, and ends it with False. Raises CheckpointNotFound, ExportFailed, OSError.
    """
    if not CheckpointStore(job).has(Position(epoch, step)):
        raise CheckpointNotFound(f"job {job.id} has no checkpoint of epoch {epoch}, step {step}")
    if not can_export():
        raise ExportFailed(NO_TORCH)
    if target.exists():
        raise ExportFailed(f"{target} already exists; an export is written only once")
    if job.path in target.parents:
        target.parent.mkdir(exist_ok=True)  # not the job's folder: it may have been removed
    with whole_directory(target) as temporary:
        _run([str(job.path), str(epoch), str(step), str(temporary)], goes_on)
    return target


def _run(arguments: list[str], goes_on: Callable[[], bool]) -> None:
    # -P keeps the caller's folder off the path: a user's own `services` must not shadow ours.
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "services.files.export_process", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=_beside_training(os.environ),
        preexec_fn=die_before_others(),
    ) as process:
        try:
            said = _said(process, goes_on)
        except BaseException:
            process.kill()
            raise
    if process.returncode == -signal.SIGKILL:
        raise ExportFailed(KILLED)
    if process.returncode:
        raise ExportFailed((said.strip().splitlines() or [f"the process ended with {process.returncode}"])[-1])


def _said(process: subprocess.Popen[str], goes_on: Callable[[], bool]) -> str:
    while True:
        try:
            return process.communicate(timeout=POLL_S)[1]
        except subprocess.TimeoutExpired:
            if not goes_on():
                raise ExportStopped("it was stopped before its end") from None


def _beside_training(environment: Mapping[str, str]) -> dict[str, str]:
    given = environment.get("OMP_NUM_THREADS", "")
    threads = min(int(given), MAX_THREADS) if given.isdecimal() else MAX_THREADS
    return {**environment, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(threads)}
