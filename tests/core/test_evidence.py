"""What a reward was made from comes back exactly, is bounded, and says what is not there."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_core import codec
from gspo_core.env import InvalidEnvironment, PlainEnvironment
from gspo_core.evidence import (
    JUDGE,
    MAX_LEFT_OUT,
    TASK,
    NotPlain,
    both,
    gathered,
    plain_text,
    state_of,
    value_of,
)
from gspo_core.invariants import InvalidValue
from gspo_core.job_spec import JobSpec
from gspo_core.log.batches import LoggedBatch, decode_batch
from gspo_core.log.erasing import without_texts
from gspo_core.types import MAX_EVIDENCE_BYTES, NOTHING, Evidence, Group, Outcome, Split, StopReason, Trajectory
from tests.core.segments import segment

ENOUGH = 1 << 20
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
hashable = st.recursive(scalars, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=5)
values = st.recursive(
    hashable,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.sets(hashable, max_size=3)
        | st.dictionaries(st.text(max_size=4) | hashable, inner, max_size=3)
    ),
    max_leaves=10,
)


def types_in(value: object) -> Any:
    match value:
        case dict():
            return dict, [(types_in(name), types_in(one)) for name, one in value.items()]
        case list() | tuple():
            return type(value), [types_in(one) for one in value]
    return type(value)


@given(values)
def test_a_value_comes_back_with_its_types(value: object) -> None:
    read = value_of(plain_text(value, ENOUGH))
    assert read == value
    assert types_in(read) == types_in(value)


def test_numbers_that_json_lacks_come_back() -> None:
    read = value_of(plain_text([float("inf"), float("-inf"), float("nan"), -0.0], ENOUGH))
    assert repr(read) == "[inf, -inf, nan, -0.0]"


class Number(int): ...


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (object(), "is a object"),
        ([{"deep": (Number(1),)}], "is a Number"),
        ("x" * 101, "more than the 100 bytes"),
        (["x"] * 60, "more than the 100 bytes"),
        (b"x" * 90, "more than the 100 bytes"),
        pytest.param(10**5000, "4300", id="long"),
    ],
)
def test_what_would_not_come_back_is_refused_with_the_reason(value: object, why: str) -> None:
    with pytest.raises(NotPlain, match=why):
        plain_text(value, 100)


def test_what_contains_itself_is_refused() -> None:
    ring: list[object] = []
    ring.append(ring)
    with pytest.raises(NotPlain, match="nested deeper"):
        plain_text(ring, ENOUGH)


@pytest.mark.parametrize("text", ["", "{", '{"$none": 1}', '{"$bytes": "*"}', '{"$set": [[]]}', "[" * 100_000])
def test_a_text_that_nothing_wrote_is_refused(text: str) -> None:
    with pytest.raises(NotPlain):
        value_of(text)


def test_what_does_not_fit_is_left_out_whole_and_named() -> None:
    found = gathered([("a", "x" * 10), ("b", "x" * 100), ("c", 1)], 40)
    assert found.told == {"a": '"xxxxxxxxxx"', "c": "1"}
    assert list(found.left_out) == ["b"]
    assert found.num_bytes <= 40
    merged = both(found, gathered([("d", "y" * 30), ("e", 2), ("a", "other")], ENOUGH), 40)
    assert (dict(merged.told), sorted(merged.left_out)) == ({**found.told, "e": "2"}, ["b", "d"])


def test_the_names_of_what_is_left_out_are_bounded_too() -> None:
    found = gathered([(f"{number:03}" * 100, object()) for number in range(100)], 100)
    assert len(found.left_out) == MAX_LEFT_OUT + 1
    assert found.left_out["..."] == f"and {100 - MAX_LEFT_OUT} more"
    assert max(map(len, found.left_out)) < 200


class World:
    def __init__(self) -> None:
        self.total, self._at, self.api_key, self.line = 3, (1, 2), "sk-1", object()


class Chosen:
    __slots__ = ("api_key", "total")
    end_state = ("total", "gone", "cost", "api_key")

    @property
    def cost(self) -> int:
        raise AssertionError("no code of the author runs")


def test_the_state_of_a_world_is_its_attributes_without_secrets() -> None:
    found = gathered(state_of(World(), None), ENOUGH)
    assert found.state == {"total": 3, "_at": (1, 2)}
    assert found.left_out == {
        "state.api_key": "its name is that of a secret; if it is none, name it in end_state",
        "state.line": "is a object, which is not kept",
    }


def test_its_author_says_what_to_keep() -> None:
    world = Chosen()
    world.total, world.api_key = 3, "named, so kept"
    found = gathered(state_of(world, Chosen.end_state), ENOUGH)
    assert found.state == {"total": 3, "api_key": "named, so kept"}
    assert found.left_out == {"state.gone": "the world has no such attribute", "state.cost": "is a property"}
    assert "end_state" in gathered(state_of(world, None), ENOUGH).left_out["state.*"]


class Judged:
    """A counter."""

    tasks = [{"prompt": "Go.", "goal": 2}]  # noqa: RUF012 as a user writes it

    def reset(self, prompt: str, goal: int) -> str:
        self.goal, self.total, self.num_judged = goal, 0, 0
        return prompt

    def add(self, amount: int) -> str:
        """Add.

        Args:
            amount: how much
        """
        self.total += amount
        return str(self.total)

    def get_reward(self) -> float:
        self.num_judged += 1
        return float(self.total == self.goal)


async def test_a_session_tells_the_world_as_it_was_before_it_was_judged() -> None:
    session = PlainEnvironment(Judged, {}, name="Judged").session()
    session.keep_evidence(ENOUGH)
    await session.start(Judged.tasks[0], 0)
    assert await session.score() == (0.0, {})
    assert session.evidence.state == {"goal": 2, "total": 0, "num_judged": 0}
    assert session.evidence.value(TASK) == Judged.tasks[0]
    assert not session.evidence.left_out
    await session.close()


def test_a_list_of_what_to_keep_is_a_list_of_names() -> None:
    class Wrong(Judged):
        end_state = "total"

    with pytest.raises(InvalidEnvironment, match="end_state is a list"):
        PlainEnvironment(Wrong, {}, name="Wrong")


SOME = Evidence({TASK: '{"goal":2}', JUDGE: '"\\u00e4: 7"'}, {"state.line": "is a object"})


def ended(evidence: Evidence = SOME) -> Outcome:
    return Outcome(StopReason.COMPLETED, 1.0, {"a": 1.0}, {"m": 2.0}, evidence)


def test_a_segment_carries_it_under_a_schema_of_its_own() -> None:
    one = segment(outcome=ended())
    data = codec.encode(one)
    assert data[4] == codec.EVIDENCE_SCHEMA
    assert codec.decode(data) == one
    assert codec.encode(segment(outcome=ended(NOTHING)))[4] == codec.SCHEMA
    older = data[:4] + struct.pack("<I", codec.USER_SCHEMA) + data[8:]
    with pytest.raises(codec.MalformedMeta):
        codec.decode(older)


def test_an_outcome_has_a_bound() -> None:
    with pytest.raises(InvalidValue, match="at most"):
        ended(Evidence({TASK: '"' + "x" * MAX_EVIDENCE_BYTES + '"'}))


def test_it_is_erased_with_its_episode() -> None:
    first, second = (type(segment().key)("job-1", 3, member) for member in (0, 1))
    episodes = tuple(Trajectory((segment(key=key, outcome=ended()),)) for key in (first, second))
    batch = LoggedBatch(1, 1, (Group("job-1", 3, Split.TRAIN, 0, 2, episodes),), {"staleness": {}})
    gone, kept = decode_batch(b"".join(without_texts(batch, [(3, 0)]))).trajectories
    assert gone.outcome == ended(NOTHING)
    assert kept.outcome == ended()


def test_a_job_stores_the_key_only_where_it_differs() -> None:
    spec = {"model": "m", "environments": [{"ref": "a:B"}]}
    assert "rewards" not in JobSpec.model_validate(spec).model_dump(mode="json")
    off = JobSpec.model_validate({**spec, "rewards": {"evidence_bytes": 0}})
    assert off.model_dump(mode="json")["rewards"]["evidence_bytes"] == 0
    waits = JobSpec.model_validate(
        {**spec, "environments": [{"ref": "a:b", "agent": {}}], "rewards": {"deadline_s": 1}}
    )
    assert "evidence_bytes" not in waits.model_dump(mode="json")["rewards"]
