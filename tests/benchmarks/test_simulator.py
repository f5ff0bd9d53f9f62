"""What the settings promise, with heavy tails, failures and rollbacks; the trainer's own functions decide."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any

import pytest

from benchmarks import staleness_law
from benchmarks.simulator import Deadlock, Faults, Lengths, SimulationReport, SimulationSetting, simulate, simulation
from benchmarks.simulator.setting import groups_affordable
from gspo_core.invariants import InvalidValue
from gspo_core.staleness import Choice, OnStale

TAILS = [10.0, 33.0]
MODES: list[OnStale] = ["mask", "drop", "wait"]
# Seconds that a step takes, by (p99/p50, max_staleness): what fails should fail a few times in a run, and not so often
# that nothing is ever done.
STEP_S = {(10, 0): 160, (10, 1): 42, (10, 4): 14, (33, 0): 470, (33, 1): 100, (33, 4): 35}


def failing(tail: float, max_staleness: int, *, rollbacks: bool) -> Faults:
    step_s = STEP_S[int(tail), max_staleness]
    return Faults(
        worker_mtbf_s=20 * step_s,
        trainer_mtbf_s=10 * step_s,
        rollback_share=0.5 if rollbacks else 0.0,
        episode_failure_share=0.02,
        lease_s=min(30.0, step_s),
        restart_s=min(20.0, step_s),
    )


FEW, MANY = range(3), range(100)
seeds = pytest.mark.parametrize(
    "seeds", [pytest.param(FEW, id="3 seeds"), pytest.param(MANY, id="100 seeds", marks=pytest.mark.slow)]
)


def setting(p99_over_p50: float, **changes: Any) -> SimulationSetting:
    return SimulationSetting(
        lengths=Lengths(p99_over_p50=p99_over_p50), **{"num_steps": 60, "warmup_steps": 10, **changes}
    )


def run_all(given: SimulationSetting, seeds: range) -> list[SimulationReport]:
    return [simulate(given, seed) for seed in seeds]


@seeds
@pytest.mark.parametrize("is_calm", [True, False], ids=["calm", "faults"])
@pytest.mark.parametrize("tail", TAILS)
def test_waiting_never_deadlocks(tail: float, is_calm: bool, seeds: range) -> None:
    faults = Faults() if is_calm else failing(tail, 4, rollbacks=True)
    for report in run_all(setting(tail, on_stale="wait", faults=faults, checkpoint_every=5), seeds):
        assert report.steps == 60
        if is_calm:
            # Nothing is masked, because it waited, and no time limit had to end a wait.
            assert report.masked_share == 0
            assert report.num_limits_reached == 0


@seeds
@pytest.mark.parametrize("tail", TAILS)
def test_masking_keeps_95_percent_of_the_throughput_without_a_cap(tail: float, seeds: range) -> None:
    given = setting(tail, max_staleness=4, num_steps=100, warmup_steps=20)
    capped = run_all(given, seeds)
    free = run_all(dataclasses.replace(given, staleness_cap=10**6), seeds)
    assert sum(one.tokens_per_s for one in capped) >= 0.95 * sum(one.tokens_per_s for one in free)
    # The cap was at work: without it older tokens are trained.
    assert max(one.max_staleness for one in capped) <= 16 < max(one.max_staleness for one in free)


@seeds
@pytest.mark.parametrize("on_stale", MODES)
@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_no_token_beyond_the_cap_is_trained(max_staleness: int, on_stale: OnStale, seeds: range) -> None:
    given = setting(33, max_staleness=max_staleness, on_stale=on_stale, num_steps=40, checkpoint_every=4)
    for rollbacks in (False, True):
        faults = failing(33, max_staleness, rollbacks=rollbacks)
        reports = run_all(dataclasses.replace(given, faults=faults), seeds)
        assert max(one.max_staleness for one in reports) <= given.cap
        assert sum(one.num_recoveries for one in reports) > len(seeds)
        assert (sum(one.num_rollbacks for one in reports) > 0) is rollbacks


@seeds
@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_recoveries_start_no_more_groups_than_admission_allows(max_staleness: int, seeds: range) -> None:
    faults = failing(10, max_staleness, rollbacks=False)
    reports = run_all(setting(10, max_staleness=max_staleness, faults=faults), seeds)
    assert sum(one.num_recoveries for one in reports) > len(seeds)
    assert max(one.max_open_groups for one in reports) == (max_staleness + 1) * 8


@seeds
@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize("tail", TAILS)
def test_memory_is_bounded_however_rare_checkpoints_are(tail: float, max_staleness: int, seeds: range) -> None:
    """A budget of 1.2 steps in their worst case, checkpoints every 50 steps: bytes are free once a batch is logged."""
    step_bytes = SimulationSetting().groups_per_step * SimulationSetting().group_bytes
    given = setting(tail, max_staleness=max_staleness, checkpoint_every=50, budget_bytes=int(1.2 * step_bytes))
    for faults in (Faults(), failing(tail, max_staleness, rollbacks=False)):
        for report in run_all(dataclasses.replace(given, faults=faults), seeds):
            assert report.steps == 60
            assert report.max_held_bytes <= report.max_reserved_bytes <= 1.2 * step_bytes


def test_a_budget_that_could_block_a_batch_is_refused() -> None:
    step_bytes = SimulationSetting().groups_per_step * SimulationSetting().group_bytes
    with pytest.raises(InvalidValue, match="do not fit"):
        simulate(setting(10, budget_bytes=step_bytes - 1), 0)


def test_synchronous_is_exactly_synchronous() -> None:
    report = simulate(setting(10, max_staleness=0), 0)
    assert (report.max_staleness, report.max_open_groups, report.masked_share) == (0, 8, 0)


def test_dropping_trains_no_group_in_part() -> None:
    report = simulate(setting(33, on_stale="drop"), 0)
    assert report.num_dropped > 0
    assert report.masked_share == 0


def test_without_a_tail_rates_are_those_of_arithmetic() -> None:
    """Equal lengths, one step at a time: 12.5 s of sampling, then 3.5 s of training."""
    report = simulate(setting(1, max_staleness=0), 0)
    assert report.steps_per_s == pytest.approx(1 / (500 / 40 + 3.5))
    assert report.tokens_per_s == pytest.approx(64 * 500 / 16)
    assert report.engine_share == pytest.approx(64 / 256 * 12.5 / 16)


@pytest.mark.parametrize(("tail", "train_s", "max_staleness"), staleness_law.CASES)
def test_the_mean_age_of_tokens_is_that_of_the_closed_form(tail: float, train_s: float, max_staleness: int) -> None:
    report, law = staleness_law.compared(tail, train_s, max_staleness)
    assert report.engine_share < 0.2
    assert report.mean_staleness == pytest.approx(law, rel=0.1)


def test_the_same_seed_is_the_same_run() -> None:
    faults = failing(33, 4, rollbacks=True)
    given = setting(33, faults=faults, on_stale="wait", num_steps=30, checkpoint_every=5)
    assert simulate(given, 3) == simulate(given, 3) != simulate(given, 4)


def test_a_deadlock_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above could not fail otherwise: with a rule that always waits nothing moves."""
    monkeypatch.setattr(simulation, "choose_groups", lambda *_, **__: Choice(wait_for=(0,)))
    with pytest.raises(Deadlock, match="after 0 steps"):
        simulate(setting(10, on_stale="wait"), 0)
    with pytest.raises(Deadlock):
        simulate(setting(10, on_stale="wait", faults=failing(10, 4, rollbacks=True)), 0)


def test_lengths_have_the_tail_that_they_are_said_to_have() -> None:
    import numpy as np

    lengths = Lengths(median=500, p99_over_p50=10, limit=10**6)
    rng = np.random.default_rng(0)
    drawn = np.array([lengths.draw(rng) for _ in range(20_000)])
    p50, p99 = np.percentile(drawn, [50, 99])
    assert math.isclose(p50, 500, rel_tol=0.05)
    assert math.isclose(p99 / p50, 10, rel_tol=0.1)


# Late rewards


def beside_none_late(seeds: range, **changes: Any) -> tuple[list[SimulationReport], list[SimulationReport]]:
    """With 5 % of the rewards ten minutes (some forty steps) late, and with none."""
    given = setting(10.0, num_steps=150, warmup_steps=10)
    late = dataclasses.replace(given, late_reward_share=0.05, late_by_s=600.0, **changes)
    return run_all(late, seeds), run_all(given, seeds)


@seeds
@pytest.mark.parametrize("way", ["train", "mask"])
def test_late_rewards_hold_up_no_step(way: str, seeds: range) -> None:
    late, without = beside_none_late(seeds, on_late_reward=way)
    shares = [one.steps_per_s / other.steps_per_s for one, other in zip(late, without, strict=True)]
    assert statistics.median(shares) > 0.9
    for one in late:
        assert one.num_late_trained > 100
        assert one.max_waiting_groups > 50
        assert (one.max_staleness > 16) == (way == "train"), "their true age"


def test_late_groups_that_are_too_old_are_dropped_where_the_job_says_so() -> None:
    (late,), _ = beside_none_late(range(1), on_late_reward="drop")
    assert late.num_late_dropped > 100
    assert late.num_dropped == late.num_late_dropped
    assert late.max_staleness <= 16


def test_no_more_groups_wait_for_rewards_than_the_job_allows() -> None:
    (bounded,), (without,) = beside_none_late(range(1), max_waiting_groups=4, on_late_reward="train")
    assert bounded.steps_per_s < 0.5 * without.steps_per_s, "they stand in the way of others"


def test_what_fits_into_a_budget_of_bytes_by_hand() -> None:
    assert groups_affordable(budget_bytes=1000, used_bytes=0, group_bytes=300, groups_per_step=3) == 3
    assert groups_affordable(budget_bytes=1000, used_bytes=701, group_bytes=300, groups_per_step=3) == 0
    assert groups_affordable(budget_bytes=1000, used_bytes=2000, group_bytes=300, groups_per_step=3) == 0


def test_a_budget_that_would_block_the_last_group_of_a_batch_is_refused() -> None:
    with pytest.raises(InvalidValue, match="do not fit into 899 bytes"):
        groups_affordable(budget_bytes=899, used_bytes=0, group_bytes=300, groups_per_step=3)
