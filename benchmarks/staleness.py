"""What admission, the cap and its three policies cost with heavy tails: ``python -m benchmarks.staleness``.

A simulation (``benchmarks.simulator``), so nothing depends on this machine: seeds are fixed and the numbers repeat.
It writes ``results/staleness.md`` and ``results/staleness.png``; ``docs/staleness.md`` says what follows from them.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib

from benchmarks.simulator import Faults, Lengths, SimulationReport, SimulationSetting, simulate
from gspo_core.staleness import OnStale

matplotlib.use("Agg")
from matplotlib import pyplot

RESULTS = Path(__file__).with_name("results")
TAILS = (10.0, 33.0)
PACES = (0, 1, 2, 4, 8, 16, 32)
NO_CAP = 10**9
FAULTS = Faults(worker_mtbf_s=2000, trainer_mtbf_s=500, rollback_share=0.2, episode_failure_share=0.02)

PAGE = """# What admission and the cap cost

Written by `python -m benchmarks.staleness --seeds {seeds}`: a simulation; a row is the mean over {seeds} seeds.
Lengths are log-normal with a median of {one.lengths.median:g} tokens, cut off at {one.lengths.limit:g};
{one.groups_per_step} groups of {one.group_size} episodes a step; engines that sample {one.num_episodes} episodes at
once with {one.tokens_per_s:g} tokens/s each; {one.train_s:g} s to train a step and {one.publish_s:g} s to publish it;
{one.num_steps} steps, of which the first {one.warmup_steps} are not measured; a cap of 4 times `max_staleness`.

## The curve over `max_staleness` (`on_stale: mask`)

![throughput and age over max_staleness](staleness.png)

{paces}

## What to do beyond the cap (`max_staleness: 4`, cap 16)

Throughput is trained tokens per second beside the same admission without a cap. With faults: each of 4 workers dies
every {faults.worker_mtbf_s:g} s in the mean and the trainer every {faults.trainer_mtbf_s:g} s; {lost} of its deaths
lose the logs since the newest checkpoint (every 5 steps); {failed} of the episodes fail without a reward.

{policies}

## A byte budget of 1.2 steps, checkpoints every 50 steps

A step counts with the most that its episodes may need. What is reserved never exceeds the budget, and every run ends.

{memory}
"""


def runs(setting: SimulationSetting, num_seeds: int) -> list[SimulationReport]:
    return [simulate(setting, seed) for seed in range(num_seeds)]


def mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def pace_curve(tail: float, num_seeds: int) -> dict[int, list[SimulationReport]]:
    return {
        pace: runs(SimulationSetting(lengths=Lengths(p99_over_p50=tail), max_staleness=pace), num_seeds)
        for pace in PACES
    }


def pace_table(curves: dict[float, dict[int, list[SimulationReport]]]) -> str:
    rows = []
    for tail, curve in curves.items():
        best = max(mean(one.tokens_per_s for one in reports) for reports in curve.values())
        for pace, reports in curve.items():
            rate = mean(one.tokens_per_s for one in reports)
            rows.append(
                (
                    f"{tail:g}",
                    pace,
                    f"{rate:,.0f}",
                    f"{rate / best:.0%}",
                    f"{mean(one.engine_share for one in reports):.0%}",
                    f"{mean(one.mean_staleness for one in reports):.1f}",
                    max(one.max_staleness for one in reports),
                    f"{mean(one.masked_share for one in reports):.1%}",
                    f"{mean(one.length_ratio for one in reports):.3f}",
                )
            )
    head = ("p99/p50", "max_staleness", "tokens/s", "of the best", "engine busy", "mean age", "max age", "masked")
    return table((*head, "length trained / started"), rows)


def policy_rows(tail: float, num_seeds: int, faults: Faults) -> Iterable[Sequence[object]]:
    base = SimulationSetting(lengths=Lengths(p99_over_p50=tail), faults=faults, checkpoint_every=5)
    free = runs(dataclasses.replace(base, staleness_cap=NO_CAP), num_seeds)
    policies: tuple[OnStale, ...] = ("mask", "drop", "wait")
    results = {"no cap": free} | {one: runs(dataclasses.replace(base, on_stale=one), num_seeds) for one in policies}
    best = mean(one.tokens_per_s for one in free)
    for name, reports in results.items():
        rates = [one.tokens_per_s / other.tokens_per_s for one, other in zip(reports, free, strict=True)]
        yield (
            f"{tail:g}",
            "yes" if faults != Faults() else "no",
            name,
            f"{mean(one.tokens_per_s for one in reports) / best:.1%}",
            f"{min(rates):.1%}",
            f"{mean(one.masked_share for one in reports):.1%}",
            f"{mean(one.num_dropped for one in reports):.1f}",
            f"{mean(one.waited_s / one.seconds for one in reports):.0%}",
            sum(one.num_limits_reached for one in reports),
            max(one.max_staleness for one in reports),
            f"{mean(one.length_ratio for one in reports):.3f}",
        )


def policy_table(num_seeds: int) -> str:
    rows = [row for faults in (Faults(), FAULTS) for tail in TAILS for row in policy_rows(tail, num_seeds, faults)]
    head = ("p99/p50", "faults", "on_stale", "throughput", "worst seed", "masked", "dropped", "time waited")
    return table((*head, "limits reached", "max age", "length trained / started"), rows)


def memory_table(num_seeds: int) -> str:
    budget = int(1.2 * SimulationSetting().groups_per_step * SimulationSetting().group_bytes)
    rows = []
    for tail in TAILS:
        for pace in (0, 1):
            setting = SimulationSetting(
                lengths=Lengths(p99_over_p50=tail), max_staleness=pace, checkpoint_every=50, budget_bytes=budget
            )
            reports = runs(setting, num_seeds)
            free = runs(dataclasses.replace(setting, budget_bytes=None), num_seeds)
            rows.append(
                (
                    f"{tail:g}",
                    pace,
                    f"{sum(one.steps == setting.num_steps for one in reports)}/{num_seeds}",
                    f"{budget / 2**20:.1f}",
                    f"{max(one.max_reserved_bytes for one in reports) / 2**20:.1f}",
                    f"{max(one.max_held_bytes for one in reports) / 2**20:.1f}",
                    f"{mean(one.tokens_per_s for one in reports) / mean(one.tokens_per_s for one in free):.0%}",
                )
            )
    head = ("p99/p50", "max_staleness", "runs that ended", "budget MiB", "reserved at most", "held at most")
    return table((*head, "throughput of that without a budget"), rows)


def plot(curves: dict[float, dict[int, list[SimulationReport]]], path: Path) -> None:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for tail, curve in curves.items():
        rates = [mean(one.tokens_per_s for one in reports) for reports in curve.values()]
        ages = [mean(one.mean_staleness for one in reports) for reports in curve.values()]
        left.plot(PACES, [rate / max(rates) for rate in rates], marker="o", label=f"p99/p50 = {tail:g}")
        right.plot(PACES, ages, marker="o", label=f"p99/p50 = {tail:g}")
    left.set_ylabel("trained tokens per second, of the best")
    right.set_ylabel("mean age of a trained token, in steps")
    for axis in (left, right):
        axis.set_xlabel("max_staleness")
        axis.set_xscale("symlog", base=2, linthresh=1)
        axis.set_xticks(PACES, [str(pace) for pace in PACES])
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="runs of each row (default: 100)")
    num_seeds = parser.parse_args().seeds
    curves = {tail: pace_curve(tail, num_seeds) for tail in TAILS}
    plot(curves, RESULTS / "staleness.png")
    text = PAGE.format(
        seeds=num_seeds,
        one=SimulationSetting(),
        faults=FAULTS,
        lost=f"{FAULTS.rollback_share:.0%}",
        failed=f"{FAULTS.episode_failure_share:.0%}",
        paces=pace_table(curves),
        policies=policy_table(num_seeds),
        memory=memory_table(num_seeds),
    )
    (RESULTS / "staleness.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
