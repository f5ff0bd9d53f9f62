"""The grid of baselines: ``python -m benchmarks.baselines --work DIR run`` goes on where it stopped, ``... report``
writes what is there to ``benchmarks/results/baselines.*``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.baselines.cells import CELLS, SEEDS, SIZES, Cell, Model, Sizes
from benchmarks.baselines.store import Store


def missing(store: Store, cells: Sequence[Cell], seeds: Sequence[int], sizes: Sizes) -> Iterator[tuple[Cell, int]]:
    """What is not there yet, the first to run first: what tells less is some seeds behind."""
    order = [(seed + cell.tier, seed, cell) for seed in seeds for cell in cells]
    for _, seed, cell in sorted(order, key=lambda one: one[:2]):
        if store.read(cell, seed, sizes) is None:
            yield cell, seed


def run(
    work: Path,
    cells: Sequence[Cell] = CELLS,
    seeds: Sequence[int] = SEEDS,
    *,
    sizes: Sizes = SIZES,
    minutes: float | None = None,
    pause_file: Path | None = None,
    prepare: Callable[[Path, Model], Path] | None = None,
) -> int:
    """Runs what is missing; how many it ran. ``prepare`` says where a model lies, and makes it."""
    import torch

    from benchmarks.baselines import models
    from benchmarks.baselines.training import Training

    torch.set_num_threads(1)
    store, started, count = Store(work), time.monotonic(), 0
    for cell, seed in list(missing(store, cells, seeds, sizes)):
        while pause_file is not None and pause_file.exists():
            time.sleep(5)
        if minutes is not None and time.monotonic() - started > 60 * minutes:
            break
        spec = cell.job((prepare or models.model_dir)(work, cell.model), seed, sizes)
        result = Training(cell, spec).run()
        store.write(cell, seed, sizes, result)
        count += 1
        curve = " ".join(f"{value:.2f}" for _, value in result.evaluations)
        print(
            f"{time.strftime('%H:%M:%S')} {cell.name} seed {seed}: {curve} ({result.seconds['all']:.0f} s)", flush=True
        )
    return count


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.baselines", description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="where models and the results of cells are kept")
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="run what is missing")
    running.add_argument("--only", action="append", help="cells whose names begin so")
    running.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    running.add_argument("--minutes", type=float, help="begin no other cell after so many")
    running.add_argument("--pause-file", type=Path, help="begin no other cell while it exists")
    commands.add_parser("report", help="write tables and plots of what is there")
    given = parser.parse_args(argv)
    if given.command == "report":
        from benchmarks.baselines.report import write

        print(write(given.work))
        return 0
    cells = [cell for cell in CELLS if not given.only or cell.name.startswith(tuple(given.only))]
    if not cells:
        parser.error(f"no cell begins with {given.only}; there are {', '.join(cell.name for cell in CELLS)}")
    run(given.work, cells, given.seeds, minutes=given.minutes, pause_file=given.pause_file)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
