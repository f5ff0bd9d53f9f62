"""Processor time of a tree of processes, looked at again and again while it runs, by what each process is."""

from __future__ import annotations

import json
import os
import subprocess
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from examples.demo.memory import process_tree

INTERVAL_S = 0.5
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class SideFailed(Exception):
    """One side of the race has not come to its end."""


def run_watched(argv: Sequence[str], environment: Mapping[str, str], out: Path) -> dict[str, Any]:
    """Run a side to its end and leave ``cpu.jsonl`` in ``out``; what the whole of it took."""
    samples, log = [], out.with_suffix(".log")
    load, started = os.getloadavg()[0], time.time()
    with log.open("wb") as file:
        process = subprocess.Popen(argv, env=dict(environment), stdout=file, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                samples.append({"at": time.time(), "by": cpu_s(process.pid)})
                time.sleep(INTERVAL_S)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode:
        words = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise SideFailed(f"{' '.join(argv[1:4])} ended with code {process.returncode}. The end of {log}:\n{words}")
    (out / "cpu.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return {"started": started, "wall_s": time.time() - started, "load": [load, os.getloadavg()[0]]}


def cpu_s(root: int) -> dict[str, float]:
    """Seconds so far of ``root`` and its descendants, those that have ended included, by what they are."""
    used: defaultdict[str, float] = defaultdict(float)
    for pid in process_tree(root):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended; its parent has its time now
            continue
        used[_name([word.decode(errors="replace") for word in words])] += sum(map(int, fields[11:15])) * _TICK_S
    return dict(used)


def _name(words: Sequence[str]) -> str:
    for option, module in pairwise(words):
        if option == "-m":
            return module.rpartition(".")[2]
    return "redis" if "redis" in words[0] or "valkey" in words[0] else Path(words[0]).name


class CpuTime:
    """Processor seconds at any moment, from what was looked at around it."""

    def __init__(self, path: Path) -> None:
        self._samples = [json.loads(line) for line in path.read_text().splitlines()]
        self._moments: list[float] = [sample["at"] for sample in self._samples]
        self._totals: list[float] = [sum(sample["by"].values()) for sample in self._samples]

    def at(self, moment: float) -> float:
        after = min(max(bisect_left(self._moments, moment), 1), len(self._moments) - 1)
        (left, right), (low, high) = self._moments[after - 1 : after + 1], self._totals[after - 1 : after + 1]
        share = min(max((moment - left) / (right - left), 0.0), 1.0)
        return low + share * (high - low)

    def by_process(self, start: float, end: float) -> dict[str, float]:
        """Who used it in between."""
        first = self._samples[bisect_left(self._moments, start)]
        # Not the one after the end: what has ended by then counts as its parent's.
        last = self._samples[bisect_right(self._moments, end) - 1]
        used = {name: total - first["by"].get(name, 0.0) for name, total in last["by"].items()}
        return dict(sorted(used.items(), key=lambda item: -item[1]))
