"""Which kind of device a job is trained on, and whether a trainer has it. Imports no torch: the worker asks too."""

from __future__ import annotations

from functools import lru_cache

from pydantic import ValidationError

from gspo_core.spec import JobSpec


class NoSuchDevice(RuntimeError):
    """A job wants another kind of device than this trainer has."""


def device_of(spec: JobSpec, *, has_gpu: bool) -> str:
    wanted = spec.resources.device
    if wanted == "cuda" and not has_gpu:
        raise NoSuchDevice("resources.device is cuda: it waits for a trainer that has a GPU")
    return "cuda" if has_gpu and wanted != "cpu" else "cpu"


@lru_cache(maxsize=1000)
def unfit(spec: str, *, has_gpu: bool) -> str | None:
    """Why such a trainer cannot train a job of this specification."""
    try:
        device_of(JobSpec.model_validate_json(spec), has_gpu=has_gpu)
    except NoSuchDevice as error:
        return str(error)
    except ValidationError:
        return None  # whoever claims it says what is wrong
    return None
