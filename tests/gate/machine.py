"""How fast and how busy the machine was: what a run that took long, or ended red, is read with."""

from __future__ import annotations

import os
import platform
import subprocess
import threading
import time

# Seconds that `_work` took on two idle cores on 26 November 2026: 0.183 to 0.229 in five runs, this in the middle.
REFERENCE_S = 0.19
LOOK_S = 5.0


def _work() -> int:
    return sum(number * number % 7 for number in range(4_000_000))


class Machine:
    """Watches the load until `told`."""

    def __init__(self) -> None:
        begun = time.perf_counter()
        _work()
        self._speed = REFERENCE_S / (time.perf_counter() - begun)
        self._loads = [os.getloadavg()[0]]
        self._over = threading.Event()
        self._watching = threading.Thread(target=self._watch, daemon=True)
        self._watching.start()

    def told(self) -> str:
        self._over.set()
        mean, most = sum(self._loads) / len(self._loads), max(self._loads)
        return (
            f"{_commit()}  python {platform.python_version()}  {os.cpu_count()} cores, speed {self._speed:.2f} of the "
            f"reference, load {mean:.1f} in the mean, {most:.1f} at most"
        )

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            self._loads.append(os.getloadavg()[0])


def _commit() -> str:
    try:
        said = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:
        return "no git"
    return said.stdout.strip() or "no commit"
