"""Which limit ends a turn that meets several, and what remains of it for the next request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gspo_core.types import StopReason
from services.episodes.metering import Counters, Meter, Timings
from services.episodes.policy import Sampled, Span
from services.episodes.tree import TokenTree
from services.gateway.agent.budget import Budget
from services.gateway.dialects.turns import Refusal
from tests.services.gateway.gateway_kit import quick_order

CIRCLE = 64


def ended(ids: list[int], timings: Timings, **limits: Any) -> Budget:
    """The budget of an episode whose only turn has sampled ``ids`` and is ended by a limit."""
    limits |= {"max_repetition_tokens": CIRCLE, "episode_timeout_s": 1.0}
    order = quick_order(limits=limits, context_tokens=limits.pop("context_tokens", None))
    tree = TokenTree(order.key, 0, order.temperature)
    tokens = tree.open_turn(0, None, [1, 2, 3])
    tree.add(tokens, Sampled(ids, [-0.1] * len(ids), (Span(0, len(ids), 0),), "engine"))
    budget = Budget(order, tree, Meter(timings, Counters(), lambda: 0.0), [9])
    turn: Any = SimpleNamespace(entry=SimpleNamespace(finish=""), tokens=tokens, ask=SimpleNamespace(max_tokens=None))
    assert budget.ending(turn) == "length"
    return budget


@pytest.mark.parametrize(
    ("ids", "limits", "stop"),
    [
        ([7] * CIRCLE, {"max_episode_tokens": CIRCLE, "context_tokens": CIRCLE}, StopReason.REPETITION),
        (list(range(CIRCLE)), {"max_episode_tokens": CIRCLE, "context_tokens": CIRCLE}, StopReason.CONTEXT_OVERFLOW),
        (list(range(CIRCLE)), {"max_episode_tokens": CIRCLE}, StopReason.MAX_TOKENS),
        (list(range(CIRCLE)), {}, StopReason.EPISODE_TIMEOUT),
    ],
)
def test_of_several_limits_the_nearest_to_the_tokens_ends_a_turn(
    ids: list[int], limits: dict[str, Any], stop: StopReason
) -> None:
    assert ended(ids, Timings(env_s=2.0), **limits).stopped is stop


def test_who_went_in_circles_past_the_time_samples_no_more_when_the_time_comes_back() -> None:
    """Time that an engine kept a request waiting is taken off only when its answer comes."""
    timings = Timings(env_s=2.0)
    budget = ended([7] * CIRCLE, timings)
    timings.env_s = 0.5
    with pytest.raises(Refusal, match="repetition"):
        budget.check(1, 0)
