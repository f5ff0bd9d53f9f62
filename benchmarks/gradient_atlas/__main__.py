"""The gradient atlas: ``python -m benchmarks.gradient_atlas``; some ten minutes of a free core; writes
``benchmarks/results/gradient_atlas.*``.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from benchmarks.gradient_atlas.measure import Kind, Result, Setting, measure
from benchmarks.gradient_atlas.report import RESULTS, read, write
from benchmarks.gradient_atlas.world import World, train

PLACES = ((20, 64), (20, 96), (200, 64), (200, 96), (1000, 64))
"""Lengths with the versions that are trained: while it learns fastest, and later."""
AGES = (4, 16, 64)
KINDS: tuple[Kind, ...] = ("single", "stitched")
LR = 0.02
"""So that weights of 16 steps ago are 0.03 to 0.08 of k3 away at the first point."""


def settings(length: int, point: int) -> Iterator[Setting]:
    for kind in KINDS:
        yield from (Setting(length, point, age, kind) for age in AGES)


def run(places: Sequence[tuple[int, int]], num_batches: int, seed: int) -> Iterator[Result]:
    """``places`` are lengths with the versions that are trained."""
    for length in dict.fromkeys(length for length, _ in places):
        world, points = World(seed), [point for one, point in places if one == length]
        versions = train(world, length, max(points) + 1, LR, np.random.default_rng([seed, length]))
        for setting in (one for point in points for one in settings(length, point)):
            place = [seed, length, setting.point, setting.age, KINDS.index(setting.kind)]
            yield measure(world, versions, setting, num_batches, np.random.default_rng(place))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gradient_atlas", description=__doc__)
    parser.add_argument("--batches", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0, help="of the world; others than 0 are written beside it")
    parser.add_argument("--longest", type=int, default=1000, help="leave out longer episodes")
    parser.add_argument("--length", type=int, help="only episodes of this length, written beside the others")
    parser.add_argument(
        "--again", action="store_true", help="only write the page anew, from the numbers that are there"
    )
    given = parser.parse_args(argv)
    name = f"gradient_atlas_{given.seed}" if given.seed else "gradient_atlas"
    if given.length is not None:
        name += f"_length_{given.length}"
    if given.again:
        write(*read(RESULTS / f"{name}.json"), name=name)
        return 0
    torch.set_num_threads(1)
    started, load = time.process_time(), os.getloadavg()[0]
    results = []
    places = [one for one in PLACES if one[0] <= given.longest and given.length in (None, one[0])]
    for result in run(places, given.batches, given.seed):
        results.append(result)
        seconds = time.process_time() - started
        print(f"{seconds:5.0f} s of CPU: {result.setting}, k3 {result.k3:.3f}", flush=True)
        if len(results) % (len(KINDS) * len(AGES)) == 0:
            conditions = (
                f"World {given.seed}; {seconds:.0f} s of one thread of {os.cpu_count()} CPUs, load {load:.1f} at the "
                f"start, Python {platform.python_version()}, torch {torch.__version__}."
            )
            write(results, given.batches, conditions, name=name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
