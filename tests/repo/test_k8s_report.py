"""What a run on a cluster writes into its page: `tests/e2e/k8s_report.py`."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from tests.e2e.compose_check import Said
from tests.e2e.k8s_report import put_into, section

ENDED = datetime(2026, 11, 23, 4, 5, tzinfo=UTC)
LINES = [
    "# The manifests",
    "",
    "By hand.",
    "",
    "## The last run of `make real-k8s`",
    "",
    "One command, ended 23 November 2026, 04:05 UTC, commit abc2. "
    "Seconds count from the check's start; load is of the last minute.",
    "",
    "| seconds | load | what |",
    "|---|---|---|",
    "| before | 3.1 | the images are built: 90 s |",
    "| 61 | 8 | rolled 2 / redis |",
    "",
]


def test_the_newest_run_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    page = tmp_path / "k8s.md"
    page.write_text("# The manifests\n\nBy hand.\n")
    for number in (1, 2):
        said = [Said(61.2, 7.6, f"rolled {number} |\nredis")]
        put_into(page, section(said, "the images are built\t90 s\t3.1\n", f"abc{number}", ENDED))
    assert page.read_text() == "\n".join(LINES)
