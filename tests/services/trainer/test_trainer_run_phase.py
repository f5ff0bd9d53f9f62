"""The end of a run is decided in one place: what each wish does in each phase, and what follows from all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.state.jobs import CancelManner, StatusReason
from services.trainer.telling.run_phase import RULES, TRANSITIONS, IllegalPhase, Phase, RunPhase

DONE = StatusReason("steps_done", "all 2 steps are done")
ROUTES = {
    Phase.RECOVERING: (),
    Phase.WAITING: (Phase.WAITING,),
    Phase.STEPPING: (Phase.WAITING, Phase.STEPPING),
    Phase.HELD: (Phase.WAITING, Phase.STEPPING, Phase.HELD),
    Phase.CLOSING: (Phase.WAITING, Phase.STEPPING, Phase.CLOSING),
}
KEEPS = CancelManner.NOW_WITH_CHECKPOINT
DRAINS = CancelManner.DRAIN


def at(phase: Phase, *, has_history: bool = False) -> RunPhase:
    run = RunPhase(has_history=has_history)
    for one in ROUTES[phase]:
        run.enter(one)
    assert run.phase is phase
    return run


def how(run: RunPhase) -> str | None:
    return None if run.end is None else run.end.how


def test_every_phase_has_its_rule_and_its_place_in_the_table() -> None:
    assert set(RULES) == set(TRANSITIONS) == set(Phase)
    assert all(Phase.OVER in targets for phase, targets in TRANSITIONS.items() if phase is not Phase.OVER)


@pytest.mark.parametrize("phase", ROUTES)
def test_only_what_the_table_allows_is_entered(phase: Phase) -> None:
    for target in set(Phase) - TRANSITIONS[phase]:
        with pytest.raises(IllegalPhase):
            at(phase).enter(target)


@pytest.mark.parametrize("phase", ROUTES)
def test_who_is_to_stop_or_is_cancelled_at_once_ends_where_it_is(phase: Phase) -> None:
    stopped, cancelled = at(phase), at(phase)
    stopped.stop()
    cancelled.cancel(CancelManner.NOW)
    assert (how(stopped), how(cancelled)) == ("released", "cancelled")


@pytest.mark.parametrize("phase", ROUTES)
@pytest.mark.parametrize("manner", [KEEPS, DRAINS])
def test_steps_are_wound_up_and_nothing_else_is(phase: Phase, manner: CancelManner) -> None:
    run = at(phase)
    run.cancel(manner)
    assert (how(run), run.manner) == ((None, manner) if RULES[phase].has_steps else ("cancelled", None))


@pytest.mark.parametrize(
    ("has_history", "manner", "ends"),
    [
        (True, KEEPS, False),
        (True, DRAINS, True),
        (False, KEEPS, True),
        (True, CancelManner.DRAIN_WITH_CHECKPOINT, False),
    ],
)
def test_what_others_have_trained_is_saved_first(has_history: bool, manner: CancelManner, ends: bool) -> None:
    run = at(Phase.RECOVERING, has_history=has_history)
    run.cancel(manner)
    assert run.is_over == ends
    run.finish(None)
    assert how(run) == "cancelled"


@pytest.mark.parametrize("phase", ROUTES)
def test_a_trainer_leaves_after_the_step_or_at_once(phase: Phase) -> None:
    run = at(phase)
    run.leave()
    assert how(run) == (None if RULES[phase].has_steps else "released")


def test_a_step_is_taken_while_a_drain_can_fill_it() -> None:
    run = at(Phase.STEPPING)
    assert not run.has_enough(fills_step=False)
    run.cancel(CancelManner.DRAIN_WITH_CHECKPOINT)
    assert [run.has_enough(fills_step=fills) for fills in (True, False)] == [False, True]
    run.cancel(KEEPS)
    assert run.has_enough(fills_step=True)


def test_a_pause_holds_while_a_batch_is_waited_for_unless_the_job_winds_up() -> None:
    run = at(Phase.STEPPING)
    run.is_pause_wanted = True
    assert run.stops_waiting(fills_step=True)
    run.cancel(DRAINS)
    assert not run.stops_waiting(fills_step=True)


def test_a_job_that_is_handed_over_stays_so_when_it_is_cancelled_meanwhile() -> None:
    """The next trainer obeys; what was trained is saved by this one."""
    run = at(Phase.STEPPING)
    run.leave()
    for phase in (None, Phase.CLOSING):
        if phase is not None:
            run.enter(phase)
        run.cancel(DRAINS)
        assert (run.is_over, run.saves, run.is_cut_short) == (False, True, True)
    run.finish(None)
    assert how(run) == "released"


@pytest.mark.parametrize(
    ("manner", "saves"), [(None, True), (CancelManner.DRAIN, False), (CancelManner.DRAIN_WITH_CHECKPOINT, True)]
)
def test_what_was_trained_is_saved_unless_its_user_does_not_want_it(manner: CancelManner | None, saves: bool) -> None:
    run = at(Phase.STEPPING)
    if manner is not None:
        run.cancel(manner)
    assert run.saves == saves


EVENTS: dict[str, Callable[[RunPhase], None]] = {
    "stop": RunPhase.stop,
    "leave": RunPhase.leave,
    "finish": lambda run: run.finish(DONE),
    **{f"cancel {manner}": lambda run, manner=manner: run.cancel(manner) for manner in CancelManner},  # type: ignore[misc]
    **{f"enter {phase}": lambda run, phase=phase: run.enter(phase) for phase in Phase if phase is not Phase.OVER},  # type: ignore[misc]
}


@given(has_history=st.booleans(), names=st.lists(st.sampled_from(sorted(EVENTS)), max_size=12))
def test_whatever_comes_in_whatever_order(has_history: bool, names: list[str]) -> None:
    """It goes only where the table leads, is over exactly when it has an end, and keeps the first one."""
    run = RunPhase(has_history=has_history)
    for name in names:
        before, end = run.phase, run.end
        try:
            EVENTS[name](run)
        except IllegalPhase:
            assert run.phase is before
        assert run.phase is before or run.phase in TRANSITIONS[before]
        assert run.is_over == (run.end is not None)
        assert end is None or run.end is end
        if name in ("stop", f"cancel {CancelManner.NOW}", "finish"):
            assert run.is_over
        if run.end is not None and end is None:
            assert run.end.how != "succeeded" or (name == "finish" and not run.is_cut_short)
            assert run.end.how != "cancelled" or any(one.startswith("cancel") for one in names)
