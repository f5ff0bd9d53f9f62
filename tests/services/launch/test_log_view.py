"""The logs of all local processes as one."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from services.launch.log_view import LogView
from services.launch.up import show


def record(service: str, event: str, second: int, **further: object) -> str:
    return json.dumps(
        {"service": service, **further, "event": event, "level": "info", "timestamp": f"2026-01-01T00:00:{second:02d}Z"}
    )


def add(path: Path, *lines: str, end: str = "\n") -> None:
    with path.open("a") as log:
        log.write("\n".join(lines) + end)


def shown(view: LogView) -> list[str]:
    """Without the hour, which is that of this machine's clock."""
    return [line.plain[10:] for line in view.news()]


def test_lines_of_all_come_in_the_order_of_their_times_and_once(tmp_path: Path) -> None:
    view = LogView(tmp_path)
    add(tmp_path / "trainer.log", record("trainer", "claimed", 2, job="job_1", epoch=1), record("trainer", "step", 9))
    add(tmp_path / "api.log", record("api", "listening", 1), record("api", "request", 5, duration_ms=12.34567))
    assert shown(view) == [
        "api        listening",
        "trainer    claimed  job=job_1  epoch=1",
        "api        request  duration_ms=12.35",
        "trainer    step",
    ]
    assert shown(view) == []
    add(tmp_path / "rollout-0.log", record("rollout", "joined", 10))
    assert shown(view) == ["rollout-0  joined"]


def test_what_was_logged_before_is_not_shown_again(tmp_path: Path) -> None:
    add(tmp_path / "api.log", record("api", "of yesterday", 1))
    view = LogView(tmp_path)
    add(tmp_path / "api.log", record("api", "of today", 2))
    assert shown(view) == ["api        of today"]


def test_half_a_line_waits_for_the_rest(tmp_path: Path) -> None:
    view, line = LogView(tmp_path), record("api", "listening", 1)
    add(tmp_path / "api.log", line[:20], end="")
    assert shown(view) == []
    add(tmp_path / "api.log", line[20:])
    assert shown(view) == ["api        listening"]


def test_a_traceback_stays_together_and_a_progress_bar_is_left_out(tmp_path: Path) -> None:
    view = LogView(tmp_path)
    bar = "Loading weights:   0%|  | 0/35\rLoading weights: 100%|##| 35/35"
    add(tmp_path / "engine.log", bar, record("engine", "serving", 1), "Traceback (most recent call last):", "  Boom")
    add(tmp_path / "trainer.log", record("trainer", "claimed", 2))
    assert shown(view) == [
        "engine     serving",
        "engine     Traceback (most recent call last):",
        "engine       Boom",
        "trainer    claimed",
    ]


def test_what_others_wrote_moves_no_cursor(tmp_path: Path) -> None:
    view = LogView(tmp_path)
    add(tmp_path / "rollout-0.log", record("rollout", "log", 1, text="\x1b[2Jgone"), "\x1b]0;title\x07")
    assert not [line for line in shown(view) if "\x1b" in line or "\x07" in line]


@pytest.mark.parametrize("line", ["[" * 100_000, json.dumps({"event": "x", "exception": " "}), '"\\ud800"', "9" * 5000])
def test_nothing_that_a_process_prints_ends_the_view(tmp_path: Path, line: str) -> None:
    view = LogView(tmp_path)
    add(tmp_path / "engine.log", line, "and on")
    assert shown(view)[-1] == "engine     and on"


def test_a_log_that_was_emptied_is_read_from_its_start(tmp_path: Path) -> None:
    add(tmp_path / "api.log", "of yesterday " * 9)
    view = LogView(tmp_path)
    (tmp_path / "api.log").write_text("of today\n")
    assert shown(view) == ["api        of today"]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_long_line_is_cut_to_the_width_of_a_terminal_and_whole_in_a_file(tmp_path: Path, is_terminal: bool) -> None:
    view = LogView(tmp_path)
    add(tmp_path / "engine.log", record("engine", "serving", 1, url="http://127.0.0.1:30000/" + "a b " * 60))
    written = io.StringIO()
    console = Console(file=written, width=60, force_terminal=is_terminal, no_color=True, highlight=False)
    for line in view.news():
        show(console, line)
    (said,) = written.getvalue().splitlines()
    assert (len(said) > 200) is not is_terminal
