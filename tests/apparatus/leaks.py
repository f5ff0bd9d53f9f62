"""What nobody closed: the collector is made to find it where it is known whose it is."""

from __future__ import annotations

import gc
import sys
import warnings
from unittest import mock

import pytest

MOST_TOLD = 5


def found() -> list[str]:
    """What is finalised now although it was never closed, and what else cannot be raised where it happens."""
    told: list[str] = []

    def hear(unraisable: sys.UnraisableHookArgs) -> None:
        told.append(f"{type(unraisable.exc_value).__name__}: {unraisable.exc_value} ({unraisable.object!r})"[:200])

    for name in ("last_type", "last_value", "last_traceback", "last_exc"):  # of a test that failed: it holds its frames
        if hasattr(sys, name):
            delattr(sys, name)
    with mock.patch.object(sys, "unraisablehook", hear), warnings.catch_warnings():
        warnings.simplefilter("error")
        gc.collect()
    return told


def refuse(where: str) -> None:
    """Fails with what was left open in ``where``."""
    if told := found():
        more = f", and {len(told) - MOST_TOLD} more" if len(told) > MOST_TOLD else ""
        pytest.fail(f"left open in {where}: {'; '.join(told[:MOST_TOLD])}{more}", pytrace=False)
