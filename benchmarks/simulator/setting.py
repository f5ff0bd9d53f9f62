"""Simulation inputs: episode lengths, machines, job settings and failure rates."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from gspo_core.invariants import InvalidValue
from gspo_core.staleness import OnStale

# The 99th percentile of a normal distribution, in standard deviations.
_P99 = 2.3263
BYTES_PER_TOKEN = 10
"""Approximate size of a token in the queue: id, log-prob, mask and version."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Sampled tokens per episode: log-normal, cut off at the job's episode limit."""

    median: float = 500.0
    p99_over_p50: float = 10.0
    """Tail weight: 1 means no tail, 10 is typical for reasoning with tools, 33 is extreme."""
    limit: float = 32_000.0
    """``limits.max_episode_tokens``."""

    def __post_init__(self) -> None:
        if not (0 < self.median <= self.limit and self.p99_over_p50 >= 1):
            raise InvalidValue(f"lengths with median {self.median}, p99/p50 {self.p99_over_p50}, limit {self.limit}")

    def draw(self, rng: np.random.Generator) -> float:
        sigma = math.log(self.p99_over_p50) / _P99
        return float(min(self.limit, max(1.0, self.median * math.exp(sigma * rng.standard_normal()))))


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Mean times between failures in seconds; infinity means never."""

    worker_mtbf_s: float = math.inf
    """Per rollout worker; its episodes are leased again after ``lease_s``."""
    resumable: bool = True
    """Whether an episode resumes after its last appended piece instead of starting over."""
    episode_failure_share: float = 0.0
    """Share of episodes lost to infrastructure failures; they have no reward and are not trained."""
    trainer_mtbf_s: float = math.inf
    rollback_share: float = 0.0
    """Share of trainer failures that also lose the batch logs since the newest checkpoint."""
    lease_s: float = 30.0
    restart_s: float = 20.0
    """Time from a trainer failure until its successor has loaded the checkpoint."""


@dataclass(frozen=True, kw_only=True)
class SimulationSetting:
    """A job on machines that sample ``num_episodes`` at once, each at ``tokens_per_s``."""

    lengths: Lengths = field(default_factory=Lengths)
    faults: Faults = field(default_factory=Faults)
    groups_per_step: int = 8
    group_size: int = 8
    max_staleness: int = 4
    staleness_cap: int | None = None
    """Defaults to 4 times ``max_staleness``, as in a job."""
    on_stale: OnStale = "mask"
    stale_wait_s: float = 600.0
    budget_bytes: int | None = None
    """Byte limit of the queue; None leaves admission as the only bound."""
    num_workers: int = 4
    num_episodes: int = 256
    tokens_per_s: float = 40.0
    late_reward_share: float = 0.0
    """Share of episodes whose reward comes ``late_by_s`` after their end."""
    late_by_s: float = 3600.0
    on_late_reward: Literal["train", "mask", "drop"] = "mask"
    max_waiting_groups: int | None = None
    """Defaults to 256 times ``groups_per_step``, as in a job."""
    chunk_tokens: float = 1024.0
    train_s: float = 3.0
    publish_s: float = 0.5
    checkpoint_every: int = 20
    num_steps: int = 100
    warmup_steps: int = 20
    """Steps to skip before measuring rates, because the shortest groups finish first."""

    @property
    def cap(self) -> int:
        return 4 * self.max_staleness if self.staleness_cap is None else self.staleness_cap

    @property
    def max_waiting(self) -> int:
        return 256 * self.groups_per_step if self.max_waiting_groups is None else self.max_waiting_groups

    @property
    def group_bytes(self) -> int:
        """Maximum size of a group in the queue."""
        return int(self.group_size * self.lengths.limit * BYTES_PER_TOKEN)


def groups_affordable(*, budget_bytes: int, used_bytes: int, group_bytes: int, groups_per_step: int) -> int:
    """How many more groups may be started within a budget for what the queue holds.

    ``used_bytes`` counts a group that is not complete with ``group_bytes``, the most that it may need, and a complete
    one with what it has. What is started is thus never stopped half-way. A budget that does not hold one batch in its
    worst case is refused: its last groups would wait for room that only the batch itself can free.
    """
    if budget_bytes < groups_per_step * group_bytes:
        raise InvalidValue(
            f"{groups_per_step} groups that may need {group_bytes} bytes each do not fit into {budget_bytes} bytes: "
            "raise the budget, or lower groups_per_step, group_size or the limit of an episode's tokens"
        )
    return max(0, (budget_bytes - used_bytes) // group_bytes)
