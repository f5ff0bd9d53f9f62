"""What the local stack promises to whoever waits for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gspo_core.client import Event
from services.local import demo
from services.local.demo import while_alive
from services.local.stack import Stack, StackConfig, StackError

DEADLINE_S = 60.0


def test_who_follows_a_job_learns_of_a_process_that_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "CHECK_S", 0.05)
    stack = Stack(StackConfig(tmp_path, tmp_path))
    stack.log_dir.mkdir()
    silence = threading.Event()

    def events() -> Iterator[Event]:
        yield Event("1-0", "step", {"step": 1})
        silence.wait()

    # Ends at once: it has no Redis.
    stack._spawn("trainer", [], {"PATH": os.environ["PATH"]})
    try:
        following = while_alive(stack, events())
        assert next(following).data == {"step": 1}
        with pytest.raises(StackError, match="trainer ended with code 1"):
            next(following)
    finally:
        silence.set()
        stack.close()


def test_a_folder_of_the_caller_shadows_no_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "services").mkdir()
    (tmp_path / "services" / "__init__.py").write_text("raise SystemExit('the wrong services')")
    monkeypatch.chdir(tmp_path)
    stack = Stack(StackConfig(tmp_path, tmp_path))
    stack.log_dir.mkdir()
    stack._spawn("rollout", ["--help"], {"PATH": os.environ["PATH"]})
    (child,) = stack._children
    try:
        assert child.process.wait(DEADLINE_S) == 0, child.last_words()
        assert "Plays episodes" in child.last_words()
    finally:
        stack.close()
