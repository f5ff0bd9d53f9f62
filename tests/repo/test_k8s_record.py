"""What a run of `make test-k8s` writes into its page: `tests/repo/k8s_record.py`."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from tests.e2e.k8s_report import put_into
from tests.e2e.k8s_report import section as of_cluster
from tests.repo.k8s_record import counts, section

ENDED = datetime(2026, 11, 23, 4, 5, tzinfo=UTC)


def test_the_newest_run_takes_the_place_of_the_one_before_and_leaves_the_run_on_a_cluster(tmp_path: Path) -> None:
    page = tmp_path / "k8s.md"
    page.write_text("# The manifests\n\nBy hand.\n")
    for number in (1, 2):
        held_to = {"kubectl, which renders": f"v1.{number}"}
        put_into(page, section({"passed": 9, "skipped": number}, held_to, f"abc{number}", 61.4, ENDED))
        put_into(page, of_cluster([], "", f"def{number}", now=ENDED))
    text = page.read_text()
    assert text.startswith(
        "# The manifests\n\nBy hand.\n\n## The last run of `make test-k8s`\n\n23 November 2026, 04:05 UTC, "
    )
    assert "commit abc2: 9 passed, 2 skipped, in 61 s." in text
    assert "| kubectl, which renders | v1.2 |" in text
    assert "commit def2" in text
    assert "abc1" not in text
    assert "def1" not in text
    assert text.count("\n## ") == 2


def test_tests_are_counted_as_they_ended(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text('<testsuites><testsuite tests="9" skipped="2" failures="0" errors="0"/></testsuites>')
    assert counts(report) == {"passed": 7, "skipped": 2}
