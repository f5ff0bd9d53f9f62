"""Checks a question about trained steps against what is kept of the job, before anything is begun.

Rule: what is refused is refused with the reason and costs no process. It reads the logs of the steps asked for.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from gspo_core.log.changes import ImpossibleChange
from gspo_core.problems import Problem
from gspo_core.replay.past import Past, PastError
from gspo_core.replay.question import ReplayQuestion, ReplaySteps, plan
from services.api.http.errors import FINAL, RequestRefused, invalid
from services.files.job_dir import JobDir

MOST_STEPS = 1000
"""In one question, whose logs are read when it is asked."""
# Weights, gradients and moments in float32 take up to eight times as much memory, on the machine of the API.
MOST_MODEL_BYTES = 2 << 30


async def planned(job: JobDir, question: ReplayQuestion) -> ReplaySteps:
    """Raises RequestRefused."""
    if question.last - question.first >= MOST_STEPS:
        raise invalid([Problem("validation_failed", ("last",), f"last: a question has at most {MOST_STEPS} steps")])
    return await asyncio.to_thread(_planned, job, question)


def _planned(job: JobDir, question: ReplayQuestion) -> ReplaySteps:
    past = Past(job.path)
    try:
        found = plan(past, question)
        _require_small_model(Path(past.spec.model))
    except PastError as error:
        raise RequestRefused(409, "step_not_kept", str(error), param="first", headers=FINAL) from error
    except ImpossibleChange as error:
        raise invalid([Problem("validation_failed", (), str(error))]) from error
    return found


def _require_small_model(model: Path) -> None:
    try:
        size = sum(path.stat().st_size for path in model.iterdir() if path.suffix == ".safetensors")
    except OSError as error:
        message = f"the files of the job's model cannot be read here: {error}"
        raise RequestRefused(422, "validation_failed", message, param="model") from None
    if size > MOST_MODEL_BYTES:
        message = (
            f"the weights of the model have {size / 2**30:.1f} GiB, and the API replays models up to "
            f"{MOST_MODEL_BYTES >> 30} GiB: run gspo replay where there is memory for it"
        )
        raise RequestRefused(409, "replay_too_large", message, headers=FINAL)
