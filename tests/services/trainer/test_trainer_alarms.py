"""Each alarm of a run fires for its reason and lasts long enough first; none fires in a healthy run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from gspo_core.objective import Alarm, AlarmKind
from services.trainer.telling.alarms import ADVICE, BASELINE_STEPS, Alarms, RunAlarm

HEALTHY: dict[str, float] = {
    "reward/mean": 0.5,
    "reward/std": 0.4,
    "reward/min": 0.0,
    "reward/max": 1.0,
    "episodes/count": 16.0,
    "sampling/entropy": 1.2,
    "staleness/beyond_cap_frac": 0.0,
    "groups/total": 4.0,
    "groups/zero_variance": 1.0,
    "disk/free_bytes": 50e9,
    "disk/total_bytes": 100e9,
    "disk/version_bytes": 1e9,
}
PAGE = (Path(__file__).parents[3] / "docs" / "control.md").read_text()


def kinds(alarms: Alarms, first: int, last: int, **changes: float) -> list[tuple[int, str]]:
    """What is told in these steps."""
    metrics = {**HEALTHY, **{name.replace("__", "/"): value for name, value in changes.items()}}
    return [(step, str(one.kind)) for step in range(first, last + 1) for one in alarms.due(step, metrics, [])]


@pytest.fixture
def alarms() -> Alarms:
    """Of a job that has begun well."""
    alarms = Alarms()
    assert kinds(alarms, 1, BASELINE_STEPS) == []
    return alarms


def test_a_healthy_run_raises_none(alarms: Alarms) -> None:
    assert kinds(alarms, 6, 100) == []
    assert kinds(alarms, 101, 200, reward__mean=0.9, reward__std=0.1, sampling__entropy=0.4) == [], "it has learned"


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"sampling__entropy": 0.05}, RunAlarm.ENTROPY_COLLAPSE),
        ({"reward__std": 0.01}, RunAlarm.REWARD_COLLAPSE),
        ({"staleness__beyond_cap_frac": 0.3}, RunAlarm.STALE_BACKLOG),
        ({"dropped__stale": 2.0}, RunAlarm.STALE_BACKLOG),
        ({"episodes__lost_share": 0.1}, RunAlarm.EPISODES_LOST),
        ({"episodes__again_share": 0.3}, RunAlarm.EPISODES_LOST),
    ],
)
def test_what_lasts_for_three_steps_is_told(alarms: Alarms, changes: dict[str, float], kind: RunAlarm) -> None:
    assert kinds(alarms, 6, 8, **changes) == [(8, kind)]
    assert kinds(alarms, 9, 20) == [], "it is over"
    assert kinds(alarms, 21, 22, **changes) == [], "two steps may be odd"


def test_updates_that_keep_going_the_same_way_are_told_with_the_age_of_the_data(alarms: Alarms) -> None:
    metrics = [{**HEALTHY, "learner/grad_alignment": value, "staleness/mean": 8.5} for value in (0.1, *[0.4] * 9)]
    told = [alarms.due(step, one, []) for step, one in enumerate(metrics, 6)]
    assert told[:7] == [[]] * 7, "a few steps are noise"
    [alarm] = told[7]
    assert (alarm.kind, alarm.value) == (RunAlarm.GRADIENTS_ALIGNED, pytest.approx((0.1 + 7 * 0.4) / 8))
    assert "8.5 steps" in alarm.meaning
    assert kinds(alarms, 16, 60, learner__grad_alignment=0.19) == []


def test_a_trainer_that_takes_over_knows_how_well_updates_agreed() -> None:
    alarms = Alarms()
    alarms.recall({"step": step, **HEALTHY, "learner/grad_alignment": 0.4} for step in range(1, 8))
    assert kinds(alarms, 8, 8, learner__grad_alignment=0.4) == [(8, RunAlarm.GRADIENTS_ALIGNED)]


def test_a_policy_that_nearly_always_succeeds_may_be_sure_of_itself(alarms: Alarms) -> None:
    sure = {"sampling__entropy": 0.05}
    assert kinds(alarms, 6, 20, **sure, reward__mean=0.85, reward__std=0.357) == []
    assert kinds(alarms, 21, 23, **sure, reward__mean=0.75, reward__std=0.433) == [(23, RunAlarm.ENTROPY_COLLAPSE)]
    kinds(alarms, 24, 40)
    one_outlier = {"reward__min": -10.0, "reward__max": 1.0, "reward__mean": -0.1, "reward__std": 1.5}
    assert kinds(alarms, 41, 43, **sure, **one_outlier) == [(43, RunAlarm.ENTROPY_COLLAPSE)]
    equal = {"reward__min": 1.0, "reward__max": 1.0, "reward__mean": 1.0, "reward__std": 0.0}
    assert RunAlarm.ENTROPY_COLLAPSE not in dict(kinds(alarms, 44, 60, **sure, **equal)).values()


def test_all_rewards_equal_is_told_with_the_reward(alarms: Alarms) -> None:
    alike = {**HEALTHY, "reward/std": 0.0, "reward/min": 1.0, "reward/max": 1.0}
    told = [one for step in range(6, 9) for one in alarms.due(step, alike, [])]
    assert {one.kind for one in told} == {RunAlarm.ALL_REWARDS_EQUAL, RunAlarm.REWARD_COLLAPSE}
    assert "all 16 episodes of the batch have the reward 1" in next(
        str(one) for one in told if one.kind is RunAlarm.ALL_REWARDS_EQUAL
    )


@pytest.mark.parametrize("changes", [{"disk__free_bytes": 4e9}, {"disk__version_bytes": 10e9}])
def test_a_disk_without_room_is_told_at_once(alarms: Alarms, changes: dict[str, float]) -> None:
    assert kinds(alarms, 6, 6, **changes) == [(6, RunAlarm.DISK_NEARLY_FULL)]


def test_a_trainer_that_takes_over_knows_how_the_job_began() -> None:
    heir, fresh = Alarms(), Alarms()
    heir.recall([{"step": 0, "eval/reward/mean": 0.1}, *({"step": step, **HEALTHY} for step in range(1, 20))])
    assert kinds(heir, 20, 22, sampling__entropy=0.05) == [(22, RunAlarm.ENTROPY_COLLAPSE)]
    assert kinds(fresh, 20, 22, sampling__entropy=0.05) == [], "there is nothing to compare with"


def test_a_first_step_that_was_never_reported_does_not_silence_them() -> None:
    """Its trainer was lost after the step and before the report."""
    alarms = Alarms()
    for step in (1, 2, 4, 5, 6):
        assert kinds(alarms, step, step) == []
    assert kinds(alarms, 7, 9, sampling__entropy=0.05, reward__std=0.01) == [
        (9, RunAlarm.ENTROPY_COLLAPSE),
        (9, RunAlarm.REWARD_COLLAPSE),
    ]


def test_alarms_of_the_loss_and_of_the_groups_come_along(alarms: Alarms) -> None:
    mismatch = Alarm(AlarmKind.MISMATCH_FLOOR, "gspo/k3_mismatch", 0.5, 0.2, "")
    assert alarms.due(6, HEALTHY, [mismatch]) == [mismatch]
    alike = {**HEALTHY, "groups/zero_variance": 4.0}
    told = [one.kind for step in range(7, 10) for one in alarms.due(step, alike, [])]
    assert told == [AlarmKind.NO_SIGNAL]


PARTS = {"parts/exact": 1.0, "parts/frm": 0.0, "parts/form": 0.9}


def unreported(alarms: Alarms, first: int, last: int, **changes: float) -> list[int]:
    """The steps after which it is told that a part is not reported."""
    metrics = {**HEALTHY, **PARTS, **{name.replace("__", "/"): value for name, value in changes.items()}}
    told = [(step, one) for step in range(first, last + 1) for one in alarms.due(step, metrics, [])]
    return [step for step, one in told if one.kind is RunAlarm.PART_UNREPORTED]


def test_a_weight_whose_part_no_episode_reports_is_told_once_with_the_names_that_are() -> None:
    alarms = Alarms()
    assert alarms.due(1, {**HEALTHY, **PARTS, "episodes/count": 128.0}, []) == []
    (told,) = alarms.due(2, {**HEALTHY, **PARTS, "episodes/count": 128.0}, [])
    assert told.kind is RunAlarm.PART_UNREPORTED
    assert "the first 2 steps reports 'frm', which has a weight; reported are 'exact', 'form'" in told.meaning
    assert unreported(alarms, 3, 100, episodes__count=128.0) == []
    assert unreported(Alarms(), 1, 5, episodes__count=4000.0) == [2], "one step may be of one environment"
    assert unreported(Alarms(), 1, 50) == [8], "small batches are judged, too"
    alarms, nothing = Alarms(), {**HEALTHY, "parts/frm": 0.0, "episodes/count": 256.0}
    (bare,) = [one for step in (1, 2) for one in alarms.due(step, nothing, [])]
    assert "reported are no parts at all" in bare.meaning


def test_a_part_that_seldom_appears_is_reported() -> None:
    alarms = Alarms()
    assert unreported(alarms, 1, 1, episodes__count=128.0, parts__frm=1 / 128) == []
    assert unreported(alarms, 2, 100, episodes__count=128.0) == []
    assert unreported(Alarms(), 1, 100, parts__frm=0.1, parts__overlong=0.0) == [], "hardly any is nearly too long"


def test_a_trainer_that_takes_over_knows_which_parts_were_reported_and_what_was_told() -> None:
    def heir_of(num_steps: int, **changes: float) -> Alarms:
        heir = Alarms()
        row = {**HEALTHY, **PARTS, **{name.replace("__", "/"): value for name, value in changes.items()}}
        heir.recall({"step": step, **row} for step in range(1, num_steps + 1))
        return heir

    assert unreported(heir_of(5), 5, 20) == [8], "a step that is taken again counts once"
    assert unreported(heir_of(8), 9, 100) == [], "it was told"
    assert unreported(heir_of(3, parts__frm=0.01), 4, 100) == []


def held_out(mean: float, margin: float = 0.04) -> dict[str, float]:
    return {"eval/reward/mean": mean, "eval/reward/low": mean - margin, "eval/reward/high": mean + margin}


def test_a_held_out_reward_that_fell_by_more_than_chance_is_told_with_the_best(alarms: Alarms) -> None:
    assert [alarms.evaluated(step, held_out(mean)) for step, mean in ((6, 0.5), (12, 0.9), (18, 0.83))] == [[], [], []]
    (told,) = alarms.evaluated(24, held_out(0.65))
    assert (told.kind, told.value, told.bound) == (RunAlarm.EVALUATION_FELL, pytest.approx(0.69), pytest.approx(0.86))
    assert "fell to 0.65; it was 0.9 after step 12" in str(told)
    assert alarms.evaluated(30, held_out(0.92)) == [], "it came back"
    assert alarms.evaluated(36, {"eval/reward/mean": 0.1}) == [], "without an interval nothing is certain"


def test_a_trainer_that_takes_over_knows_the_best_evaluation() -> None:
    heir = Alarms()
    heir.recall([{"step": 6, **held_out(0.9)}, {"step": 12, **held_out(0.7)}])
    assert [one.kind for one in heir.evaluated(18, held_out(0.7))] == [RunAlarm.EVALUATION_FELL]


def test_every_alarm_has_advice_and_a_line_on_the_page() -> None:
    every: set[Any] = {*AlarmKind, *RunAlarm}
    assert set(ADVICE) == every
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE[PAGE.index("## Alarms") :], re.MULTILINE)) == every


def test_what_is_lost_is_told_by_cause_by_group_and_by_what_was_done(alarms: Alarms) -> None:
    lost = {"episodes/lost_share": 0.16, "episodes/lost_share_worst_group": 0.5, "episodes/lost_turns_mean": 3.0}
    metrics = {**HEALTHY, **lost, "episodes/turns_mean": 1.5, "stop/env_error": 16.0}
    told = [one for step in (6, 7, 8) for one in alarms.due(step, metrics, [])]
    assert [one.kind for one in told] == [RunAlarm.EPISODES_LOST]
    assert "env_error 16" in str(told[0])
    assert "50% of those of one group; they had 3.0 turns where all have 1.5" in str(told[0])
