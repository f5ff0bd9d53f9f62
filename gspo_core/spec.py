"""The whole of a training job, as its user writes it.

The names are here, their definitions in ``job_spec`` and ``environment_spec``, which are loaded when one of them is
first used: they need pydantic, which takes longer to import than all the rest of the light half, and an environment or
a command that only shows a job should not wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gspo_core.environment_spec import AgentSpec, EnvironmentSpec, EpisodeLimits, Limits, ParseErrorPolicy
    from gspo_core.job_spec import (
        ChatSpec,
        CheckpointSpec,
        EvaluationSpec,
        JobSpec,
        ParentSpec,
        RecordedSpec,
        ResourceSpec,
        RolloutSpec,
        SamplingSpec,
        spec_warnings,
    )

__all__ = [
    "AgentSpec",
    "ChatSpec",
    "CheckpointSpec",
    "EnvironmentSpec",
    "EpisodeLimits",
    "EvaluationSpec",
    "JobSpec",
    "Limits",
    "ParentSpec",
    "ParseErrorPolicy",
    "RecordedSpec",
    "ResourceSpec",
    "RolloutSpec",
    "SamplingSpec",
    "spec_warnings",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gspo_core import environment_spec, job_spec

    return getattr(job_spec if hasattr(job_spec, name) else environment_spec, name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
