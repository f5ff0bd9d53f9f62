"""The limit of what is in flight at one engine: where it settles, and what does not move it."""

from __future__ import annotations

import pytest

from services.workers.engine_watch import InFlightLimit


def play(limit: InFlightLimit, capacity: int, wanted: int, num_reports: int, others: int = 0) -> list[int]:
    """An engine that runs ``capacity`` at once for us and ``others``, who always want more; the limits over time."""
    values = []
    for _ in range(num_reports):
        ours = min(wanted, limit.value)
        if ours == limit.value < wanted:
            limit.reached()
        total = ours + others
        limit.report(num_ours=ours, num_running=min(total, capacity), num_waiting=max(0, total - capacity))
        values.append(limit.value)
    return values


@pytest.mark.parametrize("capacity", [1, 3, 16, 100, 700])
def test_it_settles_at_what_the_engine_runs(capacity: int) -> None:
    values = play(InFlightLimit(), capacity, wanted=2000, num_reports=60)
    settled = values[-20:]
    assert capacity <= min(settled)
    assert max(settled) <= capacity + max(2, capacity * 3 // 8)  # a queue that keeps it full


def test_it_is_found_in_seconds_and_found_again() -> None:
    limit = InFlightLimit()
    assert play(limit, 500, 2000, 5)[-1] >= 500
    assert play(limit, 20, 2000, 4)[-1] <= 25
    assert play(limit, 500, 2000, 40)[-1] >= 480


def test_what_is_not_reached_does_not_grow() -> None:
    assert play(InFlightLimit(), 100, wanted=10, num_reports=20)[-1] == 64


def test_a_burst_a_pause_and_a_small_queue_move_nothing() -> None:
    limit = InFlightLimit(32)
    for _ in range(5):
        limit.report(num_ours=30, num_running=10, num_waiting=20)  # one report of a burst
        limit.report(num_ours=30, num_running=30, num_waiting=0)
        limit.report(num_ours=30, num_running=0, num_waiting=30)  # paused
        limit.report(num_ours=30, num_running=28, num_waiting=2)
    assert limit.value == 32


def test_two_who_share_an_engine_share_the_cut() -> None:
    limit = InFlightLimit(64)
    for _ in range(2):
        limit.report(num_ours=64, num_running=32, num_waiting=96)
    assert limit.value == 18  # half of 32, and an eighth


def test_what_runs_while_nothing_waits_fits() -> None:
    """After a pause everything is read again, which looks like a queue; what was in flight runs on."""
    limit = InFlightLimit(64)
    for _ in range(3):
        limit.report(num_ours=64, num_running=8, num_waiting=56)
    assert limit.value == 9
    limit.report(num_ours=60, num_running=60, num_waiting=0)
    assert limit.value >= 60
