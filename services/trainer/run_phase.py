"""Where a run of a job is, what its user and its trainer want meanwhile, and how it ends.

Two things are kept apart, because each of them changes without the other: the phase, which only the run moves, and the
wish, which comes from outside at any moment. What becomes of a wish depends on the phase alone (``RULES``): either the
run may be ended where it is, or it goes on to the next step boundary and closes in order.

Rule: this is the one place where the end of a run is decided, unless it fails. An end that is decided stays. It waits
for nothing and speaks to nobody; whoever runs the job asks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from services.state.jobs import HANDED_OVER, CancelManner, StatusReason
from services.trainer.attempt_messages import AttemptEnd
from services.trainer.telling.failure import CANCELLED


class Phase(StrEnum):
    RECOVERING = "recovering"
    """Loads the model and trains again what the trainers before have logged."""
    WAITING = "waiting"
    """For environments, engines and the first evaluation."""
    STEPPING = "stepping"
    HELD = "held"
    """Paused by its user, between two steps."""
    CLOSING = "closing"
    """After its last step: publishes, saves, evaluates."""
    OVER = "over"


TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.RECOVERING: frozenset({Phase.WAITING, Phase.OVER}),
    Phase.WAITING: frozenset({Phase.STEPPING, Phase.OVER}),
    Phase.STEPPING: frozenset({Phase.HELD, Phase.CLOSING, Phase.OVER}),
    Phase.HELD: frozenset({Phase.STEPPING, Phase.OVER}),
    Phase.CLOSING: frozenset({Phase.OVER}),
    Phase.OVER: frozenset(),
}


@dataclass(frozen=True)
class Rule:
    """What holds in a phase."""

    has_steps: bool = False
    """There are steps to take to an end and to save: it is cancelled and handed over in order."""
    owes_checkpoint: bool = False
    """It saves what the trainers before have trained, if that was asked for, before it is cancelled."""
    moves: bool = False
    """It is meant to move: the watchdog looks."""


RULES: dict[Phase, Rule] = {
    Phase.RECOVERING: Rule(owes_checkpoint=True),
    Phase.WAITING: Rule(),
    Phase.STEPPING: Rule(has_steps=True, moves=True),
    Phase.HELD: Rule(has_steps=True),
    Phase.CLOSING: Rule(),
    Phase.OVER: Rule(),
}


class IllegalPhase(Exception):
    """The table of transitions does not lead there."""

    def __init__(self, current: Phase, wanted: Phase) -> None:
        super().__init__(f"a run that is {current} cannot be {wanted} next")


class RunPhase:
    """Of one attempt. ``has_history``: other attempts may have trained before it."""

    def __init__(self, *, has_history: bool = False) -> None:
        self._has_history = has_history
        self.phase = Phase.RECOVERING
        self.manner: CancelManner | None = None
        """How it winds up, once its user has cancelled it."""
        self.is_leaving = False
        """Its trainer hands it over at the next step boundary."""
        self.is_pause_wanted = False
        self.end: AttemptEnd | None = None
        """How it ended, once it is over."""

    # What the run does

    def enter(self, phase: Phase) -> None:
        """Raises IllegalPhase. A run that was ended where it is notices at its next wait; until then this is void."""
        if self.is_over:
            return
        if phase not in TRANSITIONS[self.phase]:
            raise IllegalPhase(self.phase, phase)
        self.phase = phase

    def finish(self, reason: StatusReason | None) -> None:
        """The run has come to its end, in order; ``reason`` is why, where nobody has asked for it."""
        if self.is_leaving:
            self._over(AttemptEnd.because("released", HANDED_OVER))
        elif self.manner is not None:
            self._over(AttemptEnd.because("cancelled", CANCELLED))
        else:
            self._over(AttemptEnd.because("succeeded", reason))

    # What others want

    def cancel(self, manner: CancelManner) -> None:
        """May be repeated, also with another manner. A run that leaves goes on leaving: the next one obeys."""
        if manner is CancelManner.NOW or not (self._closes_in_order or self._owes_checkpoint(manner)):
            self._over(AttemptEnd.because("cancelled", CANCELLED))
        elif not self.is_leaving:
            self.manner = manner

    def leave(self) -> None:
        """Hand over after the step that it is in, saved; at once where nothing is lost by it."""
        if not (self._rule.has_steps or self.is_leaving):
            self.stop()
        self.is_leaving = True

    def stop(self) -> None:
        """Hand over where it is."""
        self._over(AttemptEnd.because("released", HANDED_OVER))

    def _over(self, end: AttemptEnd) -> None:
        if not self.is_over:
            self.phase, self.end = Phase.OVER, end

    # What follows

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
        """It ends before its last step, in order."""
        return self.manner is not None or self.is_leaving

    @property
    def saves(self) -> bool:
        """What it has trained is to be saved at its end."""
        return self.manner is None or self.is_leaving or self.manner.saves

    @property
    def moves(self) -> bool:
        return self._rule.moves

    def has_enough(self, *, fills_step: bool) -> bool:
        """At a step boundary: no further step is taken. ``fills_step``: what is under way makes one more."""
        if self.is_leaving:
            return True
        return self.manner is not None and not (self.manner.drains and fills_step)

    def stops_waiting(self, *, fills_step: bool) -> bool:
        """While a batch is waited for: something else comes first, the end or a pause."""
        return self.has_enough(fills_step=fills_step) or (self.is_pause_wanted and self.manner is None)
