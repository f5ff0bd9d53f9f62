"""Ids that go to an engine are the ids that came in, and what would end an engine never comes in."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from gspo_core.token_ids import TokenIds


def test_the_json_and_every_slice_are_those_of_a_list_that_grew_alike() -> None:
    generator, ids, expected = random.Random(0), TokenIds(), []
    assert json.loads(ids.to_json()) == []
    for _ in range(50):
        added = [generator.randrange(200_000) for _ in range(generator.randint(0, 5))]
        ids.extend(added)
        expected += added
        begin, end = sorted(generator.choices(range(len(expected) + 1), k=2))
        assert json.loads(ids.to_json()) == expected == list(ids)
        assert (ids[begin:end], list(ids.head(end)), len(ids)) == (expected[begin:end], expected[:end], len(expected))
    assert ids.largest == max(expected)
    assert ids == expected != [*expected, 1]


@pytest.mark.parametrize("wrong", [[1, "2"], [1.0], [[1]], [None], [-1], [2**31]])
def test_what_is_no_id_is_refused_and_leaves_nothing_behind(wrong: list[Any]) -> None:
    ids = TokenIds([7])
    with pytest.raises(ValueError, match="token ids"):
        ids.extend(wrong)
    assert ids.to_json() == b"[7]"


def test_a_digest_tells_a_changed_beginning() -> None:
    ids = TokenIds([1, 2, 3])
    before = ids.digest(2)
    ids.extend([4])
    assert ids.digest(2) == before
    ids._ids[1] = 9
    assert ids.digest(2) != before
