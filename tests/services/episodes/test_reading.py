"""What stays of an answer whose end is found in the middle of what was sampled."""

from __future__ import annotations

import pytest

from services.episodes.policy import Span
from services.episodes.reading import head
from tests.services.rollout.rollout_kit import answer_of


@pytest.mark.parametrize(
    ("length", "spans"),
    [
        (0, ()),
        (1, (Span(0, 1, 4),)),
        (2, (Span(0, 2, 4),)),
        (3, (Span(0, 2, 4), Span(2, 3, 5))),
        (5, (Span(0, 2, 4), Span(2, 5, 5))),
        (9, (Span(0, 2, 4), Span(2, 5, 5))),
    ],
)
def test_each_token_that_stays_has_its_own_log_prob_and_version(length: int, spans: tuple[Span, ...]) -> None:
    whole = answer_of([11, 12, 13, 14, 15], [-0.1, -0.2, -0.3, -0.4, -0.5], [(4, 0, 2), (5, 2, 5)], "engine")
    found = head(whole, length)
    assert (found.ids, found.logprobs, found.spans) == (whole.ids[:length], whole.logprobs[:length], spans)
