"""Every cause of a failure that the code knows, as ``kind:name``: what docs/failures.md has to explain.

Rule: nothing is listed by hand but the modules whose exceptions reach an episode, a group or a job, and the exceptions
among them that do not.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any, get_args

from gspo_core.environment_contract import Phase
from gspo_core.types import StopReason
from services.hosts.process import Cause
from services.state.client import AwayReason
from services.state.jobs import ReasonCode
from services.state.queue_records import GroupEnd
from services.trainer.telling.failure import AlertKind

# What they raise ends in an episode, a group or a job.
MODULES = (
    *("gspo_core.assemble", "gspo_core.codec"),
    *("services.engines.protocol", "gspo_core.http_connection"),
    *("services.episodes.tree", "services.episodes.policy", "services.episodes.history"),
    *("services.files.batch_log", "services.files.checkpoints", "services.files.disk_space", "services.files.weights"),
    "gspo_core.log.history",
    "services.workers.loading",
    *("services.state.client", "services.state.functions", "services.state.refusals"),
    "services.trainer.telling.failure",
)
# Bases that are never raised themselves, and answers ("is it there?", "may it be so?") that their callers expect.
NO_CAUSES = {"EngineError", "BatchLogExists", "BatchLogNotFound", "VersionExists", "VersionNotFound", "OutOfRange"}
# It is waited for, and is no failure.
NO_PHASES = {"capacity"}


def causes() -> set[str]:
    return {
        *(f"stop:{one}" for one in StopReason),
        *(f"host:{one}" for one in Cause),
        *(f"redis:{one}" for one in AwayReason),
        *(f"phase:{one}" for one in set(words(Phase)) - NO_PHASES),
        *(f"code:{one}" for one in words(ReasonCode)),
        *(f"group:{one}" for one in words(GroupEnd)),
        *(f"alert:{one}" for one in words(AlertKind)),
        *(f"error:{one}" for module in MODULES for one in exceptions(importlib.import_module(module))),
    }


def words(alias: Any) -> Iterator[str]:
    """The strings of a Literal, or of a union of them."""
    for one in get_args(alias):
        if isinstance(one, str):
            yield one
        else:
            yield from words(one)


def exceptions(module: ModuleType) -> set[str]:
    """Those that the module defines."""
    classes = inspect.getmembers(module, inspect.isclass)
    own = {name for name, one in classes if issubclass(one, Exception) and one.__module__ == module.__name__}
    return own - NO_CAUSES
