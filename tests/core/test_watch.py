from __future__ import annotations

import io
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gspo_core.api_answers import Event
from gspo_core.cli.watch import BLOCKS, WatchedJob, describe, draw, follow, sparkline


@given(st.lists(st.floats(0, 1), min_size=1, max_size=300), st.integers(1, 80))
def test_a_sparkline_has_one_block_per_column(values: list[float], width: int) -> None:
    drawn = sparkline(values, width, 0.0, 1.0)
    assert len(drawn) == min(width, len(values))
    assert set(drawn) <= set(BLOCKS)


def test_a_rising_curve_is_drawn_rising() -> None:
    drawn = sparkline([i / 7 for i in range(8)], 8, 0.0, 1.0)
    assert drawn == BLOCKS


def test_values_outside_the_range_are_drawn_at_its_edge() -> None:
    assert sparkline([-5.0, 5.0], 2, 0.0, 1.0) == BLOCKS[0] + BLOCKS[-1]


def a_running_view() -> WatchedJob:
    view = WatchedJob("job_1", 20)
    view.take("job.status", {"status": "running", "status_reason": None})
    view.take("evaluation", {"step": 0, "reward/mean": 0.3})
    for step in range(1, 5):
        view.take("step", {"step": step, "reward/mean": step / 10, "time/step_s": 2.0})
    return view


def test_an_evaluation_in_which_no_episode_got_a_reward_is_shown_too() -> None:
    view = WatchedJob("job_1", 20)
    view.take("evaluation", {"step": 5, "episodes/count": 4.0, "stop/env_error": 4.0})
    assert describe(view, "evaluation") == "held-out reward nan after step 5"


def test_an_evaluation_is_shown_with_its_interval() -> None:
    view = WatchedJob("job_1", 20)
    view.take("evaluation", {"step": 5, "reward/mean": 0.8, "reward/low": 0.49, "reward/high": 0.943})
    assert describe(view, "evaluation") == "held-out reward 0.800 (0.490 to 0.943) after step 5"


def test_an_environment_that_cannot_be_loaded_is_named_once() -> None:
    view = WatchedJob("job_1", 20)
    for _ in range(3):
        view.take("env.health", {"worker": "w", "healthy": False, "error": "there is no module 'nope'"})
    assert view.notes == ["w cannot play episodes: there is no module 'nope'"]
    assert "no module 'nope'" in describe(view, "env.health")


def test_an_environment_that_is_well_again_is_told_too() -> None:
    view = WatchedJob("job_1", 20)
    told = {"worker": "w", "environment": "calculator", "error": "gone"}
    ill, well = "w cannot play episodes of calculator: gone", "w plays episodes of calculator again"
    for is_well, note in ((False, f"alert: {ill}"), (True, well)) * 2:
        view.take("env.health", told | {"healthy": is_well})
        assert describe(view, "env.health") == note
    assert view.notes == [well], "what is over is no alarm"
    view.take("alert", {"step": 5, "message": "the clip is inert"})
    assert describe(view, "alert") == "alert: step 5: the clip is inert"


def test_the_time_left_follows_the_recent_pace() -> None:
    assert a_running_view().eta_s == pytest.approx(32.0)


def test_a_finished_job_has_no_time_left() -> None:
    view = a_running_view()
    view.take("job.status", {"status": "failed", "status_reason": {"code": "internal", "message": "out of luck"}})
    assert view.is_over
    assert view.eta_s is None
    assert "out of luck" in describe(view, "job.status")


def test_the_display_names_status_step_and_held_out_reward() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    console.print(draw(a_running_view()))
    drawn = console.file.getvalue()  # type: ignore[attr-defined]
    for text in ("job_1: running", "4 of 20", "32 s left", "0.30 @ 0"):
        assert text in drawn


def test_unknown_events_change_nothing() -> None:
    view, again = a_running_view(), a_running_view()
    view.take("from.the.future", {"x": 1})
    assert view == again


def test_steps_that_are_taken_again_replace_what_they_undo() -> None:
    view = a_running_view()
    view.take("step", {"step": 3, "reward/mean": 0.9, "time/step_s": 2.0})
    assert view.rewards == [0.1, 0.2, 0.9]
    assert len(view.speeds) == len(view.step_times_s) == 3


def test_the_display_fits_a_narrow_terminal_and_names_what_it_draws() -> None:
    view = a_running_view()
    metrics = {"time/train_s": 3.0, "time/wait_s": 1.0, "gspo/clip_frac": 0.1, "reward/mean": 0.5, "reward/std": 0.25}
    signs = {"gspo/clip_frac_positive": 0.05, "gspo/clip_frac_negative": 0.2}
    view.take("step", {"step": 5, "time/step_s": 4.0, **metrics, **signs})
    view.take("alert", {"step": 5, "message": "the clip is inert"})
    view.connection = "connection lost, reconnecting (1)"
    console = Console(file=io.StringIO(), width=72, force_terminal=False)
    console.print(draw(view, 72))
    drawn = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, drawn.splitlines())) <= 72
    for text in ("0.500 ± 0.250", "train 75 %", "bad 20 %", "step 5: the clip is inert", "connection lost"):
        assert text in drawn


def test_who_watches_is_told_that_the_connection_is_lost_and_sees_what_came_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[str] = []
    view = WatchedJob("job_1", 5)

    def events(on_wait: Callable[[int], None]) -> Iterator[Event]:
        yield Event("1-0", "step", {"step": 1, "reward/mean": 0.1})
        on_wait(0)
        shown.append(view.connection)
        yield Event("2-0", "step", {"step": 2, "reward/mean": 0.2})
        shown.append(view.connection)

    monkeypatch.setenv("FORCE_COLOR", "1")
    follow(view, events)
    assert shown == ["connection lost, reconnecting (1)", ""]
    assert view.rewards == [0.1, 0.2]
