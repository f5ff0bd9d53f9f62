"""Frames from a host are foreign data: each is read whole, or refused."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from gspo_core.json_value import JSON
from services.hosts import wire
from services.hosts.inside.sessions import _shortened
from services.hosts.service import ConnectionRefused, Guest
from services.hosts.wire import BadFrame, HostDescription

DESCRIBED = {
    "describe": {},
    "num_tasks": {"train": 3, "eval": 0},
    "limits": {},
    "replayable": True,
    "has_snapshot": False,
    "reward_range": [0, 1],
    "tools": [],
    "sessions_per_process": 4,
    "max_processes": 2,
}


def test_a_description_is_read_whole() -> None:
    found = msgspec.convert(DESCRIBED, HostDescription)
    assert (found.num_tasks, found.reward_range) == ({"train": 3, "eval": 0}, (0.0, 1.0))


@pytest.mark.parametrize(
    "wrong", [{"num_tasks": {"train": 3}}, {"num_tasks": {"train": "3", "eval": 0}}, {"tools": [1]}, {"limits": None}]
)
def test_a_description_with_a_wrong_or_missing_part_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(DESCRIBED | wrong, HostDescription)


@pytest.mark.parametrize("given", [None, [], {"messages": "x"}, {"messages": [1]}, {"messages": [], "reward": "much"}])
def test_an_observation_of_another_shape_is_refused(given: JSON) -> None:
    with pytest.raises(BadFrame):
        wire.observation_from_json(given)


@pytest.mark.parametrize("given", [None, 1.0, [1.0], ["x", {}], [1.0, {"part": None}]])
def test_a_score_of_another_shape_is_refused(given: JSON) -> None:
    with pytest.raises(BadFrame):
        wire.score_from_json(given)


def test_a_failure_that_is_too_long_for_a_frame_is_still_answered() -> None:
    short = _shortened({"id": 7, "failed": ("act", "x")}, "act", "20 bytes")
    assert short == {"id": 7, "failed": ("act", "the answer is too long: 20 bytes")}


async def test_a_service_refuses_an_order_whose_bounds_are_no_numbers() -> None:
    class Interpreters:
        pass

    guest = Guest(asyncio.StreamReader(), None, Interpreters())  # type: ignore[arg-type]
    boot: JSON = {"ref": "a:B", "config": {}, "hosting": {"memory_mb": "much"}, "networks": None}
    with pytest.raises(ConnectionRefused, match="hosting"):
        guest._take({"boot": boot})
