"""Who may say what an episode is worth: its judge, whoever started its agent, or, where its job says so, the agent.

Rule: the key by which an agent samples pays nothing unless the job trusts it with that; otherwise a policy that learns
one request has solved every task. No reward leaves the range that the environment states, nor does the sum of those
that were posted, at any time. What is refused is counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import msgspec

from gspo_core.environment_contract import BeyondBounds, check_size
from services.gateway.dialects.turns import Refusal, RefusalKind

Source = Literal["returned", "judge", "posted"]
"""As a job says it; with None whoever started the agent may post, and the judge's word, or what the agent returned,
stands where nobody did."""


class Payer(msgspec.Struct, frozen=True):
    """What is taken for one episode."""

    source: Source | None = None
    lowest: float = -math.inf
    highest: float = math.inf

    def check(self, value: float, *, by_own_key: bool) -> None:
        """A reward that is posted. Raises ``Refusal``."""
        if self.source in ("returned", "judge"):
            where = "what its agent returns" if self.source == "returned" else "its judge's"
            raise Refusal(RefusalKind.INVALID, f"the reward of this episode is {where} alone", param="reward")
        if by_own_key and self.source != "posted":
            raise Refusal(
                RefusalKind.INVALID,
                "the key that samples pays nothing: post with the reward_key, which whoever starts the agent is "
                "given, or say `rewards: posted` under the job's `agent`",
                param="reward",
            )
        if not self.lowest <= value <= self.highest:
            raise Refusal(RefusalKind.INVALID, f"{value:g} is outside {self.range_text}", param="reward")
        try:
            check_size("the reward", value)
        except BeyondBounds as error:
            raise Refusal(RefusalKind.INVALID, str(error), param="reward") from None

    @property
    def range_text(self) -> str:
        return f"the reward_range ({self.lowest:g}, {self.highest:g}) of its environment"

    def total(self, values: Iterable[float]) -> float:
        """Of all rewards of an episode. Raises ``ValueError``."""
        try:
            found = math.fsum(values)
        except OverflowError:
            found = math.inf
        if not math.isfinite(found):
            raise ValueError("its rewards have no finite sum")
        if not self.lowest <= found <= self.highest:
            raise ValueError(f"its rewards are {found:g} in all, outside {self.range_text}")
        check_size("the sum of its rewards", found)
        return found

    def total_with(self, values: Iterable[float]) -> float:
        """As ``total``, of all that is posted and of one that comes now. Raises ``Refusal``."""
        try:
            return self.total(values)
        except ValueError as error:
            raise Refusal(RefusalKind.INVALID, f"with this one {error}", param="reward") from None


ANYBODY = Payer("posted")
"""Of episodes that ended under an earlier release."""
