"""What tests of durable files share: the order in which files are flushed and get their names, seen from outside."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch, root: Path) -> Iterator[list[tuple[str, str]]]:
    """Record ("flush", path) and ("name", path) while the real calls are made; paths are relative to ``root``.

    A temporary name is shown as ``*``, because it is random.
    """
    events: list[tuple[str, str]] = []

    def shown(path: str | os.PathLike[str]) -> str:
        parts = Path(path).relative_to(root).parts
        return "/".join("*" if part.startswith(".tmp-") else part for part in parts) or "."

    def record(name: str, describe: Any) -> None:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            events.append(describe(*arguments))
            return real(*arguments, **options)

        monkeypatch.setattr(os, name, call)

    record("fsync", lambda descriptor: ("flush", shown(Path(f"/proc/self/fd/{descriptor}").readlink())))
    for name in ("rename", "link", "replace"):
        record(name, lambda source, target: ("name", shown(target)))
    yield events
    monkeypatch.undo()
