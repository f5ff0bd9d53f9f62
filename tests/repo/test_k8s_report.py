"""What a run on a cluster writes into its page: `tests/e2e/k8s_report.py`."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

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
    "Changed for this cluster, and for the test alone:",
    "",
    "- HorizontalPodAutoscaler rollout: autoscaling/v2 -> autoscaling/v2beta2",
    "",
]


def test_the_newest_run_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    page = tmp_path / "k8s.md"
    page.write_text("# The manifests\n\nBy hand.\n")
    for number in (1, 2):
        said = [Said(61.2, 7.6, f"rolled {number} |\nredis")]
        told = ["HorizontalPodAutoscaler rollout: autoscaling/v2 -> autoscaling/v2beta2"]
        put_into(page, section(said, "the images are built\t90 s\t3.1\n", f"abc{number}", told, ENDED))
    assert page.read_text() == "\n".join(LINES)


@pytest.mark.parametrize(
    ("page", "put"),
    [
        ("# A\n\n## B\n\nold\n\n## C\n\nc\n", "# A\n\n## B\n\nnew\n\n## C\n\nc\n"),
        ("## B\nold\n## C\n\nc\n", "## B\n\nnew\n\n## C\n\nc\n"),
        ("# A\n\n## B", "# A\n\n## B\n\nnew\n"),
        ("# A\n\n## Beside B\n", "# A\n\n## Beside B\n\n## B\n\nnew\n"),
        ("", "## B\n\nnew\n"),
    ],
)
def test_a_section_is_put_where_it_was_wherever_that_is(page: str, put: str, tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text(page)
    put_into(file, "## B\n\nnew\n")
    assert file.read_text() == put


def test_a_page_that_has_a_section_twice_is_left_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text(twice := "## B\n\n1\n\n## B\n\n2\n")
    with pytest.raises(ValueError, match="2 times"):
        put_into(file, "## B\n\nnew\n")
    assert file.read_text() == twice
