"""Reads docs/failures.md, and writes its two tables that the code knows better (``make docs``).

Rule: the page is the source of its rows; which ends have a reward and which codes there are is asked of the code.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from gspo_core.episode_limits import PROVOKED, TRUNCATED
from gspo_core.types import StopReason
from services.state.jobs import CountedCode, DoneCode, FailureCode, FreeCode, WaitCode

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "failures.md"
ROW = re.compile(r"^\| (\d+) \| (.*) \|$", re.MULTILINE)
NUM_CELLS = 5


@dataclass(frozen=True)
class Row:
    """Of one cause, what it costs the episode, its group and the job, and whether anything of it is trained."""

    number: int
    cells: tuple[str, ...]

    @property
    def job(self) -> str:
        return self.cells[3]

    @property
    def names(self) -> set[str]:
        """The words that it marks as code."""
        return {word for span in re.findall(r"`([^`]+)`", " ".join(self.cells)) for word in re.findall(r"\w+", span)}


def rows() -> list[Row]:
    found = [(int(number), tuple(cells.split(" | "))) for number, cells in ROW.findall(PAGE.read_text())]
    return [Row(number, cells) for number, cells in found if len(cells) == NUM_CELLS]


def shown_by() -> dict[int, list[str]]:
    """The tests that show a row, as ``test_file.py::test_name``."""
    _, _, text = PAGE.read_text().partition("\n## The tests that show it\n")
    return {int(number): re.findall(r"`([^`]+)`", cell) for number, cell in ROW.findall(text)}


def written(page: str) -> str:
    for title, table in (
        ("Stop reasons, and what an episode is worth", _ends()),
        ("Codes of jobs and attempts", _codes()),
    ):
        section = re.compile(rf"(?<=\n## {title}\n\n)(\|.*\n)+")
        page, count = section.subn(lambda _, table=table: table, page)
        if count != 1:
            raise ValueError(f"{PAGE.name} has no table under its heading {title}")
    return page


def _ends() -> str:
    lines = ["| stop reason | reward |", "|---|---|", *(f"| `{one}` | {_worth(one)} |" for one in StopReason)]
    return "\n".join([*lines, ""])


def _worth(stop: StopReason) -> str:
    if not stop.has_reward:
        return "none: it is left out of the batch and of the baseline"
    if stop in PROVOKED:
        return "as judged if the world still answers, else the lowest of `reward_range`"
    return "as judged, or 0 with `on_truncation: zero`" if stop in TRUNCATED else "as judged"


def _codes() -> str:
    kinds = (
        ("a job that is not over", WaitCode),
        ("`succeeded`, `cancelled`", DoneCode),
        ("`failed`", FailureCode),
        ("an attempt, which counts against `GSPO_MAX_ATTEMPTS`", CountedCode),
        ("an attempt, which does not", FreeCode),
    )
    lines = ["| of | codes |", "|---|---|"]
    lines += [f"| {kind} | {', '.join(f'`{code}`' for code in get_args(codes))} |" for kind, codes in kinds]
    return "\n".join([*lines, ""])
