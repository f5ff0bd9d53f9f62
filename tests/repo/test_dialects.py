"""docs/dialects.md says of every field what the gateway does with it."""

from __future__ import annotations

from tests.repo.dialects import PAGE, written


def test_the_page_is_what_the_table_says() -> None:
    assert PAGE.read_text() == written(), "write it again: python -m tests.repo.dialects"
