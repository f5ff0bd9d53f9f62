"""Every folder at the top says what is in it, and those of the product name every module."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (
    *("gspo_core", "environments", "services", "examples", "tests"),
    *("benchmarks", "docs", "deploy", "k8s", "release"),
)


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_top_folder_says_what_is_in_it(folder: str) -> None:
    assert (ROOT / folder / "README.md").read_text().startswith("# ")


def test_every_page_is_in_the_list_of_pages() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages - set(re.findall(r"\]\(([a-z0-9-]+\.md)\)", (ROOT / "docs" / "README.md").read_text())) == set()
