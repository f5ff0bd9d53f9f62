"""What docs/staleness.md tells people to run, runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "staleness.md"


def test_the_example_runs_and_shows_that_more_pace_is_more_throughput(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(code, str(PAGE), "exec"), {})
    rows = [[float(cell) for cell in line.split()] for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == [1, 2, 4, 8]
    for column in (1, 2, 3):
        values = [row[column] for row in rows]
        assert values == sorted(values)
