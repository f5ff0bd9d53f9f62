"""What a job has left out of the requests of its agents."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gspo_core.spec import AgentSpec
from services.episodes.fingerprints import of_messages
from services.gateway.agent.plan import MOST_PLACES, cut, without_volatile
from services.gateway.dialects.asks import make_ask
from services.gateway.dialects.sent import FieldValue
from services.gateway.dialects.turns import AUTO, TurnRequest
from tests.services.gateway.gateway_kit import request, user


@pytest.mark.parametrize(
    ("pattern", "text", "left"),
    [
        ("It is *.", "Help. It is 12:00. Be kind.", "Help.  Be kind."),
        ("It is *", "Help.\nIt is 12:00. Be kind.\nNow.", "Help.\nNow."),
        ("It is *.", "Help.\nIt is 12:00.\n\nNow.", "Help.\n\nNow."),
        ("It is *.", "It is 1.It is 2.\nIt is 3.", ""),
        ("It is *.", "It is\n12.", "It is\n12."),
        ("<a>*</a> or <b>*</b>", "<a>1</a> or <b>2</b>!", "!"),
        ("nonce", "a nonce and a nonce", "a  and a "),
        ("It is *.", "Help.\r\nIt is 12:00.\r\nNow.", "Help.\r\nNow."),
        ("It is *", "Help. It is 12:00\r\nIt is 12:01\r\nNow.", "Help. \r\nNow."),
    ],
)
def test_what_is_found_goes_and_the_line_that_held_nothing_else(pattern: str, text: str, left: str) -> None:
    assert cut(text, pattern.split("*"), 100)[0] == left


@given(
    pattern=st.text("ab*", min_size=1, max_size=6).filter(lambda text: text[0] != "*" and "**" not in text),
    text=st.text("abc\n", max_size=40),
)
def test_it_is_the_first_and_shortest_that_is_found(pattern: str, text: str) -> None:
    *parts, last = pattern.split("*")
    shape = "[^\n]*?".join(map(re.escape, [*parts, last])) if last else "[^\n]*?".join(map(re.escape, parts)) + "[^\n]*"
    marked = re.sub(shape, "#", text)
    assert cut(text, pattern.split("*"), 100)[0] == re.sub(r"(?m)^#+(?:\n|\Z)|#", "", marked)


async def test_no_more_is_looked_at_than_a_bounded_number_of_places() -> None:
    """Whoever writes the pattern and the texts would hold up all others."""
    lines = "It is so\n" * 600
    for pattern, last in (("It is so", lines), ("It is *.", f"{lines}It is now.")):
        ask = await without_volatile(request(user(lines), user(last)), {"clock": pattern})
        left = [message["content"] for message in ask.messages]
        num_looked_at = sum(text.count("\n") for text in (lines, last)) - sum(one.count("It is so") for one in left)
        assert num_looked_at == (MOST_PLACES if pattern == "It is so" else 0)
    assert cut("aab" * 9, ["a", "c"], 4) == ("aab" * 9, 1)  # nor is it looked for again in the same line
    assert cut("aab\n" * 9, ["a", "c"], 4) == ("aab\n" * 9, 4)


async def test_what_has_none_of_it_is_left_as_it_is() -> None:
    ask = request(user("hello"))
    assert await without_volatile(ask, {}) is ask
    assert await without_volatile(ask, {"clock": "It is *."}) is ask


async def test_a_request_is_equal_to_one_that_never_had_it() -> None:
    for text in ("hello", "word " * 4_000):
        plain, dropped = asked(text), asked(f"{text}<n>1</n>")
        found = await without_volatile(dropped, {"nonce": "<n>*</n>"})
        assert found == replace(plain, left_out=("nonce",))
        assert plain.digest != dropped.digest


def asked(text: str) -> TurnRequest:
    """As the route of a dialect reads it."""
    ask = make_ask([user(text)], [], AUTO, 7, ["x"], {}, FieldValue(3, "seed"), single_call=True)
    return replace(ask, said=tuple(of_messages(ask.messages)))


@pytest.mark.parametrize(
    "volatile",
    [
        {"A": "xyz"},
        {"a": ""},
        {"a": "*xyz"},
        {"a": "xy*"},
        {"a": "xyz\na"},
        {"a": "x" * 257},
        {f"a{n}": "xyz" for n in range(17)},
    ],
)
def test_patterns_that_would_take_everything_are_refused(volatile: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match=r"three characters|at most|one line|lower-case"):
        AgentSpec.model_validate({"pull": True, "volatile": volatile})
    assert "volatile" not in AgentSpec(pull=True).model_dump(mode="json")
