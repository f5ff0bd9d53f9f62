"""What plays: anything that answers a conversation, and what an evaluation needs to know of an answer.

Rule: what the policy did is a turn or a stop reason; whatever else goes wrong is ``PolicyFailed`` and never a reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from gspo_core.env import Llm, ParsedTurn, Start
from gspo_core.json_value import JSON
from gspo_core.messages import Message
from gspo_core.spec import EpisodeLimits
from gspo_core.types import StopReason


class PolicyFailed(Exception):
    """No answer came, for a reason that the policy did not cause."""


class PolicyUnusable(Exception):
    """No answer will ever come: a wrong key, a wrong model, an engine that ended. It ends the evaluation."""


@dataclass(frozen=True, slots=True)
class PolicyTurn:
    """One answer."""

    parsed: ParsedTurn
    message: Message
    """The same as it stands in the history and in transcripts."""
    num_tokens: int | None
    """Sampled; None if the API does not say."""
    stop: StopReason | None = None
    """The limit that cut it off."""


class PolicyConversation(Protocol):
    """One episode of a policy. ``begin`` once, then ``answer`` and ``read`` in turn."""

    def begin(self, start: Start) -> StopReason | None:
        """Why nothing can be said, if the beginning is too long already. Raises ``EnvironmentFailed``."""
        ...

    async def answer(self, max_tokens: int) -> PolicyTurn | StopReason:
        """The next turn, of at most so many tokens, or why there is none.

        Raises ``PolicyFailed`` and ``PolicyUnusable``.
        """
        ...

    def read(self, turn: PolicyTurn, messages: Sequence[Message]) -> StopReason | None:
        """What the environment said to ``turn``. Raises ``EnvironmentFailed``."""
        ...


class EvaluatedPolicy(Protocol):
    def converse(self, name: str, seed: int, limits: EpisodeLimits) -> PolicyConversation:
        """``name`` and ``seed``: of the episode."""
        ...

    def llm(self, name: str) -> Llm:
        """Where an agent that owns its loop asks for its turns. Raises ``PolicyUnusable``."""
        ...


@dataclass(frozen=True, slots=True)
class LocalPolicyOrder:
    """A model whose engine is to be started on this machine."""

    model: str
    """A directory, a name of the hub, or a job."""
    temperature: float
    chat: Mapping[str, JSON]
    """As in a job."""
    device: str
    seed: int
    api_url: str
    """The installation that has the job."""


class LocalPolicies(Protocol):
    """What the service offers: policies that have their weights here."""

    def open_policy(self, order: LocalPolicyOrder) -> AbstractAsyncContextManager[EvaluatedPolicy]:
        """Raises ``PolicyUnusable``."""
        ...
