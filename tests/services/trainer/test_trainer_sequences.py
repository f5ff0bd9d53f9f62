from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gspo_core import advantage
from gspo_core.advantage import BatchAdvantages
from gspo_core.log.changes import with_reward
from gspo_core.log.sequences import MAX_OTHER_PARTS, group_metrics, staleness_metrics, train_batch
from gspo_core.objective_config import AdvantageConfig
from gspo_core.types import Group, Segment, Split, Trajectory
from tests.services.trainer.trainer_kit import episode, group


def ages(versions: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.asarray(9 - versions, dtype=np.int32)


def with_metrics(segment: Segment, metrics: dict[str, float]) -> Segment:
    fields = {name: value for name, value in vars(segment).items() if name not in ("num_actions", "logprob_sum")}
    assert segment.outcome is not None
    return Segment(**fields | {"outcome": replace(segment.outcome, metrics=metrics)})


def test_an_episode_without_a_reward_is_left_out_of_batch_and_baseline() -> None:
    batch = train_batch([group(0, [1.0, 0.0, None, 1.0])], ages, AdvantageConfig(scale="none"))
    sequences, metrics = batch.sequences, batch.metrics
    assert [one.advantages for one in sequences] == pytest.approx([1 / 3, -2 / 3, 1 / 3])
    assert metrics["groups/partial"] == 1


def test_values_of_sequences_find_back_to_their_episodes() -> None:
    groups = [group(0, [1.0, None, 0.0], versions=[3, 7]), group(1, [1.0, 0.0])]
    batch = train_batch(groups, ages, AdvantageConfig())
    sequences = batch.sequences
    values = [np.full(one.num_actions, place, np.float32) for place, one in enumerate(sequences)]
    found = batch.by_episode(values)
    assert {(key.group, key.member): one.tolist() for key, one in found.items()} == {
        (0, 0): [0.0] * 6,
        (0, 2): [1.0] * 6,
        (1, 0): [2.0] * 6,
        (1, 1): [3.0] * 6,
    }


def test_each_token_keeps_the_staleness_of_the_version_that_sampled_it() -> None:
    first, _ = train_batch([group(0, [1.0, 0.0], versions=[3, 7])], ages, AdvantageConfig()).sequences
    assert first.staleness[first.action_mask].tolist() == [6, 6, 6, 2, 2, 2]
    assert first.behavior_logprobs[first.action_mask].tolist() == [-0.5] * 3 + [-1.5] * 3
    assert staleness_metrics([first], cap=4) == {
        "tokens/trained": 3.0,
        "staleness/mean": 4.0,
        "staleness/max": 6.0,
        "staleness/beyond_cap_frac": 0.5,
    }


def test_advantages_are_compared_within_a_group_only() -> None:
    groups = [group(0, [1.0, 0.0]), group(5, [10.0, 9.0])]
    sequences = train_batch(groups, ages, AdvantageConfig(scale="none")).sequences
    assert [one.advantages for one in sequences] == pytest.approx([0.5, -0.5, 0.5, -0.5])


def test_turn_rewards_give_turns_advantages_of_their_own() -> None:
    members = (episode(0, 0, 1.0, [0, 0], [1.0, None]), episode(0, 1, 1.0, [0, 0], [0.0, None]))
    one_group = Group("job_a", 0, Split.TRAIN, 0, 2, members)
    config = AdvantageConfig(scale="none", turn_reward_weight=1.0)
    sequences = train_batch([one_group], ages, config).sequences
    values = sequences[0].advantages[sequences[0].action_mask]  # type: ignore[index]
    assert values.tolist() == pytest.approx([0.5] * 3 + [0.0] * 3)


def test_metrics_say_how_many_episodes_went_on_under_new_weights() -> None:
    metrics = group_metrics([group(0, [1.0, 0.0], versions=[3, 4]), group(1, [1.0, None], versions=[4, 4])])
    assert metrics["episodes/mixed_versions_share"] == 0.5
    assert metrics["reward/mean"] == pytest.approx(2 / 3)
    assert metrics["stop/env_error"] == 1
    assert metrics["episodes/turns_mean"] == 2
    assert (metrics["episodes/lost_share"], metrics["episodes/lost_share_worst_group"]) == (0.25, 0.5)
    assert (metrics["episodes/lost_turns_mean"], metrics["episodes/again_share"]) == (2, 0)
    assert not any(name.startswith("time/") for name in metrics)


def test_metrics_say_where_the_time_of_an_episode_went() -> None:
    told = group(0, [1.0, 0.0, None])
    times = ({"model_s": 3.0, "env_s": 1.0, "queue_s": 0.5}, {"model_s": 1.0, "env_s": 0.0}, {})
    told = replace(
        told,
        trajectories=tuple(
            Trajectory((*one.segments[:-1], with_metrics(one.segments[-1], metrics)))
            for one, metrics in zip(told, times, strict=True)
        ),
    )
    found = {name: value for name, value in group_metrics([told]).items() if name.startswith("time/")}
    assert found == {"time/episode_engine_s": 2.0, "time/episode_env_s": 0.5, "time/episode_queue_s": 0.25}


def test_advantages_are_computed_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, compute = list[int](), advantage.batch_advantages

    def counted(rewards: Sequence[float | None], *rest: Any) -> BatchAdvantages:
        calls.append(len(rewards))
        return compute(rewards, *rest)

    monkeypatch.setattr(advantage, "batch_advantages", counted)
    batch = train_batch([group(0, [1.0, None, 0.0])], ages, AdvantageConfig())
    found = batch.by_episode([np.zeros(one.num_actions, np.float32) for one in batch.sequences])
    assert [key.member for key in found] == [0, 2]
    assert calls == [3]


def untrained(trajectory: Trajectory, *turns: int) -> Trajectory:
    *before, last = trajectory.segments
    fields = {name: value for name, value in vars(last).items() if name not in ("num_actions", "logprob_sum")}
    return Trajectory((*before, Segment(**fields | {"untrained_turns": turns})))


def test_what_nobody_ever_had_is_read_and_not_trained() -> None:
    whole = group(0, [1.0, 0.0], versions=[3, 7])
    turns = [segment.turn for segment in whole.trajectories[0].segments]
    first = untrained(whole.trajectories[0], turns[-1])
    batch = train_batch([replace(whole, trajectories=(first, whole.trajectories[1]))], ages, AdvantageConfig())
    kept = sum(segment.num_actions for segment in first.segments if segment.turn != turns[-1])
    assert [one.num_actions for one in batch.sequences] == [kept, 6]
    assert batch.sequences[0].token_ids.tolist() == batch.sequences[1].token_ids.tolist()
    assert not batch.sequences[0].behavior_logprobs[~batch.sequences[0].action_mask].any()
    values = [np.full(one.num_actions, place, np.float32) for place, one in enumerate(batch.sequences)]
    assert [len(one) for one in batch.by_episode(values).values()] == [kept, 6]


def test_an_episode_of_untrained_turns_alone_has_no_sequence() -> None:
    whole = group(0, [1.0, 0.0])
    nothing = untrained(whole.trajectories[0], *sorted({one.turn for one in whole.trajectories[0].segments}))
    assert (nothing.num_trained, nothing.branches) == (0, ())
    batch = train_batch([replace(whole, trajectories=(nothing, whole.trajectories[1]))], ages, AdvantageConfig())
    assert len(batch.sequences) == 1


def test_a_step_with_weights_of_parts_says_how_many_episodes_report_each() -> None:
    """Of parts without a weight the most frequent ones, however many there are."""
    many = {f"turn/{number:02}": 0.0 for number in range(40)}
    of_members = [{"exact": 1.0, "form": 0.5, **many}, {"exact": 0.0}, {}, {"exact": 1.0}]
    whole = group(0, [1.5, 0.0, 0.0, None])
    members = [
        one if one.reward is None else with_reward(one, one.reward, parts)
        for one, parts in zip(whole, of_members, strict=True)
    ]
    batch = [replace(whole, trajectories=tuple(members))]
    weights = {"exact": 1.0, "frm": 0.5, "unused": 0.0}
    metrics = train_batch(batch, ages, AdvantageConfig(scale="none", part_weights=weights)).metrics
    told = {name: value for name, value in metrics.items() if name.startswith("parts/")}
    assert {name: told[f"parts/{name}"] for name in ("exact", "frm", "form")} == pytest.approx(
        {"exact": 2 / 3, "frm": 0.0, "form": 1 / 3}
    )
    assert len(told) == 2 + MAX_OTHER_PARTS
    assert not any(name.startswith("parts/") for name in train_batch(batch, ages, AdvantageConfig()).metrics)
