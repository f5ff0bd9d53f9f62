"""Advantages against other projects' numbers, and what must hold for any group."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gspo_core import advantage as advantage_module
from gspo_core.advantage import (
    AdvantageError,
    advantages_of,
    batch_advantages,
    branch_weights,
    group_advantages,
    judge_group,
    observations,
    part_rewards,
    token_advantages,
    turn_advantages,
)
from gspo_core.objective_config import AdvantageConfig
from gspo_core.types import EpisodeKey, Group, Outcome, Segment, Split, StopReason, Trajectory

CASES = json.loads((Path(__file__).parent / "vectors" / "group_advantages.json").read_text())["cases"]
DEFAULT = AdvantageConfig()
NO_STD = AdvantageConfig(scale="none")
LEAVE_ONE_OUT = AdvantageConfig(baseline="leave_one_out", scale="none")

SETTINGS: dict[str, AdvantageConfig] = {
    "std ddof=1 eps=1e-6": DEFAULT,
    "no std (Dr.GRPO)": NO_STD,
    "leave-one-out no std": LEAVE_ONE_OUT,
    "std ddof=0 eps=1e-5": AdvantageConfig(ddof=0, eps=1e-5),
    "std ddof=1 eps=1e-4": AdvantageConfig(eps=1e-4),
    "trl_1.16.0 scale_rewards=group": AdvantageConfig(eps=1e-4),
    "trl_1.16.0 scale_rewards=none": NO_STD,
    "trl_1.16.0 scale_rewards=batch": AdvantageConfig(scale="batch_std", eps=1e-4),
    "verl grpo norm_by_std=True": DEFAULT,
    "verl grpo norm_by_std=False": NO_STD,
    "areal Normalization group/group biased std": AdvantageConfig(ddof=0, eps=1e-5),
    "areal Normalization group/group unbiased std": AdvantageConfig(eps=1e-5),
    "areal Normalization group/None": NO_STD,
    "areal Normalization group/batch unbiased std": AdvantageConfig(scale="batch_centered_std", eps=1e-5),
    "areal Normalization leave-one-out/None": LEAVE_ONE_OUT,
}
VECTORS = [(case["name"], source, key) for case in CASES for source in ("peers", "reference") for key in case[source]]


@pytest.mark.parametrize(("name", "source", "key"), VECTORS)
def test_vectors(name: str, source: str, key: str) -> None:
    case = next(case for case in CASES if case["name"] == name)
    rewards, size = case["rewards"], case["group_size"]
    ids = [f"group {position // size}" for position in range(len(rewards))]
    ours = batch_advantages(rewards, ids, SETTINGS[key]).advantages
    # AReaL and TRL compute in float32.
    tolerance = {"rel": 1e-6, "abs": 2e-7} if key[:4] in ("area", "trl_") else {"rel": 1e-9, "abs": 1e-12}
    assert ours == pytest.approx(case[source][key], **tolerance)


def test_vectors_cover_every_setting() -> None:
    assert {key for _, _, key in VECTORS} == set(SETTINGS)


# Groups


def by_id() -> None:
    """Groups of 3, 4 and 4 members in any order; no advantage is 100000."""
    rewards = [0.0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1]
    ids = ["a"] * 3 + ["b"] * 4 + ["c"] * 4
    order = np.random.default_rng(0).permutation(11)
    result = batch_advantages([rewards[i] for i in order], [ids[i] for i in order], DEFAULT)
    expected: dict[str, list[float]] = {}
    for group in "abc":
        members = [reward for reward, group_id in zip(rewards, ids, strict=True) if group_id == group]
        expected[group] = group_advantages(members, DEFAULT)
    flat = [*expected["a"], *expected["b"], *expected["c"]]
    assert result.advantages == pytest.approx([flat[i] for i in order])
    assert max(map(abs, result.advantages)) < 2
    assert [result.verdicts[group].zero_variance for group in "abc"] == [True, False, False]


def failures_have_no_reward() -> None:
    """A member without a reward leaves the baseline and the standard deviation alone."""
    for config in (DEFAULT, NO_STD, LEAVE_ONE_OUT, AdvantageConfig(ddof=0)):
        whole = group_advantages([1.0, 0.0, 0.25], config)
        ragged = group_advantages([1.0, None, 0.0, 0.25, None], config)
        assert ragged == [whole[0], 0.0, whole[1], whole[2], 0.0]
    verdict = judge_group([1.0, None, 0.0], DEFAULT)
    assert (verdict.ragged, verdict.num_members, verdict.num_rewards) == (True, 3, 2)
    assert batch_advantages([1.0, None, 0.0], [7, 7, 7], DEFAULT).kept == [True, False, True]


def singletons_teach_nothing() -> None:
    for config in (DEFAULT, NO_STD, LEAVE_ONE_OUT, AdvantageConfig(ddof=0)):
        assert group_advantages([0.7], config) == [0.0]
        assert group_advantages([None, 0.7, None], config) == [0.0, 0.0, 0.0]
        assert group_advantages([None], config) == [0.0]
        assert group_advantages([], config) == []
    assert judge_group([0.7], DEFAULT).too_small
    larger = AdvantageConfig(min_group_size=4)
    assert group_advantages([1.0, 0.0, 0.0], larger) == [0.0, 0.0, 0.0]
    assert group_advantages([1.0, 0.0, 0.0, 0.0], larger)[0] > 1


def zero_variance_is_exact() -> None:
    """Equal rewards whose floating mean is not one of them give exactly 0."""
    for size in (3, 6, 7, 10, 11):
        for reward in (0.1, 0.3, 0.7, 1e-17, 1 / 3):
            for config in (DEFAULT, NO_STD, LEAVE_ONE_OUT, AdvantageConfig(ddof=0, eps=1e-30)):
                assert group_advantages([reward] * size, config) == [0.0] * size
    assert judge_group([0.1] * 3, DEFAULT).zero_variance


def tiny_spread_can_be_bounded() -> None:
    rewards = [0.5, 0.5001, 0.4999, 0.5]
    assert group_advantages(rewards, DEFAULT)[1] == pytest.approx(1.21, abs=5e-3)
    assert group_advantages(rewards, AdvantageConfig(eps=1e-4))[1] == pytest.approx(0.55, abs=5e-3)
    assert group_advantages(rewards, AdvantageConfig(ddof=0, eps=1e-5))[1] == pytest.approx(1.24, abs=5e-3)
    assert group_advantages(rewards, NO_STD)[1] == pytest.approx(1e-4)
    bounded = AdvantageConfig(min_std=0.05)
    assert group_advantages(rewards, bounded)[1] == pytest.approx(1e-4 / 0.050001)
    assert judge_group(rewards, bounded).tiny_spread
    assert not judge_group([0.0, 1.0], bounded).tiny_spread
    assert group_advantages([0.0, 1.0], bounded) == group_advantages([0.0, 1.0], DEFAULT)


def uniform_groups_can_be_dropped() -> None:
    """Dynamic sampling: counted, out of the batch, and out of the batch's standard deviation."""
    rewards: list[float | None] = [1.0, 1.0, 0.0, 1.0, 1.0, None, 0.5]
    ids = [0, 0, 1, 1, 2, 2, 3]
    for scale in ("group_std", "batch_std"):
        drop = AdvantageConfig(zero_variance="drop", scale=scale)
        result = batch_advantages(rewards, ids, drop)
        assert result.kept == [False, False, True, True, True, False, True]
        metrics = result.metrics()
        assert (metrics["groups/dropped_zero_variance"], metrics["groups/zero_variance"]) == (1, 1)
        assert (metrics["groups/too_small"], metrics["groups/partial"], metrics["groups/complete"]) == (2, 1, 3)
        assert metrics["groups/total"] == 4
    kept = batch_advantages(rewards, ids, DEFAULT)
    assert kept.kept == [True, True, True, True, True, False, True]
    assert kept.metrics()["groups/dropped_zero_variance"] == 0
    raw = np.array([0.0, 1.0, 1.0, 0.5])
    assert result.advantages[3] == pytest.approx(0.5 / (raw.std(ddof=1) + 1e-6))


def members_may_come_in_any_order() -> None:
    """Permuting members permutes advantages; shifting rewards changes none."""
    rng = np.random.default_rng(1)
    for _ in range(50):
        size = int(rng.integers(2, 9))
        rewards = [None if rng.random() < 0.2 else float(reward) for reward in rng.normal(size=size)]
        order = rng.permutation(size)
        plain = group_advantages(rewards, DEFAULT)
        permuted = group_advantages([rewards[i] for i in order], DEFAULT)
        assert permuted == pytest.approx([plain[i] for i in order], abs=1e-12)
        shifted = group_advantages([None if r is None else r + 3 for r in rewards], DEFAULT)
        assert shifted == pytest.approx(plain, abs=1e-9)
        assert sum(plain) == pytest.approx(0, abs=1e-9)


PROPERTIES: list[Callable[[], None]] = [
    by_id,
    failures_have_no_reward,
    singletons_teach_nothing,
    zero_variance_is_exact,
    tiny_spread_can_be_bounded,
    uniform_groups_can_be_dropped,
    members_may_come_in_any_order,
]


@pytest.mark.parametrize("check", PROPERTIES, ids=lambda check: check.__name__)
def test_property(check: Callable[[], None]) -> None:
    check()


reward_lists = st.lists(st.none() | st.floats(-1e3, 1e3), min_size=0, max_size=9)


@settings(max_examples=60, derandomize=True, database=None)
@given(
    rewards=reward_lists,
    baseline=st.sampled_from(["mean", "leave_one_out"]),
    scale=st.sampled_from(["group_std", "none"]),
    ddof=st.sampled_from([0, 1]),
)
def test_any_group(rewards: list[float | None], baseline: Any, scale: Any, ddof: Any) -> None:
    """A literal transcription agrees; advantages are finite, sum to 0, and have the order of the rewards."""
    config = AdvantageConfig(baseline=baseline, scale=scale, **({"ddof": ddof} if scale != "none" else {}))
    known = [reward for reward in rewards if reward is not None]
    expected = []
    for reward in rewards:
        if reward is None or len(known) < 2 or max(known) == min(known):
            expected.append(0.0)
            continue
        mean = math.fsum(known) / len(known)
        std = math.sqrt(math.fsum((other - mean) ** 2 for other in known) / (len(known) - ddof))
        value = reward - mean
        if baseline == "leave_one_out":
            value = reward - (math.fsum(known) - reward) / (len(known) - 1)
        expected.append(value / (std + 1e-6) if scale == "group_std" else value)
    ours = group_advantages(rewards, config)
    assert ours == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert len(ours) == len(rewards)
    assert abs(math.fsum(ours)) <= 1e-9 * max([1.0, *map(abs, ours)]) * max(len(ours), 1)


# Mistakes that the properties must notice


def _by_position(rewards: Any, group_ids: Any, config: Any) -> Any:
    return advantage_module.BatchAdvantages(
        [value for i in range(0, len(rewards), 4) for value in group_advantages(rewards[i : i + 4], config)],
        [True] * len(rewards),
        {group: judge_group([1.0, 0.0], config) for group in group_ids},
    )


def _failures_are_zero(rewards: Any) -> Any:
    return np.array([0.0 if reward is None else reward for reward in rewards])


def _raw_reward_of_singletons(right: Any) -> Any:
    return lambda rewards, config: (
        np.array([reward or 0.0 for reward in rewards])
        if sum(reward is not None for reward in rewards) == 1
        else right(rewards, config)
    )


def _floating_zero_variance(right: Any) -> Any:
    def wrong(rewards: Any, config: Any) -> Any:
        known = np.array([reward for reward in rewards if reward is not None])
        return known - known.mean() if len(known) == len(rewards) > 1 else right(rewards, config)

    return wrong


def _no_minimum(right: Any) -> Any:
    return lambda std, config: std + config.eps


def _never_dropped(right: Any) -> Any:
    return lambda rewards, config, *_: right(rewards, config.model_copy(update={"zero_variance": "keep"}))


def _first_member_is_the_baseline(right: Any) -> Any:
    def wrong(rewards: Any, config: Any) -> Any:
        values = right(rewards, config)
        return values - values[0] if len(values) else values

    return wrong


MISTAKES: list[tuple[str, Callable[[], None], str, Callable[[Any], Any]]] = [
    ("groups by position", by_id, "batch_advantages", lambda right: _by_position),
    ("failures are zero", failures_have_no_reward, "_known", lambda right: _failures_are_zero),
    ("raw singleton", singletons_teach_nothing, "_centered", _raw_reward_of_singletons),
    ("floating zero variance", zero_variance_is_exact, "_centered", _floating_zero_variance),
    ("no minimum", tiny_spread_can_be_bounded, "_divisor", _no_minimum),
    ("never dropped", uniform_groups_can_be_dropped, "judge_group", _never_dropped),
    ("first as baseline", members_may_come_in_any_order, "_centered", _first_member_is_the_baseline),
]


@pytest.mark.parametrize(("name", "check", "attribute", "mutate"), MISTAKES)
def test_property_notices_the_mistake(name: str, check: Any, attribute: str, mutate: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        wrong = mutate(getattr(advantage_module, attribute))
        patch.setattr(advantage_module, attribute, wrong)
        if attribute in globals():
            patch.setitem(globals(), attribute, wrong)
        with pytest.raises((AssertionError, ValueError)):
            check()


def test_every_property_has_a_mistake_that_it_notices() -> None:
    assert {check for _, check, _, _ in MISTAKES} == set(PROPERTIES)


# Every key acts or is refused

CHANGES: dict[str, dict[str, Any]] = {
    "baseline": {"baseline": "leave_one_out"},
    "scale": {"scale": "batch_std"},
    "ddof": {"ddof": 0},
    "eps": {"eps": 0.1},
    "min_std": {"min_std": 5.0},
    "min_group_size": {"min_group_size": 4},
    "zero_variance": {"zero_variance": "drop"},
    "turn_reward_weight": {"turn_reward_weight": 0.5},
    "turn_discount": {"turn_reward_weight": 0.5, "turn_discount": 0.5},
    "turn_groups": {"turn_reward_weight": 0.5, "turn_groups": "observation"},
    "part_weights": {"part_weights": {"exact": 1.0, "form": 0.5}},
}


def everything(config: AdvantageConfig) -> Any:
    """All that the functions here say of two groups, one of them uniform."""
    rewards: list[float | None] = [1.0, 0.0, 0.3, None, 0.5, 0.5, 0.5]
    batch = batch_advantages(rewards, [0, 0, 0, 0, 1, 1, 1], config)
    turns = [[0.0, 1.0, 2.0], [0.5, None, 1.0], [0.2, 0.0], [None]]
    seen = [["a", "b", "c"], ["a", "c", "b"], ["a", "b"], ["a"]] if config.turn_groups == "observation" else None
    by_turn = turn_advantages(rewards[:4], turns, config, seen) if config.turn_reward_weight else None
    parts = [{"exact": 1.0, "form": 0.2}, {"exact": 0.0, "form": 0.4}, None]
    return batch.advantages, batch.kept, by_turn, part_rewards(parts, config)


@pytest.mark.parametrize("scale", ["group_std", "batch_std", "batch_centered_std", "none"])
@pytest.mark.parametrize("key", AdvantageConfig.model_fields)
def test_every_key_acts_or_is_refused(key: str, scale: str) -> None:
    of_turns = key in ("turn_discount", "turn_groups")
    before = {"scale": scale, "turn_reward_weight": 0.5} if of_turns else {"scale": scale}
    after = {**before, **CHANGES[key]}
    if key == "scale" and scale == "batch_std":
        after = {"scale": "none"}
    try:
        configs = [AdvantageConfig(**given) for given in (before, after)]
    except ValueError:
        assert scale == "none" or key.startswith(("turn", "part")), "only keys that cannot act are refused"
        return
    assert everything(configs[0]) != everything(configs[1])


# Parts of the reward


def test_parts_by_hand() -> None:
    """Correctness of 1, 0, 0 and a form of .9, .1, .2: as one reward the form hardly counts; by itself it does."""
    config = AdvantageConfig(scale="batch_std", part_weights={"right": 1.0, "form": 2.0}, ddof=0, eps=1e-12)
    parts = [{"right": 1.0, "form": 0.2}, {"right": 0.0, "form": 0.9}, None, {"right": 0.0, "form": 0.1}]
    right = np.array([2.0, -1.0, -1.0]) / math.sqrt(2.0)
    form = np.array([-0.2, 0.5, -0.3]) / math.sqrt((0.04 + 0.25 + 0.09) / 3)
    expected = right + 2 * form
    found = part_rewards(parts, config)
    assert found[2] is None
    np.testing.assert_allclose([value for value in found if value is not None], expected, rtol=1e-9)
    batch = batch_advantages(found, [0] * 4, config)
    np.testing.assert_allclose([batch.advantages[place] for place in (0, 1, 3)], expected / expected.std(), rtol=1e-9)


@pytest.mark.parametrize("scale", ["none", "batch_std"])
@pytest.mark.parametrize("size", [2, 5])
def test_with_parts_leave_one_out_is_the_factor_that_it_is_without_them(scale: str, size: int) -> None:
    """It counted twice: once for each part and once for their sum."""
    parts = [{"right": float(place == 0), "form": 0.1 * place} for place in range(size)]
    given = {"scale": scale, "part_weights": {"right": 1.0, "form": 0.3}}
    mean, without = (AdvantageConfig(**given, baseline=baseline) for baseline in ("mean", "leave_one_out"))
    assert part_rewards(parts, without) == part_rewards(parts, mean)
    found = [advantages_of([group_of(parts)], config).advantages for config in (mean, without)]
    np.testing.assert_allclose(found[1], size / (size - 1) * np.array(found[0]), rtol=1e-12)


@given(st.lists(st.floats(-5, 5), min_size=3, max_size=8), st.floats(0.01, 100), st.floats(-10, 10))
def test_the_unit_of_a_part_changes_nothing(values: list[float], unit: float, zero: float) -> None:
    config = AdvantageConfig(scale="batch_std", part_weights={"form": 1.0}, eps=0.0, min_std=1e-9)
    assume(np.std(values) > 1e-3)
    plain = part_rewards([{"form": value} for value in values], config)
    scaled = part_rewards([{"form": unit * value + zero} for value in values], config)
    np.testing.assert_allclose(np.array(scaled, float), np.array(plain, float), atol=1e-6)


def test_a_part_that_all_have_alike_teaches_nothing_and_one_that_nobody_has_is_0() -> None:
    config = AdvantageConfig(scale="batch_std", part_weights={"form": 1.0, "absent": 1.0})
    assert part_rewards([{"form": 0.3}, {"form": 0.3}], config) == [0.0, 0.0]


@pytest.mark.parametrize(
    "changes", [{"scale": "group_std"}, {"scale": "batch_centered_std"}, {"zero_variance": "drop"}]
)
def test_what_parts_cannot_stand_beside_is_named(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"part_weights: .*{next(iter(changes))}"):
        AdvantageConfig(**{"scale": "batch_std", "part_weights": {"form": 1.0}, **changes})


def group_of(parts: list[dict[str, float]]) -> Group:
    """Episodes of one token, with these parts of their rewards."""
    tokens = np.array([1], np.int32), np.array([True]), np.array([-1.0], np.float32)
    members = []
    for member, own in enumerate(parts):
        outcome = Outcome(StopReason.COMPLETED, sum(own.values()), own)
        key = EpisodeKey("job", 0, member)
        members.append(Trajectory((Segment(key, 0, 0, 0, 0, 1, 1.0, "engine", *tokens, outcome=outcome),)))
    return Group("job", 0, Split.TRAIN, 0, len(parts), tuple(members))


def test_episodes_of_a_group_are_compared_by_their_parts() -> None:
    group = group_of([{"right": 1.0, "form": 0.2}, {"right": 0.0, "form": 0.9}, {"right": 0.0, "form": 0.1}])
    config = AdvantageConfig(scale="batch_std", part_weights={"form": 1.0})
    found = advantages_of([group], config).advantages
    by_hand = part_rewards([{"form": 0.2}, {"form": 0.9}, {"form": 0.1}], config)
    assert found == batch_advantages(by_hand, [0] * 3, config).advantages
    assert np.argmax(found) == 1
    assert np.argmax(advantages_of([group], AdvantageConfig()).advantages) == 0


# Turns and branches


def test_turn_rewards_reach_the_turns_that_earned_them() -> None:
    config = AdvantageConfig(scale="none", turn_reward_weight=0.5)
    rewards = [1.0, 0.0, None]
    turns = [[0.0, 1.0, None], [0.0, 0.0], [9.0, 9.0]]
    first, second, failed = turn_advantages(rewards, turns, config)
    # Returns from each turn on: 1, 1, 0 against 0, 0; nobody else reached the third turn.
    assert first == [0.5 + 0.5 * 0.5, 0.5 + 0.5 * 0.5, 0.5]
    assert second == [-0.5 - 0.25, -0.5 - 0.25]
    assert failed == [0.0, 0.0]
    halved = turn_advantages(rewards, turns, config.model_copy(update={"turn_discount": 0.5}))
    assert halved[0] == [0.5 + 0.5 * 0.25, 0.5 + 0.5 * 0.5, 0.5]


def test_a_turn_is_compared_with_the_members_that_reached_it() -> None:
    """A member that had already ended has no return there, not a return of 0."""
    config = AdvantageConfig(scale="none", turn_reward_weight=1.0)
    alone, ended = turn_advantages([0.5, 0.5], [[0.0, 0.0, 1.0], [0.0, 1.0]], config)
    assert (alone, ended) == ([0.0, 0.0, 0.0], [0.0, 0.0])
    rewards, turns = [0.5, 0.5, 0.5], [[0.0, 0.5], [0.0, 1.0], [0.75]]
    first, second, short = turn_advantages(rewards, turns, config)
    assert (first[1], second[1]) == (-0.25, 0.25)
    assert (first[0], second[0], short[0]) == (-0.25, 0.25, 0.0)


def test_turns_are_compared_with_those_that_read_the_same() -> None:
    """The second member comes to the door a turn later than the first, and again: three turns at one door."""
    config = AdvantageConfig(scale="none", turn_reward_weight=1.0, turn_groups="observation")
    turns = [[0.0, 3.0], [0.0, 0.0, 1.0, 2.0]]
    seen = [["start", "door"], ["start", "hall", "door", "door"]]
    returns = [[3.0, 3.0], [3.0, 3.0, 3.0, 2.0]]
    door = (3.0 + 3.0 + 2.0) / 3
    assert turn_advantages([0.0, 0.0], turns, config, seen) == [
        [0.0, pytest.approx(returns[0][1] - door)],
        [0.0, 0.0, pytest.approx(returns[1][2] - door), pytest.approx(returns[1][3] - door)],
    ]


def test_an_observation_is_what_was_read_before_the_first_sampled_token() -> None:
    def segment(index: int, turn: int, ids: list[int], sampled: list[bool], **more: Any) -> Segment:
        tokens = np.array(ids, np.int32), np.array(sampled), np.where(sampled, -1.0, 0.0).astype(np.float32)
        return Segment(EpisodeKey("job", 0, 0), 0, 0, index, turn, 1, 1.0, "engine", *tokens, **more)

    outcome = Outcome(StopReason.COMPLETED, 1.0, {})
    episode = Trajectory(
        (
            segment(0, 0, [1, 2, 7], [False, False, True]),
            segment(1, 0, [8], [True]),
            segment(2, 1, [3], [False]),
            segment(3, 1, [4, 9, 5], [False, True, False], outcome=outcome),
        )
    )
    assert observations(episode) == [np.array(one, np.int32).tobytes() for one in ([1, 2], [3, 4])]


@pytest.mark.parametrize("changes", [{}, {"turn_reward_weight": 1.0, "zero_variance": "drop"}])
def test_comparing_by_observations_is_refused_where_it_cannot_act(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="turn_groups: "):
        AdvantageConfig(turn_groups="observation", **changes)


def test_without_turn_rewards_every_turn_has_the_episodes_advantage() -> None:
    rewards = [1.0, 0.0, 0.5]
    turns: list[list[float | None]] = [[None], [None, None], [None, None, None]]
    expected = [[value] * len(t) for value, t in zip(group_advantages(rewards, DEFAULT), turns, strict=True)]
    assert turn_advantages(rewards, turns, DEFAULT) == expected
    weighted = AdvantageConfig(turn_reward_weight=2.0)
    assert turn_advantages(rewards, turns, weighted) == expected


def test_numbers_of_turns_by_hand() -> None:
    """Three members, two turns, computed on paper: mean and sample deviation of the returns at each turn."""
    config = AdvantageConfig(turn_reward_weight=0.5, turn_discount=0.5, eps=0.0, min_std=1e-9)
    # Rewards 3, 1, 2: mean 2, deviation 1. Returns from turn 0: 1 + 0.5 * 2 = 2, 0 + 0.5 * 0 = 0, 1 + 0 = 1: mean 1,
    # deviation 1. From turn 1: 2 and 0: mean 1, deviation sqrt(2), so +-1/sqrt(2); the third had ended.
    found = batch_advantages([3.0, 1.0, 2.0], ["g"] * 3, config, [[1.0, 2.0], [None, None], [1.0]])
    root = 0.5 / 2**0.5
    assert found.by_turn is not None
    for values, expected in zip(found.by_turn, [[1.5, 1 + root], [-1.5, -1 - root], [0.0]], strict=True):
        assert values == pytest.approx(expected, abs=1e-15)
    assert found.advantages == [1.0, -1.0, 0.0]


Members = list[tuple[float | None, list[float | None]]]
paid = st.integers(-8, 8).map(lambda eighths: eighths / 8)
members_of_groups = st.lists(
    st.lists(st.tuples(st.none() | paid, st.lists(st.none() | paid, min_size=1, max_size=4)), min_size=1, max_size=5),
    min_size=1,
    max_size=3,
)


def _flat(groups: list[Members]) -> tuple[list[float | None], list[int], list[list[float | None]]]:
    rows = [(reward, place, turns) for place, group in enumerate(groups) for reward, turns in group]
    return [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]


@given(members_of_groups, st.sampled_from(["group_std", "none"]), st.sampled_from(["keep", "drop"]))
def test_a_weight_of_0_is_as_if_turns_had_no_rewards(groups: list[Members], scale: str, zero_variance: str) -> None:
    rewards, ids, turns = _flat(groups)
    config = AdvantageConfig.model_validate({"scale": scale, "zero_variance": zero_variance})
    assert batch_advantages(rewards, ids, config, turns) == batch_advantages(rewards, ids, config)


@given(members_of_groups, st.integers(-4, 4), st.randoms())
def test_what_every_turn_is_paid_alike_changes_nothing(groups: list[Members], more: int, rng: random.Random) -> None:
    """Nor does the order of the members, nor another group beside theirs."""
    rewards, ids, turns = _flat([[(reward, [*paid, *[0.0] * (4 - len(paid))]) for reward, paid in g] for g in groups])
    config = AdvantageConfig(scale="none", turn_reward_weight=0.5)
    before = batch_advantages(rewards, ids, config, turns).by_turn
    raised = [[(reward or 0.0) + more for reward in row] for row in turns]
    after = batch_advantages(rewards, ids, config, raised).by_turn
    assert before is not None
    assert after is not None
    assert np.allclose(before, after, atol=1e-12)
    order = rng.sample(range(len(rewards)), len(rewards))
    again = [rewards[place] for place in order], [ids[place] for place in order]
    moved = batch_advantages(*again, config, [turns[place] for place in order])
    assert moved.by_turn is not None
    assert np.allclose(moved.by_turn, [before[place] for place in order], atol=1e-12)
    first = [place for place, group in enumerate(ids) if group == ids[0]]
    alone = turn_advantages([rewards[place] for place in first], [turns[place] for place in first], config)
    assert alone == [before[place] for place in first]
    for place, reward in enumerate(rewards):
        assert reward is not None or not any(before[place]), "without a reward there is nothing to learn"


def test_a_group_of_equal_rewards_is_kept_for_its_turns() -> None:
    config = AdvantageConfig(zero_variance="drop", turn_reward_weight=1.0)
    turns = [[1.0, 0.0], [0.0, 1.0]]
    found = batch_advantages([1.0, 1.0], ["g"] * 2, config, turns)
    assert found.kept == [True, True]
    assert found.by_turn is not None
    assert found.by_turn[0][1] < 0 < found.by_turn[1][1]
    assert judge_group([1.0, 1.0], config, turns).zero_variance
    assert batch_advantages([1.0, 1.0], ["g"] * 2, config, [[0.5, 0.5], [0.5, 0.5]]).kept == [False, False]
    plain = AdvantageConfig(zero_variance="drop")
    assert batch_advantages([1.0, 1.0], ["g"] * 2, plain, turns).kept == [False, False]


def test_tokens_get_their_turns_advantage() -> None:
    turn_ids = np.array([0, 0, 0, 1, 1, 2], dtype=np.int32)
    mask = np.array([0, 1, 1, 0, 1, 0], dtype=bool)
    values = token_advantages([0.5, -1.0, 3.0], turn_ids, mask)
    assert values.dtype == np.float32
    assert values.tolist() == [0, 0.5, 0.5, 0, -1, 0]
    with pytest.raises(AdvantageError, match="advantages for 1 turns"):
        token_advantages([0.5], turn_ids, mask)


def test_branches_share_one_weight_by_their_tokens() -> None:
    assert branch_weights([6, 2]) == [0.75, 0.25]
    assert branch_weights([5]) == [1.0]
    assert branch_weights([0, 0]) == [0.5, 0.5]
    assert sum(branch_weights([3, 7, 11, 1])) == pytest.approx(1)
    for bad in ([], [-1, 2]):
        with pytest.raises(AdvantageError):
            branch_weights(bad)


# Refusals


def test_refusals() -> None:
    for bad in (math.nan, math.inf):
        with pytest.raises(AdvantageError, match="finite"):
            group_advantages([1.0, bad], DEFAULT)
        with pytest.raises(AdvantageError, match="finite"):
            turn_advantages([1.0, 0.0], [[bad], [0.0]], DEFAULT)
    with pytest.raises(AdvantageError, match="whole batch"):
        group_advantages([1.0, 0.0], AdvantageConfig(scale="batch_std"))
    with pytest.raises(AdvantageError, match="group ids"):
        batch_advantages([1.0, 0.0], ["a"], DEFAULT)
    with pytest.raises(AdvantageError, match="turns of"):
        turn_advantages([1.0, 0.0], [[1.0]], DEFAULT)
