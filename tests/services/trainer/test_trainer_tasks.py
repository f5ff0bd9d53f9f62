from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.groups.tasks import (
    FIRST_EVAL_GROUP,
    Task,
    TaskSchedule,
    environment_of,
    evaluation_group,
    evaluation_tasks,
)


@given(seed=st.integers(0, 2**32), num_tasks=st.integers(1, 40), laps=st.integers(1, 3))
def test_one_environment_plays_every_task_once_per_lap(seed: int, num_tasks: int, laps: int) -> None:
    schedule = TaskSchedule(seed, [num_tasks], [1.0])
    for lap in range(laps):
        played = [schedule.task(lap * num_tasks + position).index for position in range(num_tasks)]
        assert sorted(played) == list(range(num_tasks))


@given(seed=st.integers(0, 2**32), groups=st.lists(st.integers(0, 60), min_size=1, max_size=20))
def test_the_task_of_a_group_does_not_depend_on_the_order_of_asking(seed: int, groups: list[int]) -> None:
    forwards = TaskSchedule(seed, [7, 5], [2.0, 1.0])
    expected = [forwards.task(group) for group in range(61)]
    asked_at_random = TaskSchedule(seed, [7, 5], [2.0, 1.0])
    assert [asked_at_random.task(group) for group in groups] == [expected[group] for group in groups]


def test_laps_are_shuffled_differently_and_seeds_too() -> None:
    schedule = TaskSchedule(3, [50], [1.0])
    first, second = ([schedule.task(lap * 50 + i).index for i in range(50)] for lap in range(2))
    other = [TaskSchedule(4, [50], [1.0]).task(i).index for i in range(50)]
    assert first != second
    assert first != other
    assert first != sorted(first)


def test_environments_share_groups_by_weight() -> None:
    schedule = TaskSchedule(0, [10, 10, 10], [5.0, 3.0, 2.0])
    shares = Counter(schedule.task(group).environment for group in range(1000))
    assert shares == {0: 500, 1: 300, 2: 200}


@pytest.mark.parametrize(("num_tasks", "weights"), [([], []), ([0], [1.0]), ([3], [0.0]), ([3, 4], [1.0])])
def test_unusable_environments_are_refused(num_tasks: list[int], weights: list[float]) -> None:
    with pytest.raises(ValueError, match="every environment needs tasks"):
        TaskSchedule(0, num_tasks, weights)


def test_evaluation_takes_the_first_held_out_tasks_of_each_environment_in_turn() -> None:
    assert evaluation_tasks([2, 4], 5) == [Task(0, 0), Task(1, 0), Task(0, 1), Task(1, 1), Task(1, 2)]
    assert evaluation_tasks([2, 1], 100) == [Task(0, 0), Task(1, 0), Task(0, 1)]


def test_evaluation_groups_never_collide() -> None:
    groups = [
        evaluation_group(epoch, round_number, 4, position)
        for epoch in range(3)
        for round_number in range(5)
        for position in range(4)
    ]
    assert len(set(groups)) == len(groups)
    assert min(groups) >= FIRST_EVAL_GROUP


def test_every_group_is_traced_to_its_environment() -> None:
    schedule, held_out = TaskSchedule(3, [5, 2], [1.0, 2.0]), evaluation_tasks([3, 2], 4)
    assert [environment_of(group, schedule, held_out) for group in range(6)] == [
        schedule.task(group).environment for group in range(6)
    ]
    for epoch, round_number in ((1, 0), (7, 12)):
        groups = [evaluation_group(epoch, round_number, len(held_out), place) for place in range(len(held_out))]
        assert [environment_of(one, schedule, held_out) for one in groups] == [one.environment for one in held_out]
