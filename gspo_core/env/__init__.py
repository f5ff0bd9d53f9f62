"""The contract between environments and the rest: write a plain class, get sessions that an episode can talk to.

Read in this order: `gspo_core.environment_contract` (the interface), ``plain`` (a user's class behind it), ``session``
(an episode on it), ``tools`` (schema, arguments, results), ``dialect`` (the words of the answers), ``prompt`` (the
first messages), ``calls`` (deadlines, threads), ``loading`` (import strings). Other forms than a class: ``functions``,
``trl``, and agents that own their loop: ``agents``, ``agent_runs``, ``agent_urls``, and ``acp_run`` with its
``acp_client`` and ``acp_messages``.
"""

from gspo_core.env.agents import AgentEnvironment, AgentStart
from gspo_core.env.functions import from_functions
from gspo_core.env.loading import NeedsAgent, load_environment
from gspo_core.env.plain import PlainEnvironment
from gspo_core.env.tools import RESERVED_NAMES
from gspo_core.env.trl import from_trl
from gspo_core.environment_contract import (
    IMAGES,
    AgentSession,
    AtCapacity,
    Context,
    Environment,
    EnvironmentFailed,
    InvalidEnvironment,
    Llm,
    Observation,
    Phase,
    Session,
    Start,
    Timeouts,
    Witness,
)
from gspo_core.messages import CallStatus, Message, ParsedTurn, ToolCall, ToolSchema

__all__ = [
    "IMAGES",
    "RESERVED_NAMES",
    "AgentEnvironment",
    "AgentSession",
    "AgentStart",
    "AtCapacity",
    "CallStatus",
    "Context",
    "Environment",
    "EnvironmentFailed",
    "InvalidEnvironment",
    "Llm",
    "Message",
    "NeedsAgent",
    "Observation",
    "ParsedTurn",
    "Phase",
    "PlainEnvironment",
    "Session",
    "Start",
    "Timeouts",
    "ToolCall",
    "ToolSchema",
    "Witness",
    "from_functions",
    "from_trl",
    "load_environment",
]
