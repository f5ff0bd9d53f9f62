"""What an attempt needs of the session of an agent, whoever starts and judges that agent.

Rule: whoever made the session closes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from gspo_core.environment_contract import Llm, Start
from gspo_core.json_value import JSON


class PlayedSession(Protocol):
    """The part of an ``AgentSession`` that is played."""

    @property
    def metrics(self) -> Mapping[str, float]: ...

    def offer(self, llm: Llm) -> None: ...

    async def start(self, task: Mapping[str, JSON], seed: int) -> Start: ...

    async def handed_out(self) -> str: ...

    async def ended(self) -> None: ...

    async def score(self) -> tuple[float, dict[str, float]]: ...
