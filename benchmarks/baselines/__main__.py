"""The grid of baselines: ``python -m benchmarks.baselines --work DIR run`` goes on where it stopped, ``... report``
writes what is there to ``benchmarks/results/baselines.*``, ``... falls`` to ``falls.*`` or what it is told, and
``... sustained`` to ``sustained.*``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.baselines.cells import (
    CELLS,
    CONFIRMING,
    DRAWN,
    LATEST,
    RUNNABLE,
    SEEDS,
    SIZES,
    UNSEEN,
    Cell,
    Model,
    Sizes,
)
from benchmarks.baselines.store import Store


def missing(store: Store, cells: Sequence[Cell], seeds: Sequence[int], sizes: Sizes) -> Iterator[tuple[Cell, int]]:
    """What is not there yet, the first to run first: what tells less is some seeds behind."""
    order = [(seed + cell.tier, seed, cell) for seed in seeds for cell in cells]
    for _, seed, cell in sorted(order, key=lambda one: one[:2]):
        if store.read(cell, seed, sizes) is None:
            yield cell, seed


def wanted(only: Sequence[str]) -> list[Cell]:
    """The cells of these names; a name that no cell has stands for all whose names begin so."""
    names = {cell.name for cell in RUNNABLE}
    beginnings = tuple(one for one in only if one not in names)
    return [cell for cell in RUNNABLE if cell.name in only or cell.name.startswith(beginnings)]


def cost(store: Store, cells: Sequence[Cell], seeds: Sequence[int], sizes: Sizes = SIZES) -> str:
    """What is missing, and about how long it takes."""
    lacking = list(missing(store, cells, seeds, sizes))
    seconds = sum(one.cost_s(sizes) for one, _ in lacking)
    return f"{len(lacking)} runs are missing, about {seconds / 60:.0f} minutes of one free core"


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
    running.add_argument("--only", action="append", help="this cell, or those whose names begin so")
    running.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS))
    running.add_argument("--minutes", type=float, help="begin no other cell after so many")
    running.add_argument("--pause-file", type=Path, help="begin no other cell while it exists")
    commands.add_parser("report", help="write tables and plots of what is there")
    falling = commands.add_parser("falls", help="write which of the long runs fall, with whatever seeds are there")
    falling.add_argument("--name", default="falls", help="of the page and of the numbers among the results")
    falling.add_argument(
        "--beside", choices=[cell.name for cell in RUNNABLE], default="long_gspo_s16", help="this cell"
    )
    lasting = commands.add_parser("sustained", help="write what an age costs that lasts")
    lasting.add_argument("--called", default="", help="behind the names of its pages, for runs from another warm start")
    running.add_argument("--cost", action="store_true", help="only say what is missing and what it will take")
    running.add_argument("--drawn", type=int, default=0, help="with so many drawn seeds more")
    running.add_argument("--confirming", type=int, default=0, help="with so many more that were drawn later")
    running.add_argument("--unseen", type=int, default=0, help="with so many more that were drawn after all others")
    running.add_argument("--latest", type=int, default=0, help="with so many of those that judge the default")
    given = parser.parse_args(argv)
    if given.command in ("report", "falls"):
        from benchmarks.baselines import falls, report

        is_report = given.command == "report"
        print(report.write(given.work) if is_report else falls.write(given.work, name=given.name, beside=given.beside))
        return 0
    if given.command == "sustained":
        from benchmarks.baselines import sustained

        print(sustained.write(given.work, called=given.called))
        return 0
    cells: Sequence[Cell] = CELLS
    if given.only:
        cells = wanted(given.only)
    if not cells:
        parser.error(f"no cell begins with {given.only}; there are {', '.join(cell.name for cell in RUNNABLE)}")
    seeds = [
        *given.seeds,
        *DRAWN[: given.drawn],
        *CONFIRMING[: given.confirming],
        *UNSEEN[: given.unseen],
        *LATEST[: given.latest],
    ]
    print(cost(Store(given.work), cells, seeds), flush=True)
    if given.cost:
        return 0
    run(given.work, cells, seeds, minutes=given.minutes, pause_file=given.pause_file)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
