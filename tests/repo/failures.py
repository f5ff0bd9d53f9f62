"""What docs/failures.md says (``make docs`` writes it).

Rule: rows come from ``failure_rows``; what the code itself can tell (which ends have a reward, which attempts count) is
asked of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from gspo_core.endings import PROVOKED, TRUNCATED
from gspo_core.types import StopReason
from services.state.jobs import CountedCode, DoneCode, FailureCode, FreeCode, WaitCode
from tests.repo.failure_row import Row
from tests.repo.failure_rows import SECTIONS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "failures.md"
HEAD = """\
# Failures: what each cause costs

What happens to the episode, to its group (the episodes of one task, whose rewards are compared) and to the job, and
whether anything of it is trained. Codes are those of `status_reason`, of the attempts of a job, of stop reasons, of
`alert` events and of the log. This page is written by `make docs` from the causes that the code
lists (`services/state/jobs.py` and others); a test fails when one of them is missing here, and when a test that
a row names is gone.

Three rules hold in every row. Nothing is trained twice. What the model itself caused is an outcome that it can learn
from; what it did not cause is never a reward of 0. What only lasts for a while (Redis, the disk, an engine) fails no
job.
"""
COLUMNS = ("", "what happens", "the episode", "its group", "the job", "trained?")


def written() -> str:
    parts, number = [HEAD], 1
    for title, rows in SECTIONS:
        parts += [f"\n## {title}\n", _table(rows, number)]
        number += len(rows)
    return "\n".join([*parts, _ends(), _codes(), _tests()])


def _table(rows: tuple[Row, ...], first: int) -> str:
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    for number, row in enumerate(rows, first):
        cells = (str(number), row.cause, row.episode, row.group, row.job, row.trained)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _ends() -> str:
    lines = [
        "\n## Stop reasons, and what an episode is worth\n",
        "| stop reason | reward |",
        "|---|---|",
        *(f"| `{one}` | {_worth(one)} |" for one in StopReason),
    ]
    return "\n".join(lines)


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
    lines = ["\n## Codes of jobs and attempts\n", "| of | codes |", "|---|---|"]
    lines += [f"| {kind} | {', '.join(f'`{code}`' for code in get_args(codes))} |" for kind, codes in kinds]
    return "\n".join(lines)


def _tests() -> str:
    rows = [row for _, rows in SECTIONS for row in rows]
    shown = [
        f"| {number} | {', '.join(f'`{one}`' for one in row.shown_by)} |"
        for number, row in enumerate(rows, 1)
        if row.shown_by
    ]
    silent = [str(number) for number, row in enumerate(rows, 1) if not row.shown_by]
    said = f"No test of its own has: {', '.join(silent)}." if silent else "Every row has one."
    return "\n".join(["\n## The tests that show it\n", f"{said}\n", "| row | tests |", "|---|---|", *shown]) + "\n"
