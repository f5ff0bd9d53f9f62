"""What a host finds out about an environment: how many of its sessions may share a process, and what else to tell.

Rule: sessions share a process only where a hang or a crash can be laid at the door of one of them. Of a class whose
members are all async, one runs at a time, and it is marked. Of other classes several run at once, in threads: suspects
have to be tried again alone, so they share only if they can be replayed or restored.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from gspo_core.env import Environment, InvalidEnvironment
from gspo_core.types import Split
from services.hosts.wire import HostLimits

ASYNC_SESSIONS = 256
THREAD_SESSIONS = 16
HOSTING = "hosting"
"""The class attribute with the author's wishes: any of the fields of ``HostLimits``."""


def hosting_of(environment: Environment, job: Mapping[str, Any]) -> HostLimits:
    """The author's bounds, overridden by the job's. Raises ``InvalidEnvironment``."""
    author = getattr(getattr(environment, "cls", None), HOSTING, {})
    try:
        return HostLimits(**{**author, **job})
    except (TypeError, ValueError) as error:
        raise InvalidEnvironment(f"{environment.name}: {HOSTING}: {error}") from None


def describe(environment: Environment, limits: HostLimits) -> dict[str, Any]:
    return {
        "describe": environment.describe(),
        "num_tasks": {str(split): environment.num_tasks(split) for split in Split},
        "limits": dict(environment.limits),
        "replayable": environment.replayable,
        "has_snapshot": environment.has_snapshot,
        "reward_range": environment.reward_range,
        "tools": [dict(tool) for tool in environment.tools],
        "sessions_per_process": limits.sessions_per_process or _sessions_per_process(environment),
        "max_processes": limits.max_processes,
    }


def is_async(environment: Environment) -> bool:
    """Every member that a session calls is a coroutine function, so its code runs on the event loop alone."""
    declared = getattr(environment, "is_async", None)
    if isinstance(declared, bool):
        return declared
    cls = getattr(environment, "cls", None)
    if cls is None or isinstance(inspect.getattr_static(cls, "done", None), property):
        return False
    names = [schema["function"]["name"] for schema in environment.tools]
    others = [name for name in ("on_message", "close", "snapshot", "restore") if hasattr(cls, name)]
    members = [getattr(cls, name, None) for name in ("reset", "get_reward", *names, *others)]
    return all(inspect.iscoroutinefunction(member) for member in members)


def _sessions_per_process(environment: Environment) -> int:
    if is_async(environment):
        return ASYNC_SESSIONS
    return THREAD_SESSIONS if environment.replayable or environment.has_snapshot else 1
