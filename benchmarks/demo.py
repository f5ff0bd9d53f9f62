"""Does `make demo` learn for every seed, in what time and memory? ``python -m benchmarks.demo [--seeds 0 1 2 3 4]``.
With ``--long``: does `make demo-long`?

Each seed is one whole run in a new folder: model made from nothing, stack started, trained, checked. What was measured
is kept in ``results/demo.json`` at once, and a seed that is there is not run again unless ``--again`` is said;
``results/demo.md`` is its table (``demo_long`` for the long one). Installing is not part of it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
AT_MOST_BEFORE = 0.45


@dataclass(frozen=True)
class Kind:
    """What a demo is held to."""

    name: str
    target: str
    flag: str
    at_least_after: float
    at_most_s: float | None = None
    """For all of it."""
    more: str = ""
    """The end of its page."""


SHORT = Kind("demo", "demo", "", 0.90)
LONG = Kind(
    "demo_long",
    "demo-long",
    " --long",
    0.85,
    15 * 60,
    "\nHeld-out questions are 100, each asked twice. [How it came to learn](demo_long_before.md).\n",
)

PAGE = """# `make {target}`, seed by seed

Written by `python -m benchmarks.demo{flag}`. A seed is that of the model's random start and of the job. Success is the
mean over 200 held-out episodes, sampled at temperature 1 as in training: a measurement of one policy has a standard
deviation of 2 points at 90 %. "All" is the wall time of the whole command, without installing; "CPU" is what all its
processes computed, which a busy machine changes less. The load is that of the whole machine with {cpus} cores at the
start and at the end; near 2 the machine did little else.

{table}

{verdict}
{more}"""


def run(seed: int, *flags: str) -> dict[str, Any]:
    load, cpu, started = os.getloadavg()[0], _children_cpu_s(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "examples.demo.demo", "--seed", str(seed), "--data-dir", folder, *flags]
        subprocess.run(command, check=True)
        measured: dict[str, Any] = json.loads((Path(folder) / "demo" / "result.json").read_text())
    measured |= {"wall_s": time.monotonic() - started, "cpu_s": _children_cpu_s() - cpu}
    return measured | {"load": [load, os.getloadavg()[0]], "cpus": os.cpu_count()}


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def page(measured: dict[str, dict[str, Any]], kind: Kind) -> str:
    lines = ["| seed | before | after | steps | training | all | CPU | peak memory | load |", "|---" * 9 + "|"]
    held = 0
    for seed, one in sorted(measured.items(), key=lambda item: int(item[0])):
        before, after = one["evaluations"][0][1], one["evaluations"][-1][1]
        is_in_time = kind.at_most_s is None or one["wall_s"] <= kind.at_most_s
        held += before <= AT_MOST_BEFORE and after >= kind.at_least_after and is_in_time
        memory = "-" if one["peak_memory_bytes"] is None else f"{one['peak_memory_bytes'] / 2**30:.2f} GiB"
        load = " to ".join(f"{value:.1f}" for value in one["load"])
        times = [f"{one[name]:.0f} s" for name in ("training_s", "wall_s", "cpu_s")]
        cells = [seed, f"{before:.1%}", f"{after:.1%}", str(one["steps"]), *times, memory, load]
        lines.append("| " + " | ".join(cells) + " |")
    within = "" if kind.at_most_s is None else f" in at most {kind.at_most_s / 60:.0f} minutes"
    goal = f"From at most {AT_MOST_BEFORE:.0%} to at least {kind.at_least_after:.0%}{within}"
    verdict = f"{goal}: {held} of {len(measured)} seeds."
    cpus = ", ".join(sorted({str(one["cpus"]) for one in measured.values()}))
    return PAGE.format(
        cpus=cpus, table="\n".join(lines), verdict=verdict, target=kind.target, flag=kind.flag, more=kind.more
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--again", action="store_true", help="run seeds whose result is there, too")
    parser.add_argument("--long", action="store_true", help="the long demo")
    arguments = parser.parse_args()
    kind = LONG if arguments.long else SHORT
    kept = RESULTS / f"{kind.name}.json"
    measured: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else {}
    for seed in arguments.seeds:
        if arguments.again or str(seed) not in measured:
            measured[str(seed)] = run(seed, *kind.flag.split())
            kept.write_text(json.dumps(measured, indent=1) + "\n")
    text = page(measured, kind)
    kept.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
