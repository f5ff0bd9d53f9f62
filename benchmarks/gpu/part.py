"""One part in a process of its own: ``python -m benchmarks.gpu.part NAME PLACE.json RESULTS.jsonl CHECK...``.

A line for each check as it ends, so that what runs out of time, or takes its process with it, keeps what it had found.
With ``--prepare`` as its name it makes what the parts named behind it need, says which are ready, and checks nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.gpu.check import PREPARE, Place, place_of, run_checks
from benchmarks.gpu.parts import PARTS, Part


def main(name: str, place: Path, results: Path, names: Sequence[str]) -> None:
    here = place_of(json.loads(place.read_text()))
    parts = {part.name: part for part in PARTS}
    if name == PREPARE:
        prepare([parts[one] for one in names], here, results)
    else:
        check(parts[name], here, results, names)


def prepare(parts: Sequence[Part], place: Place, done: Path) -> None:
    for part in parts:
        if part.prepare is not None:
            part.prepare(place)
        with done.open("a") as file:
            file.write(f"{part.name}\n")


def check(part: Part, place: Place, results: Path, names: Sequence[str]) -> None:
    wanted = [one for one in part.checks if one.name in names]
    with part.around(place) as inside, results.open("a") as file:
        for result in run_checks(wanted, inside):
            print(f"  {result}", flush=True)
            file.write(json.dumps(asdict(result)) + "\n")
            file.flush()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
