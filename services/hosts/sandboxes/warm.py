"""Sandboxes that are made ahead, so that an episode does not wait for one to start.

Rule: at most ``num_ready`` are held for each base, and of at most ``MOST_BASES`` bases, those that were asked for last.
One that was handed out is never taken back. A failure to make one is left to the next request to meet.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict, deque

from environments.sandbox.contract import Sandbox, Sandboxes, SandboxFailed

MOST_BASES = 8


class WarmSandboxes:
    def __init__(self, sandboxes: Sandboxes, num_ready: int) -> None:
        self._sandboxes = sandboxes
        self._num_ready = num_ready
        self._ready: OrderedDict[str, deque[Sandbox]] = OrderedDict()
        self._changed = threading.Condition()
        self._making: threading.Thread | None = None
        self._is_closed = False

    def refusal(self) -> str | None:
        return self._sandboxes.refusal()

    def create(self, base: str = "") -> Sandbox:
        with self._changed:
            ready = self._ready.setdefault(base, deque())
            self._ready.move_to_end(base)
            taken = ready.popleft() if ready else None
            forgotten = [self._ready.popitem(last=False)[1] for _ in range(len(self._ready) - MOST_BASES)]
            if self._making is None and not self._is_closed:
                self._making = threading.Thread(target=self._make, name="warm sandboxes", daemon=True)
                self._making.start()
        for sandboxes in forgotten:
            _close(sandboxes)
        return taken or self._sandboxes.create(base)

    @property
    def num_ready(self) -> int:
        with self._changed:
            return sum(map(len, self._ready.values()))

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            making = self._making
        if making is not None:
            making.join()
        for sandboxes in self._ready.values():
            _close(sandboxes)
        self._ready.clear()

    def _make(self) -> None:
        while (base := self._next_base()) is not None:
            try:
                made = self._sandboxes.create(base)
            except SandboxFailed:
                made = None
            with self._changed:
                if made is not None and not self._is_closed and base in self._ready:
                    self._ready[base].append(made)
                    self._changed.notify_all()
                    continue
                self._making = None
            if made is not None:
                made.close()
            return

    def _next_base(self) -> str | None:
        with self._changed:
            lacking = [base for base, ready in self._ready.items() if len(ready) < self._num_ready]
            if self._is_closed or not lacking:
                self._making = None
                return None
            return lacking[-1]


def _close(sandboxes: deque[Sandbox]) -> None:
    for one in sandboxes:
        with contextlib.suppress(SandboxFailed):
            one.close()
    sandboxes.clear()
