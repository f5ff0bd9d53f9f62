"""``make gpu-check``, or ``python3 -m benchmarks.gpu``: what a GPU computes, holds and wastes; a table last.

Each part is a process of its own, bounded in time, and what became of each check is kept in a folder: the same command
goes on where it was. Ends with 0 where all that could run passed, with 1 where something failed, and with 77 where
nothing ran because there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.check import SKIPPED, Place, status_of
from benchmarks.gpu.parts import PARTS, Part
from benchmarks.gpu.runner import ROOT, How, Ran, conditions, run_parts

OUT = ROOT / ".make" / "gpu"
WORK = ROOT / ".make" / "gpu-work"


def main(arguments: Sequence[str]) -> int:
    given = _parser().parse_args(arguments)
    parts = _chosen(given.parts)
    if given.device == "cpu":
        print("on the CPU, at toy size: this tests the checks, and says nothing about a GPU", flush=True)
        name, number = "a CPU", given.ranks
    elif not torch.cuda.is_available():
        print(f"there is no GPU that torch {torch.__version__} can use: 0 of {len(parts)} parts ran")
        return SKIPPED
    else:
        name, number = torch.cuda.get_device_name(), torch.cuda.device_count()
        # repeatable products, where torch has them
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    out, work = given.out.resolve(), given.work.resolve()
    is_toy = given.device == "cpu"
    models = work / ("toys" if is_toy else "models")
    place = Place(number, work / "scratch", models, out, given.device, is_toy, given.trl)
    known = conditions(place, name)
    print(", ".join(f"{key} {value}" for key, value in known.items()), flush=True)
    out.mkdir(parents=True, exist_ok=True)
    place.models.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(place.folder, ignore_errors=True)  # of a run that was killed
    place.folder.mkdir()
    try:
        ran: list[Ran] = []
        for one in run_parts(parts, place, out, known, How(given.again, given.within, given.limit)):
            ran.append(one)
            write_table(ran, out, known)  # whatever ends this run, it is there
    finally:
        shutil.rmtree(place.folder, ignore_errors=True)
    print(f"\n{(out / 'table.md').read_text()}", flush=True)
    return status_of([result for one in ran for result in one.results])


def write_table(ran: Sequence[Ran], out: Path, known: Mapping[str, Any]) -> None:
    (out / "table.md").write_text("\n".join(table(ran)) + "\n")
    whole = [{"part": one.part.name, "results": [asdict(result) for result in one.results]} for one in ran]
    (out / "table.json").write_text(json.dumps({**known, "parts": whole}, indent=2) + "\n")


def table(ran: Sequence[Ran]) -> list[str]:
    lines = ["| part | check | became | found | s |", "|---|---|---|---|---:|"]
    for one in ran:
        for result in one.results:
            said = _in_a_line(result.said).replace("|", "\\|")
            became = f"{result.became}, before" if result.name in one.kept else result.became
            lines.append(f"| {one.part.name} | {result.name} | {became} | {said} | {result.seconds:.1f} |")
    return lines


def _in_a_line(said: str) -> str:
    """The error that a traceback ends with, which torch goes on to explain; else the last line."""
    lines = said.splitlines() or [""]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit|Interrupt): ", line)]
    return (errors or lines)[-1]


def _chosen(names: str) -> list[Part]:
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = {part.name: part for part in PARTS}
    if unknown := [name for name in wanted if name not in known]:
        raise SystemExit(f"there is no part {', '.join(unknown)}: there are {', '.join(known)}")
    return [known[name] for name in wanted] or list(PARTS)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="", help="only these, separated by commas; left out: all, in their order")
    parser.add_argument("--again", action="store_true", help="also what passed before")
    parser.add_argument("--within", type=float, metavar="SECONDS", help="for all parts: what cannot begin did not run")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="for each part, in place of its own limit")
    parser.add_argument("--out", type=Path, default=OUT, help="the folder for what was found")
    parser.add_argument("--work", type=Path, default=WORK, help="the folder for models, which later runs find (30 GB)")
    parser.add_argument("--trl", type=Path, metavar="PYTHON", help="an interpreter that has TRL, to be measured beside")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: at toy size, to test the checks"
    )
    parser.add_argument("--ranks", type=int, default=2, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
