"""Pages of the demos say of a seed whether it held what is asked of it."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import agent_demo, demo


def measured(after: float, wall_s: float) -> dict[str, Any]:
    times = {"training_s": wall_s / 2, "wall_s": wall_s, "cpu_s": 2 * wall_s}
    about = {"evaluations": [[0, 0.3], [60, after]], "steps": 60, "load": [1.0, 2.0], "cpus": 2}
    return times | about | {"peak_memory_bytes": None, "cpu_by_process": {"engine": wall_s}, "openai": "1"}


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [
        (demo.SHORT, "From at most 45% to at least 90%: 1 of 3 seeds."),
        (demo.LONG, "From at most 45% to at least 85% in at most 15 minutes: 1 of 3 seeds."),
    ],
)
def test_a_demo_is_held_to_its_own_bounds(kind: demo.Kind, verdict: str) -> None:
    seeds = {"0": measured(0.86, 100), "1": measured(0.92, 901), "2": measured(0.5, 100)}
    page = demo.page(seeds, kind)
    assert verdict in page
    assert page.startswith(f"# `make {kind.target}`, seed by seed")


def test_a_seed_of_the_agents_demo_is_judged_by_the_means_of_its_runs() -> None:
    once = {"environment": measured(0.95, 100), "agent": measured(0.95, 160)}
    twice = once | {"agent_again": measured(0.89, 130), "environment_again": measured(0.95, 100)}
    page = agent_demo.page({"1": once, "2": twice})
    first, second = (next(line for line in page.splitlines() if line.startswith(f"| {seed} |")) for seed in "12")
    assert "30.0% to 95.0% | 30.0% to 95.0% | 60 | 50 s, 80 s (1.60)" in first
    assert "30.0% to 95.0%, 95.0% | 30.0% to 95.0%, 89.0% | 60 | 50 s, 72 s (1.45)" in second
    assert "within 1.5 times of both times: 1 of 2 seeds before." in page
    assert "| engine | 100.0 | 152.5 |" in page, "160, and the mean of 160 and 130"
    too_little = twice | {"agent_again": measured(0.84, 130)}
    assert "0 of 1 seeds before" in agent_demo.page({"2": too_little})
