"""The contract between environments and the rest: write a plain class, get sessions that an episode can talk to.

Read in this order: ``contract`` (the interface), ``plain`` (a user's class behind it), ``tools`` (schema, arguments,
results), ``prompt`` (the first messages), ``calls`` (deadlines, threads), ``loading`` (import strings).
"""

from gspo_core.env.contract import (
    Context,
    Environment,
    EnvironmentFailed,
    InvalidEnvironment,
    Observation,
    Session,
    Start,
    Timeouts,
)
from gspo_core.env.loading import load_environment
from gspo_core.env.plain import RESERVED_NAMES, PlainEnvironment
from gspo_core.messages import CallStatus, Message, ParsedTurn, ToolCall, ToolSchema

__all__ = [
    "RESERVED_NAMES",
    "CallStatus",
    "Context",
    "Environment",
    "EnvironmentFailed",
    "InvalidEnvironment",
    "Message",
    "Observation",
    "ParsedTurn",
    "PlainEnvironment",
    "Session",
    "Start",
    "Timeouts",
    "ToolCall",
    "ToolSchema",
    "load_environment",
]
