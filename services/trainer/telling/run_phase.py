"""Tracks the phase of a run, the requests of its user and trainer, and how the run ends.

Phase and requests change independently: only the run moves the phase, while requests arrive from outside at any time.
The phase alone (``RULES``) decides the effect of a request: end the run immediately, or continue to the next step
boundary and close cleanly.

Rule: unless the run fails, only this module decides its end, and that decision is final. It never waits and calls no
other service; the run polls it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from services.state.jobs import HANDED_OVER, CancelManner, StatusReason
from services.trainer.telling.attempt_messages import AttemptEnd
from services.trainer.telling.failure import CANCELLED


class Phase(StrEnum):
    RECOVERING = "recovering"
    """Loads the model and replays the steps logged by earlier trainers."""
    WAITING = "waiting"
    """Waits for environments, engines and the first evaluation."""
    STEPPING = "stepping"
    """Trains. A fork that was fed the batches of its parent waits only afterwards."""
    HELD = "held"
    """Paused by its user, between two steps."""
    CLOSING = "closing"
    """Publishes, saves and evaluates after the last step."""
    OVER = "over"


TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.RECOVERING: frozenset({Phase.WAITING, Phase.OVER}),
    Phase.WAITING: frozenset({Phase.STEPPING, Phase.OVER}),
    Phase.STEPPING: frozenset({Phase.HELD, Phase.WAITING, Phase.CLOSING, Phase.OVER}),
    Phase.HELD: frozenset({Phase.STEPPING, Phase.OVER}),
    Phase.CLOSING: frozenset({Phase.OVER}),
    Phase.OVER: frozenset(),
}


@dataclass(frozen=True)
class Rule:
    """The properties of a phase."""

    has_steps: bool = False
    """Cancelling or handing over first finishes the current step and saves it."""
    owes_checkpoint: bool = False
    """If the user cancels with saving, the run first saves the progress of earlier trainers."""
    moves: bool = False
    """The watchdog expects progress."""


RULES: dict[Phase, Rule] = {
    Phase.RECOVERING: Rule(owes_checkpoint=True),
    Phase.WAITING: Rule(),
    Phase.STEPPING: Rule(has_steps=True, moves=True),
    Phase.HELD: Rule(has_steps=True),
    Phase.CLOSING: Rule(),
    Phase.OVER: Rule(),
}


class IllegalPhase(Exception):
    """``TRANSITIONS`` does not allow this change of phase."""

    def __init__(self, current: Phase, wanted: Phase) -> None:
        super().__init__(f"a run that is {current} cannot be {wanted} next")


class RunPhase:
    """The phase of one attempt. ``has_history``: earlier attempts may have trained the job."""

    def __init__(self, *, has_history: bool = False) -> None:
        self._has_history = has_history
        self.phase = Phase.RECOVERING
        self.manner: CancelManner | None = None
        """How to wind up, once the user has cancelled the job."""
        self.is_leaving = False
        """The trainer hands the job over at the next step boundary."""
        self.is_pause_wanted = False
        self.end: AttemptEnd | None = None
        """The outcome, once the run is over."""

    # Called by the run

    def enter(self, phase: Phase) -> None:
        """Move to ``phase``; no effect after the end, which the run notices at its next wait. Raises IllegalPhase."""
        if self.is_over:
            return
        if phase not in TRANSITIONS[self.phase]:
            raise IllegalPhase(self.phase, phase)
        self.phase = phase

    def finish(self, reason: StatusReason | None) -> None:
        """Record a clean end of the run; ``reason`` applies if no request caused it."""
        if self.is_leaving:
            self._over(AttemptEnd.because("released", HANDED_OVER))
        elif self.manner is not None:
            self._over(AttemptEnd.because("cancelled", CANCELLED))
        else:
            self._over(AttemptEnd.because("succeeded", reason))

    # Requests from outside

    def cancel(self, manner: CancelManner) -> None:
        """Cancel; may be repeated with another manner. A run that is leaving continues to: the next attempt obeys."""
        if manner is CancelManner.NOW or not (self._closes_in_order or self._owes_checkpoint(manner)):
            self._over(AttemptEnd.because("cancelled", CANCELLED))
        elif not self.is_leaving:
            self.manner = manner

    def leave(self) -> None:
        """Hand over after saving the current step, or immediately if that loses nothing."""
        if not (self._rule.has_steps or self.is_leaving):
            self.stop()
        self.is_leaving = True

    def stop(self) -> None:
        """Hand over immediately."""
        self._over(AttemptEnd.because("released", HANDED_OVER))

    def _over(self, end: AttemptEnd) -> None:
        if not self.is_over:
            self.phase, self.end = Phase.OVER, end

    # Consequences

    @property
    def _rule(self) -> Rule:
        return RULES[self.phase]

    @property
    def _closes_in_order(self) -> bool:
        return self._rule.has_steps or self.is_cut_short

    def _owes_checkpoint(self, manner: CancelManner) -> bool:
        return self._rule.owes_checkpoint and self._has_history and manner.saves

    @property
    def is_over(self) -> bool:
        return self.phase is Phase.OVER

    @property
    def is_cut_short(self) -> bool:
        """Whether the run ends cleanly before its last step."""
        return self.manner is not None or self.is_leaving

    @property
    def saves(self) -> bool:
        """Whether to save a checkpoint at the end."""
        return self.manner is None or self.is_leaving or self.manner.saves

    @property
    def moves(self) -> bool:
        return self._rule.moves

    def has_enough(self, *, fills_step: bool) -> bool:
        """Whether to take no more steps. ``fills_step``: the groups in flight suffice for one more step."""
        if self.is_leaving:
            return True
        return self.manner is not None and not (self.manner.drains and fills_step)

    def stops_waiting(self, *, fills_step: bool) -> bool:
        """Whether the end or a pause comes before the batch being waited for."""
        return self.has_enough(fills_step=fills_step) or (self.is_pause_wanted and self.manner is None)
