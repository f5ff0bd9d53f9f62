"""Sizes that no installation holds: what a new job may ask for.

One rule: only a specification that is submitted is looked at. One that was accepted stays readable, whatever release
accepted it.
"""

from __future__ import annotations

from gspo_core.job_spec import JobSpec
from gspo_core.problems import KeyPath, Problem, spell

MAX_GROUP_SIZE = 4096
MAX_GROUPS_PER_STEP = 65_536
MAX_STEPS = 10_000_000
MAX_EPISODES_IN_FLIGHT = 1_000_000


def size_problems(spec: JobSpec) -> list[Problem]:
    """Empty where all of it can be held."""
    size, count, ahead = spec.rollout.group_size, spec.groups_per_step, spec.rollout.max_staleness + 1
    bounds: list[tuple[KeyPath, int, int]] = [
        (("rollout", "group_size"), size, MAX_GROUP_SIZE),
        (("groups_per_step",), count, MAX_GROUPS_PER_STEP),
        (("steps",), spec.steps, MAX_STEPS),
    ]
    found = [
        Problem("validation_failed", path, f"{spell(path)} may be at most {most:,}, not {value:,}")
        for path, value, most in bounds
        if value > most
    ]
    in_flight = size * count * ahead
    if not found and in_flight > MAX_EPISODES_IN_FLIGHT:
        message = (
            f"groups_per_step: {count:,} groups of {size:,} episodes (rollout.group_size), {ahead:,} steps at a time "
            f"(rollout.max_staleness + 1), would be {in_flight:,} episodes in flight; at most "
            f"{MAX_EPISODES_IN_FLIGHT:,} may be"
        )
        found = [Problem("validation_failed", ("groups_per_step",), message)]
    return found
