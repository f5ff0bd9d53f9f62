"""Picks the device for a job, and checks that a trainer has it and ranks that can be divided as the job asks.

Must not import torch: the worker uses it too.
"""

from __future__ import annotations

from functools import lru_cache

from pydantic import ValidationError

from gspo_core.plan import arrangement_problem
from gspo_core.spec import JobSpec


class NoSuchDevice(RuntimeError):
    """This trainer lacks the device that a job requires."""


def device_of(spec: JobSpec, *, has_gpu: bool) -> str:
    wanted = spec.resources.device
    if wanted == "cuda" and not has_gpu:
        raise NoSuchDevice("resources.device is cuda: the job waits for a trainer with a GPU")
    return "cuda" if has_gpu and wanted != "cpu" else "cpu"


@lru_cache(maxsize=1000)
def unfit(spec: str, *, has_gpu: bool, num_ranks: int = 1) -> str | None:
    """Return why a trainer of so many ranks, with or without a GPU, cannot train this specification, or None."""
    try:
        job = JobSpec.model_validate_json(spec)
        device_of(job, has_gpu=has_gpu)
    except NoSuchDevice as error:
        return str(error)
    except ValidationError:
        return None  # the trainer that claims it reports the error
    problem = arrangement_problem(job.learner, num_ranks)
    return problem and f"{problem}: the job waits for a trainer that has them"
