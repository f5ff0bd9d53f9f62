"""The slowest members of a group: waited for, or cut off; and what cutting them off does to what is trained."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from gspo_core.spec import JobSpec
from services.state.queue import Bus, Fenced
from services.state.store import Claim, Store
from services.trainer.groups.selection import groups_to_close
from services.trainer.groups.selection_bias import SelectionBias
from tests.services.trainer.groups_kit import Stage
from tests.services.trainer.trainer_kit import stop


@pytest.fixture
async def stage(
    claim: Claim, store: Store, bus: Bus, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[Stage]:
    on_stragglers, _, zero_variance = request.param.partition(", zero_variance ")
    stage = Stage(claim, store, bus, tmp_path, {"on_stragglers": on_stragglers}, zero_variance or "keep")
    await stage.begin()
    reading = asyncio.create_task(stage.intake.run())
    yield stage
    await stop(reading)


@pytest.mark.parametrize("stage", ["cancel"], indirect=True)
async def test_a_straggler_is_cut_off_when_the_batch_waits_for_it_alone(stage: Stage) -> None:
    await stage.play(0, 0, 1.0, 1)
    await stage.play(0, 2, 0.0, 2)
    await stage.play(0, 1, 1.0, 9, upto=5)
    (group,) = await stage.take()
    assert [trajectory.key.member for trajectory in group] == [0, 2]
    with pytest.raises(Fenced):
        await stage.play(0, 1, 1.0, 9)
    metrics = stage.run._batches.take_metrics()
    assert metrics["selection/dispatched"] == 3
    assert metrics["selection/cut_off"] == 1
    assert metrics["selection/trained_share"] == pytest.approx(2 / 3)
    assert metrics["selection/actions_trained"] == pytest.approx((3 + 6) / 2)
    assert metrics["selection/actions_dispatched"] == pytest.approx((3 + 6 + 15) / 3)
    assert metrics["selection/reward_trained"] == 0.5
    # Of the other group nobody has ended: it is left alone.
    ((other,),) = [await stage.bus.groups(stage.claim.job_id)]
    assert (other.group, other.is_ready) == (1, False)


@pytest.mark.parametrize("stage", ["cancel, zero_variance drop"], indirect=True)
async def test_nobody_is_cut_off_from_a_group_that_would_teach_nothing_without_it(stage: Stage) -> None:
    for group in (0, 1):
        await stage.play(group, 0, 1.0, 1)
        await stage.play(group, 2, float(group == 0), 2)
        await stage.play(group, 1, 0.0, 9, upto=5)
    (trained,) = await stage.take()
    assert trained.group == 1
    metrics = stage.run._batches.take_metrics()
    assert (metrics["selection/dispatched"], metrics["selection/cut_off"]) == (3, 1)
    ((waiting,),) = [await stage.bus.groups(stage.claim.job_id)]
    assert (waiting.group, waiting.is_ready) == (0, False)


@pytest.mark.parametrize("stage", ["wait"], indirect=True)
async def test_without_being_told_to_it_waits_for_the_straggler(stage: Stage) -> None:
    await stage.play(0, 0, 1.0, 1)
    await stage.play(0, 2, 0.0, 2)
    taking = asyncio.create_task(stage.take())
    await asyncio.wait({taking}, timeout=0.5)
    assert not taking.done()
    await stage.play(0, 1, 1.0, 9)
    (group,) = await taking
    assert len(group.trajectories) == 3
    metrics = stage.run._batches.take_metrics()
    assert metrics["selection/actions_trained"] == metrics["selection/actions_dispatched"] == (3 + 6 + 27) / 3


@pytest.mark.parametrize("stage", ["cancel"], indirect=True)
async def test_nobody_is_cut_off_while_a_batch_is_there(stage: Stage) -> None:
    for member in range(3):
        await stage.play(1, member, float(member), 1)
    await stage.play(0, 0, 1.0, 1)
    await stage.play(0, 1, 0.0, 1)
    await stage.play(0, 2, 0.0, 9, upto=2)
    (group,) = await stage.take()
    assert group.group == 1
    stage.run._lineage.step = 1
    await stage.play(0, 2, 0.0, 9)
    (group,) = await stage.take()
    assert len(group.trajectories) == 3


@pytest.mark.parametrize("stage", ["cancel"], indirect=True)
async def test_dropped_groups_count_as_dispatched_and_not_as_trained(stage: Stage) -> None:
    for member in range(3):
        await stage.play(0, member, 1.0, 4)
        await stage.play(1, member, float(member), 2)
    await stage.take()
    await stage.run._batches.drop(1, "dropped_stale")
    metrics = stage.run._batches.take_metrics()
    assert metrics["selection/trained_share"] == 0.5
    assert (metrics["selection/actions_trained"], metrics["selection/actions_dispatched"]) == (12.0, 9.0)
    assert stage.run._batches.take_metrics()["selection/dispatched"] == 0


def test_the_oldest_groups_with_members_enough_are_closed_and_no_more_than_the_batch_lacks() -> None:
    counts = {5: 3, 2: 2, 9: 1, 3: 4}
    assert groups_to_close(counts, min_group_size=2, num_missing=2) == [2, 3]
    assert groups_to_close(counts, min_group_size=4, num_missing=2) == [3]
    assert groups_to_close(counts, min_group_size=2, num_missing=-1) == []


def test_a_census_of_nothing_is_no_division_by_zero() -> None:
    assert SelectionBias(cast(Any, None), "j").take_metrics()["selection/trained_share"] == 0.0


def test_stragglers_can_only_be_cut_off_where_fewer_members_are_enough() -> None:
    job = {"model": "m", "environments": [{"ref": "a:B"}]}
    with pytest.raises(ValueError, match="min_viable:k with fewer members"):
        JobSpec.model_validate(job | {"rollout": {"on_stragglers": "cancel"}})
