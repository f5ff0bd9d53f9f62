"""The result of a simulated run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SimulationReport:
    """Rates and shares after the warm-up; extremes over the whole run."""

    steps: int
    seconds: float
    """Duration of the whole run."""
    tokens_per_s: float
    """Rate of sampled tokens that entered the loss."""
    steps_per_s: float
    masked_share: float
    """Share of trained groups' tokens excluded from the loss for being older than the cap."""
    max_staleness: int
    """Highest staleness of any trained token."""
    mean_staleness: float
    num_dropped: int
    """Groups dropped for a token beyond the cap."""
    waited_s: float
    """Time during which a batch was available but not taken."""
    num_limits_reached: int
    """Waits that hit their time limit."""
    engine_share: float
    """Share of episode slots in use."""
    length_ratio: float
    """Mean length of trained episodes over that of all started ones; below 1, long episodes are underrepresented."""
    max_open_groups: int
    """Groups dispatched whose step is not yet published."""
    max_reserved_bytes: int
    max_held_bytes: int
    """Bytes in the queue when a batch was taken."""
    num_recoveries: int
    num_rollbacks: int
    num_late_trained: int
    """Groups that had waited for rewards."""
    num_late_dropped: int
    """Those that were too old by then."""
    max_waiting_groups: int
