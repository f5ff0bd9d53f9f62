"""A clip that is as wide as earlier steps spread sequences: by its rule, in training, and from states."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from gspo_core.batch import TrainSequence
from gspo_core.learner import Learner, state
from gspo_core.learner_config import OptimizerConfig
from gspo_core.objective import AlarmKind, SpreadMemory, widened_clip
from gspo_core.objective.clip_spread import MEMORY_STEPS
from gspo_core.objective_config import MAX_SPREAD_CLIP_LOW, ObjectiveConfig
from tests.core.learner_support import (
    largest_difference,
    make_learner,
    make_sequences,
    weights,
    with_behavior,
    write_model,
)

PAPER = {"minibatches": 3, "clip": [3e-4, 4e-4], "k3_gate": None, "outlier_gate": None, "off_policy_gate": None}
WIDENING = ObjectiveConfig(**PAPER, clip_spread=5.0)
OPTIMIZER = OptimizerConfig(lr=1e-4)
SPREAD, LOW, HIGH = "gspo/log_ratio_std", "gspo/clip_low", "gspo/clip_high"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen3") / "model")


def learner_of(model_dir: Path, objective: ObjectiveConfig = WIDENING) -> Learner:
    return make_learner(model_dir, objective, optimizer=OPTIMIZER)


def batch(learner: Learner, seed: int = 0) -> list[TrainSequence]:
    sequences = make_sequences(seed=seed)
    with_behavior(learner, sequences)
    return sequences


def remembered(spreads: Sequence[float]) -> float | None:
    memory = SpreadMemory()
    for spread in spreads:
        memory = memory.after(spread)
    return memory.mean


# The rule


@given(
    low=st.floats(1e-5, 0.19),
    high=st.floats(1e-5, 10),
    spread=st.floats(0, 10),
    times=st.floats(0.1, 20),
)
def test_the_lower_side_is_so_many_spreads_and_the_upper_one_grows_alike(
    low: float, high: float, spread: float, times: float
) -> None:
    config = ObjectiveConfig(clip_low=low, clip_high=high, clip_spread=times)
    wide = widened_clip(config, spread)
    assert wide.clip_low == max(low, min(MAX_SPREAD_CLIP_LOW, times * spread))
    assert wide.clip_high / wide.clip_low == pytest.approx(high / low)
    assert wide == config.model_copy(update={"clip_low": wide.clip_low, "clip_high": wide.clip_high})
    if times * spread <= low:
        assert wide == config


def test_without_the_key_or_before_the_first_step_the_clip_is_the_configured_one() -> None:
    assert widened_clip(ObjectiveConfig(), 0.1) == ObjectiveConfig()
    assert widened_clip(WIDENING, None) == WIDENING


@given(st.lists(st.floats(0, 10), min_size=1, max_size=60))
def test_the_mean_weighs_each_step_a_tenth_less_than_the_next(spreads: list[float]) -> None:
    shares = [(1 - 1 / MEMORY_STEPS) ** age for age in range(len(spreads))][::-1]
    mean = sum(share * spread for share, spread in zip(shares, spreads, strict=True)) / sum(shares)
    assert remembered(spreads) == pytest.approx(mean)


@pytest.mark.parametrize("unmeasured", [None, math.nan, math.inf])
def test_what_could_not_be_measured_changes_nothing(unmeasured: float | None) -> None:
    assert SpreadMemory().after(unmeasured) == SpreadMemory()
    assert SpreadMemory().after(0.5).after(unmeasured) == SpreadMemory().after(0.5)


# In training


def test_each_step_has_the_width_that_the_steps_before_it_say(model_dir: Path) -> None:
    learner = learner_of(model_dir)
    found = [learner.step(batch(learner, seed)) for seed in range(4)]
    assert (found[0][LOW], found[0][HIGH]) == (3e-4, 4e-4)
    for number, metrics in enumerate(found[1:], 1):
        expected = widened_clip(WIDENING, remembered([one[SPREAD] for one in found[:number]]))
        assert (metrics[LOW], metrics[HIGH]) == (expected.clip_low, expected.clip_high)
        assert metrics[LOW] > 1e-3
    assert all(one[LOW] != other[LOW] for one, other in pairwise(found))


def test_a_step_computes_what_that_clip_computes(model_dir: Path) -> None:
    """Bit for bit; and the next one would be another with the clip as it was written."""
    follows, told, kept = (learner_of(model_dir) for _ in range(3))
    plain = ObjectiveConfig(**PAPER)
    for learner in (told, kept):
        learner.retune(learner.config, plain)
    sequences = batch(follows)
    for learner in (follows, told, kept):
        learner.step(sequences)
    found = follows.step(sequences)
    told.retune(told.config, plain.model_copy(update={"clip_low": found[LOW], "clip_high": found[HIGH]}))
    same = told.step(sequences)
    assert same == {name: value for name, value in found.items() if name not in (LOW, HIGH)}
    assert largest_difference(weights(told), weights(follows)) == 0
    assert kept.step(sequences)["gspo/clip_frac"] > 2 * found["gspo/clip_frac"]


def test_the_alarm_of_a_narrow_clip_is_about_the_clip_of_its_step(model_dir: Path) -> None:
    learner = learner_of(model_dir)
    kinds = []
    for seed in range(2):
        learner.step(batch(learner, seed))
        kinds.append({alarm.kind for alarm in learner.alarms})
    assert AlarmKind.OVER_CLIP in kinds[0] - kinds[1]


@pytest.mark.parametrize("kind", ["nothing teaches", "nothing moves"])
def test_a_step_that_spreads_nothing_leaves_the_width_as_it_was(kind: str, model_dir: Path) -> None:
    learner = learner_of(model_dir)
    learner.step(batch(learner))
    sequences = batch(learner, 1)
    if kind == "nothing teaches":
        sequences = [dataclasses.replace(one, advantages=0.0) for one in sequences]
    else:
        still = OPTIMIZER.model_copy(update={"lr": 0.0})
        learner.retune(learner.config.model_copy(update={"optimizer": still}), WIDENING)
    idle = learner.step(sequences)
    assert idle.get(SPREAD, 0.0) < 1e-6
    assert learner.step(batch(learner, 2))[LOW] == idle[LOW] > 1e-3


def test_what_was_turned_off_begins_anew(model_dir: Path) -> None:
    learner = learner_of(model_dir)
    assert LOW in learner.step(batch(learner))
    learner.retune(learner.config, ObjectiveConfig(**PAPER))
    assert LOW not in learner.step(batch(learner, 1))
    learner.retune(learner.config, WIDENING)
    assert learner.step(batch(learner, 2))[LOW] == 3e-4


# In states


def test_a_run_that_is_interrupted_or_goes_back_goes_on_bit_for_bit(model_dir: Path, tmp_path: Path) -> None:
    whole = learner_of(model_dir)
    batches = [batch(whole, seed) for seed in range(4)]
    for sequences in batches[:2]:
        whole.step(sequences)
    whole.save_state(tmp_path / "state")
    expected = [whole.step(sequences) for sequences in batches[2:]]
    end = weights(whole)
    resumed = learner_of(model_dir)
    for learner in (resumed, whole):  # the second goes back
        learner.load_state(tmp_path / "state")
        assert [learner.step(sequences) for sequences in batches[2:]] == expected
        assert largest_difference(weights(learner), end) == 0


def test_a_state_without_the_mean_loads_and_begins_anew(model_dir: Path, tmp_path: Path) -> None:
    """Those of earlier releases and of jobs without the key; what these write has no place for it."""
    plain: dict[str, Any] = {**PAPER, "clip": [1e-3, 2e-3]}
    other = learner_of(model_dir, ObjectiveConfig(**plain))
    other.step(batch(other))
    other.save_state(tmp_path / "state")
    assert state.LOG_RATIO_STD not in load_file(tmp_path / "state" / state.shard_name(0))
    learner = learner_of(model_dir, ObjectiveConfig(**plain, clip_spread=5.0))
    learner.step(batch(learner))
    learner.load_state(tmp_path / "state")
    assert learner.step(batch(learner, 1))[LOW] == 1e-3


def test_a_job_without_the_key_does_not_need_the_mean(model_dir: Path, tmp_path: Path) -> None:
    """As a fork may be that turns it off."""
    learner = learner_of(model_dir)
    sequences = batch(learner)
    learner.step(sequences)
    learner.save_state(tmp_path / "state")
    total, weight = load_file(tmp_path / "state" / state.shard_name(0))[state.LOG_RATIO_STD].tolist()
    assert (total > 0, weight) == (True, 1.0)
    plain = learner_of(model_dir, ObjectiveConfig(**PAPER))
    plain.load_state(tmp_path / "state")
    plain.step(sequences)
    plain.save_state(tmp_path / "later")
    assert state.LOG_RATIO_STD not in load_file(tmp_path / "later" / state.shard_name(0))
