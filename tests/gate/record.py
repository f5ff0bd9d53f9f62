"""A plugin of pytest: `-p tests.gate.record --record FILE` notes how each test ended, in the order of the ends.

With several workers the one process that hears of all of them writes. From the lines follow what failed, with which
error, which files ran before it in the same interpreter, and what was skipped for which reason. Whoever started pytest
adds a line with its status: without it more may be missing than is known.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

MAX_CHARS = 300


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="write how each test ended to this file")


def pytest_configure(config: pytest.Config) -> None:
    path: Path | None = config.getoption("record")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Record(path))


class _Record:
    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", buffering=1)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == "passed" and report.when != "call":
            return
        worker = getattr(getattr(report, "node", None), "gateway", None)
        self._note(report, report.when, "" if worker is None else worker.id)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome == "failed":
            self._note(report, "collect", "")

    def _note(self, report: Any, when: str, worker: str) -> None:
        error = "" if report.outcome == "passed" else _one_line(report.longrepr)
        end = {"test": report.nodeid, "when": when, "outcome": report.outcome, "worker": worker, "error": error}
        self._file.write(json.dumps(end) + "\n")


def _one_line(said: Any) -> str:
    """What pytest would say of it in its short summary."""
    if isinstance(said, tuple):  # of a skipped test: its file, line and reason
        return str(said[2]).removeprefix("Skipped: ")[:MAX_CHARS]
    crash = getattr(said, "reprcrash", None)
    lines = [line for line in str(said if crash is None else crash.message).splitlines() if line.strip()]
    return (lines[0 if crash is not None else -1] if lines else "no reason was given").strip()[:MAX_CHARS]
