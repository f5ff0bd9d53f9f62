"""One part in a process of its own: ``python -m benchmarks.gpu.part NAME PLACE.json RESULTS.jsonl``.

A line for each check as it ends, so that what runs out of time, or takes its process with it, keeps what it had found.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.gpu.check import Place, run_checks
from benchmarks.gpu.parts import PARTS


def place_of(record: dict[str, object]) -> Place:
    trl = record["trl"]
    return Place(
        num_gpus=int(str(record["num_gpus"])),
        folder=Path(str(record["folder"])),
        device=str(record["device"]),
        is_toy=bool(record["is_toy"]),
        trl=None if trl is None else Path(str(trl)),
    )


def main(name: str, place: Path, results: Path) -> None:
    (part,) = (one for one in PARTS if one.name == name)
    with part.around(place_of(json.loads(place.read_text()))) as inside, results.open("a") as file:
        for result in run_checks(part.checks, inside):
            print(f"  {result}", flush=True)
            file.write(json.dumps(asdict(result)) + "\n")
            file.flush()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
