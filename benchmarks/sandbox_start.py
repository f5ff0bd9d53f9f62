"""How long an episode waits for its sandbox, with and without a pool of warm ones; of each kind.

``python -m benchmarks.sandbox_start [IMAGE]``: containers of IMAGE, which a Docker daemon has. Between two episodes the
pool has the time to prepare the next, as it has while a policy thinks.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from environments.sandbox.contract import Command, File, Sandbox, Sandboxes, archive
from services.hosts.sandboxes.container import ContainerSandboxes
from services.hosts.sandboxes.warm import WarmSandboxes
from tests.services.hosts.sandbox_kit import of_kind

NUM_EPISODES, NUM_RUNS, NUM_READY = 15, 5, 2


def main(images: Sequence[str]) -> None:
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.2f} at the start")
    print(
        f"p50 of {NUM_EPISODES} starts in ms; median (least, most) of {NUM_RUNS} runs; {NUM_READY} ready; interleaved"
    )
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("local", "remote"):
            with of_kind(kind, Path(folder)) as sandboxes:
                compare(kind, sandboxes)
    for image in images:
        compare(f"container of {image}", ContainerSandboxes([image]))
    print(f"load {os.getloadavg()[0]:.2f} at the end")


def compare(kind: str, sandboxes: Sandboxes) -> None:
    cold: list[float] = []
    warm: list[float] = []
    called: list[float] = []
    for _ in range(NUM_RUNS):
        cold.append(p50(lambda: timed(sandboxes.create, called)))
        with closing(WarmSandboxes(sandboxes, NUM_READY)) as pool:
            pool.create().close()

            def ready(pool: WarmSandboxes = pool) -> Sandbox:
                return pool.create()

            def one(pool: WarmSandboxes = pool) -> float:
                while pool.num_ready < NUM_READY:
                    time.sleep(0.005)
                return timed(ready, called)

            warm.append(p50(one))
    print(f"{kind}: cold {spread(cold)}, warm {spread(warm)}, one command {spread(called)}")


def timed(create: Callable[[], Sandbox], called: list[float]) -> float:
    began = time.perf_counter()
    sandbox = create()
    seconds = time.perf_counter() - began
    sandbox.put(archive([File("work")]))
    work = f"{sandbox.root.rstrip('/')}/work"
    began = time.perf_counter()
    sandbox.run(Command("true", work, work, work, {}, 60.0, 100))
    called.append(time.perf_counter() - began)
    sandbox.close()
    return seconds


def p50(measure: Callable[[], float]) -> float:
    return statistics.median(measure() for _ in range(NUM_EPISODES))


def spread(seconds: Sequence[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.1f} ({1e3 * min(seconds):.1f}, {1e3 * max(seconds):.1f})"


if __name__ == "__main__":
    main(sys.argv[1:])
