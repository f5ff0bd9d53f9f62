"""Describes an environment to the other side: its traits, and how many of its sessions may share a process.

Rule: sessions share a process only if a hang or a crash can be traced to one of them. If all members of a class are
async, one session runs at a time and is marked. Sessions of other classes run at once, in threads: suspects must be
tried again alone, so they share a process only if they can be replayed or restored. So it is with agents that are
functions; one that is a program has a process to itself, whose end ends all that it has started.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from gspo_core.env import AgentEnvironment, Environment, InvalidEnvironment
from gspo_core.types import Split
from services.hosts.wire import HostDescription, HostLimits

ASYNC_SESSIONS = 256
THREAD_SESSIONS = 16
# For agents behind a URL: each takes a connection, and a thread while it is judged.
AGENTS_ELSEWHERE = 64
HOSTING = "hosting"
"""The class attribute with which an author sets fields of ``HostLimits``."""
IN_SANDBOXES = "runs_in_sandboxes"
"""The class attribute that says: no code of a policy is run but in what ``environments.sandbox.door`` gives."""


def hosting_of(environment: Environment, job: Mapping[str, int | str]) -> HostLimits:
    """The author's bounds, overridden by the job's. Raises ``InvalidEnvironment``."""
    author = getattr(_home(environment), HOSTING, {})
    try:
        return HostLimits(**{**author, **job})
    except (TypeError, ValueError) as error:
        raise InvalidEnvironment(f"{environment.name}: {HOSTING}: {error}") from None


def require_sandboxes(environment: Environment) -> None:
    """Raises ``InvalidEnvironment``."""
    if not getattr(_home(environment), IN_SANDBOXES, False):
        raise InvalidEnvironment(
            f"{environment.name} may only run in the tiers process and wall: it does not say that whatever its policy "
            f"writes is run in sandboxes ({IN_SANDBOXES} = True)"
        )


def _home(environment: Environment) -> object:
    """What bears its author's attributes: a module, a class, or the environment that speaks for several."""
    return getattr(environment, "home", None) or getattr(environment, "cls", None) or environment


def describe(environment: Environment, limits: HostLimits) -> HostDescription:
    """Raises ``TypeError`` or ``ValueError`` if the environment breaks its own protocol."""
    bounds = environment.reward_range
    return HostDescription(
        describe=dict(environment.describe()),
        num_tasks={split: int(environment.num_tasks(split)) for split in Split},
        limits=dict(environment.limits),
        replayable=bool(environment.replayable),
        has_snapshot=bool(environment.has_snapshot),
        reward_range=None if bounds is None else (float(bounds[0]), float(bounds[1])),
        tools=[{**tool} for tool in environment.tools],
        sessions_per_process=_sessions_per_process(environment, limits),
        max_processes=int(limits.max_processes),
        memory_mb=int(limits.memory_mb),
        is_agent=isinstance(environment, AgentEnvironment),
    )


def is_async(environment: Environment) -> bool:
    """Whether every member that a session calls is a coroutine function: then its code runs on the event loop alone."""
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


def _sessions_per_process(environment: Environment, limits: HostLimits) -> int:
    if isinstance(environment, AgentEnvironment) and environment.start.command is not None:
        return 1  # whatever anyone says: a program's descendants end with the process
    if limits.sessions_per_process is not None:
        return int(limits.sessions_per_process)
    if isinstance(environment, AgentEnvironment) and environment.start.pull:
        return ASYNC_SESSIONS
    if isinstance(environment, AgentEnvironment) and environment.start.url is not None:
        return AGENTS_ELSEWHERE
    if is_async(environment):
        return ASYNC_SESSIONS
    return THREAD_SESSIONS if environment.replayable or environment.has_snapshot else 1
