"""The result of a simulated run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SimulationReport:
    """Rates and shares after the warm-up; extremes over the whole run."""

    steps: int
    seconds: float
    """Of the whole run."""
    tokens_per_s: float
    """Sampled tokens that entered the loss."""
    steps_per_s: float
    masked_share: float
    """Of the tokens of trained groups: older than the cap, so they left the loss."""
    max_staleness: int
    """Of any token that was trained."""
    mean_staleness: float
    num_dropped: int
    """Groups that were dropped because of a token beyond the cap."""
    waited_s: float
    """In which a batch was there and was not taken."""
    num_limits_reached: int
    """Waits that ended by their time limit."""
    engine_share: float
    """Of the places for episodes that were taken."""
    length_ratio: float
    """Mean length of trained episodes over that of all that were started: below 1, long ones are underrepresented."""
    max_open_groups: int
    """Dispatched, and their step not published."""
    max_reserved_bytes: int
    max_held_bytes: int
    """In the queue at the moment at which a batch was taken."""
    num_recoveries: int
    num_rollbacks: int
