"""Is the simulator's mean age that of arithmetic? ``python -m benchmarks.staleness_law`` writes the table.

Where engines are never full and no group overtakes another, the mean age of trained tokens has a closed form. The
settings here are such; beyond them there is none, which is what the simulator is for.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from benchmarks.simulator import Lengths, SimulationReport, SimulationSetting, simulate

RESULT = Path(__file__).with_name("results") / "staleness_law.md"
P99 = statistics.NormalDist().inv_cdf(0.99)
MOST_VERSIONS = 200
"""That an episode sees come while it plays; longer ones have no weight here."""

CASES = (
    *((tail, train_s, pace) for tail in (1, 3) for train_s in (3, 30) for pace in (1, 4, 16)),
    *((10, 30, pace) for pace in (4, 16)),  # heavier tails only where others wait for the trainer: no group overtakes
)
"""p99/p50 of the lengths, seconds of training, ``max_staleness``."""

PAGE = """# The simulator's mean age beside its closed form

Written by `python -m benchmarks.staleness_law`; `tests/benchmarks/test_simulator.py` holds each row to 10 %.
In its settings engines are never full and hardly a group overtakes another: one seed, {steps} steps, of which
the first {warmup} are not measured; log-normal lengths with a median of {median:g} tokens at {rate:g} tokens/s.

A group is dispatched `max_staleness` steps before the one that takes it (Little's law), and each version that comes
while an episode plays makes the tokens after it younger by one: age = max_staleness - sum over c of E[(l - c)+] / E[l],
with c tokens to the first, second, ... version. The time of a step, which c follows from, is that of the simulated run.
With full engines there is no such formula of ours, and others' (Applied Compute's) could not be read here.

{table}

Largest difference: {largest:.1%}.
"""


def mean_age(given: SimulationSetting, step_s: float) -> float:
    """Where engines are never full and groups are taken in the order in which they were dispatched.

    Little's law: with ``(max_staleness + 1) * groups_per_step`` groups under way a group is dispatched
    ``max_staleness`` steps before the one that takes it. Each version that came while it played makes the tokens after
    it younger by one: of the tokens of an episode of length l the share (l - c) / l comes after c tokens.
    """
    sigma = max(1e-6, math.log(given.lengths.p99_over_p50) / P99)
    normal, mean = statistics.NormalDist(), given.lengths.median * math.exp(sigma**2 / 2)
    share_younger = 0.0
    for versions in range(1, MOST_VERSIONS):
        tokens = versions * step_s * given.tokens_per_s
        place = math.log(given.lengths.median / tokens) / sigma
        share_younger += normal.cdf(place + sigma) - tokens / mean * normal.cdf(place)
    return given.max_staleness - share_younger


def setting(tail: float, train_s: float, pace: int) -> SimulationSetting:
    return SimulationSetting(
        lengths=Lengths(p99_over_p50=tail),
        max_staleness=pace,
        staleness_cap=1000,
        train_s=train_s,
        num_episodes=10_000,
        num_steps=60,
        warmup_steps=20,
    )


def compared(tail: float, train_s: float, pace: int) -> tuple[SimulationReport, float]:
    """A simulated run, and the mean age that it should have."""
    given = setting(tail, train_s, pace)
    report = simulate(given, 0)
    return report, mean_age(given, 1 / report.steps_per_s)


def main() -> None:
    lines = [
        "| p99/p50 | training, s | max_staleness | simulated | closed form | difference |",
        "|---|---|---|---|---|---|",
    ]
    largest = 0.0
    for tail, train_s, pace in CASES:
        report, law = compared(tail, train_s, pace)
        off = report.mean_staleness / law - 1
        largest = max(largest, abs(off))
        lines.append(f"| {tail} | {train_s} | {pace} | {report.mean_staleness:.3f} | {law:.3f} | {off:+.1%} |")
    one = setting(*CASES[0])
    page = PAGE.format(
        steps=one.num_steps,
        warmup=one.warmup_steps,
        median=one.lengths.median,
        rate=one.tokens_per_s,
        table="\n".join(lines),
        largest=largest,
    )
    RESULT.write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
