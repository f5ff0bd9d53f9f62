"""The environments of a submitted job, with registered ones pinned to a version.

Rule: a job that is accepted names versions that exist, that its caller may see and that were not found unfit; what it
stores is `name@version`, so that nothing registered later changes it.
"""

from __future__ import annotations

from typing import TypeVar

from gspo_core.spec import EnvironmentSpec, JobSpec
from services.api.access import Caller
from services.api.errors import ApiError
from services.environment_registry import EnvironmentNotFound, Registry

Spec = TypeVar("Spec", bound=JobSpec)


def pin(spec: Spec, registry: Registry | None, caller: Caller) -> Spec:
    """Reads files: call it in a thread."""
    if all(":" in entry.ref for entry in spec.environments):
        return spec
    entries = tuple(_pinned(index, entry, registry, caller) for index, entry in enumerate(spec.environments))
    return spec.model_copy(update={"environments": entries})


def _pinned(index: int, entry: EnvironmentSpec, registry: Registry | None, caller: Caller) -> EnvironmentSpec:
    if ":" in entry.ref:
        return entry
    param = f"environments[{index}]"
    try:
        if registry is None:
            raise EnvironmentNotFound(entry.ref)
        one = registry.get(entry.ref)
        if one.owner and not caller.sees(one.owner):
            raise EnvironmentNotFound(entry.ref)
    except EnvironmentNotFound as error:
        raise ApiError(422, "environment_not_found", str(error), param=f"{param}.ref") from None
    if entry.config:
        message = f"{one.id} has its own config; register another version to change it"
        raise ApiError(422, "validation_failed", message, param=f"{param}.config")
    report = registry.report(one)
    if report is not None and not report["ok"]:
        message = f"{one.id} was examined and refused; GET /v1/environments/{one.id} says why"
        raise ApiError(422, "environment_invalid", message, param=f"{param}.ref")
    return entry.model_copy(update={"ref": one.id})
