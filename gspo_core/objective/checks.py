"""Checks of values on a device, read together: each that is read alone waits for all work that was queued before it.

One rule: what fails raises the same error whether it was read at once or later, and always before `read_together` ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch
from torch import Tensor

_Check = tuple[Tensor, Callable[[], Exception]]
HOLDS = "all checks hold"


class Checks:
    """Checks that were left for later."""

    def __init__(self) -> None:
        self._found: list[_Check] = []

    def add(self, holds: Tensor, failure: Callable[[], Exception]) -> None:
        self._found.append((holds, failure))

    def all_hold(self) -> dict[str, Tensor]:
        """By name, for those who read it beside other numbers; empty where nothing was checked."""
        return {HOLDS: torch.stack([holds for holds, _ in self._found]).all()} if self._found else {}

    def raise_first(self) -> None:
        """Raise what the first that fails has to say."""
        for holds, failure in self._found:
            if not bool(holds):
                raise failure()


_pending: ContextVar[Checks | None] = ContextVar("pending", default=None)


def require(holds: Tensor, failure: Callable[[], Exception]) -> None:
    """Raise `failure()` unless `holds` (a single truth value): now, or where `read_together` ends."""
    pending = _pending.get()
    if pending is not None:
        pending.add(holds, failure)
    elif not bool(holds):
        raise failure()


@contextlib.contextmanager
def collected() -> Iterator[Checks]:
    """Collect the checks of the block; the caller reads them after it."""
    pending = Checks()
    token = _pending.set(pending)
    try:
        yield pending
    finally:
        _pending.reset(token)


@contextlib.contextmanager
def read_together() -> Iterator[None]:
    """Leave the checks of the block to its end, where they cost one wait."""
    with collected() as pending:
        yield
    found = pending.all_hold()
    if found and not bool(found[HOLDS]):
        pending.raise_first()
