"""Every folder at the top says what is in it."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("gspo_core", "environments", "services", "tests", "benchmarks", "docs", "deploy", "k8s")


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_top_folder_says_what_is_in_it(folder: str) -> None:
    assert (ROOT / folder / "README.md").read_text().startswith("# ")
