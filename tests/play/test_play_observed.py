"""What is told by requests alone: which go on from an earlier one, whatever of them means nothing."""

from __future__ import annotations

import json
from typing import Any

from tests.play.observed import REPLACED, given_up, goes_on, observed
from tests.play.wire import Request

TASK = {"role": "user", "content": "Go."}
SAID = {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]}
BILL = "x-anthropic-billing-header: cc_version=2; cch={};"


def request(turn: int, *messages: Any, **fields: Any) -> Request:
    body = {"messages": [*messages], **fields}
    return Request(bytearray(json.dumps(body).encode()), bytearray(f'"id":"turn-0-{turn}"'.encode()))


def test_what_begins_with_all_of_an_earlier_request_goes_on_from_it() -> None:
    first = request(0, TASK, system=[{"type": "text", "text": BILL.format("a1")}])
    part = {"type": "text", "text": "Go.", "cache_control": {"type": "ephemeral"}}
    second = request(
        1, {"role": "user", "content": [part]}, SAID, TASK, system=[{"type": "text", "text": BILL.format("b2")}]
    )
    assert goes_on(observed([first, second])) == {1: 0}


def test_what_others_went_on_from_has_other_tools_or_says_something_else_does_not() -> None:
    again = request(2, TASK, SAID, {"role": "user", "content": "Else."})
    with_tools = request(3, TASK, SAID, TASK, tools=[{"name": "x"}])
    edited = request(4, {"role": "user", "content": "Come."}, SAID, TASK)
    turns = observed([request(0, TASK), request(1, TASK, SAID, TASK), again, with_tools, edited])
    assert goes_on(turns) == {1: 0}


def test_nothing_goes_on_from_an_answer_that_its_client_replaced() -> None:
    instead = {"role": "assistant", "content": [{"type": "text", "text": REPLACED}]}
    later = request(2, TASK, instead, TASK, SAID, TASK)
    assert goes_on(observed([request(0, TASK), request(1, TASK, instead, TASK), later])) == {2: 1}


def test_nothing_goes_on_from_an_answer_that_its_client_left_out() -> None:
    """mini-swe-agent says what was wrong with an answer that called nothing, and no more."""
    wrong = {"role": "user", "content": 'No call: {"role": "assistant"}'}
    later = request(2, TASK, wrong, SAID, TASK)
    assert goes_on(observed([request(0, TASK), request(1, TASK, wrong), later])) == {2: 1}


def test_the_first_request_of_a_turn_counts_and_refused_ones_do_not() -> None:
    refused = Request(bytearray(b'{"messages": []}'), bytearray(b'{"error":{"message":"n must be 1"}}'))
    assert refused.refused == "n must be 1"
    turns = observed([refused, request(0, TASK), request(0, TASK)])
    assert [one.turn for one in turns] == [0]


def test_what_a_request_that_was_given_up_went_on_from_too_may_be_a_branch() -> None:
    """A suggestion that was wanted until the user's next words came."""
    suggestion = request(1, TASK, SAID, {"role": "user", "content": "What next?"})
    suggestion.answered.clear()
    requests = [request(0, TASK), suggestion, request(2, TASK, SAID, TASK)]
    assert goes_on(observed(requests), given_up(requests)) == {}


def test_what_was_asked_again_was_not_given_up() -> None:
    lost = request(1, TASK, SAID, TASK)
    lost.answered.clear()
    requests = [request(0, TASK), lost, request(1, TASK, SAID, TASK)]
    assert goes_on(observed(requests), given_up(requests)) == {1: 0}
