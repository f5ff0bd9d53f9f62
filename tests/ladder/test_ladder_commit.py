"""A run knows its own tree again after it has written its page."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.ladder.commit import UNKNOWN, WRITTEN, commit_of


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for file in ("product.py", *WRITTEN):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("before")
    name = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.invalid"]
    for arguments in (["init", "--quiet"], ["add", "."], [*name, "commit", "--quiet", "-m", "Begin"]):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    return tmp_path


def test_a_page_that_the_run_wrote_makes_no_other_tree(checkout: Path) -> None:
    begun = commit_of(checkout)
    assert len(begun) == 10
    for file in WRITTEN:
        (checkout / file).write_text("after")
    assert commit_of(checkout) == begun


def test_a_changed_product_does(checkout: Path) -> None:
    begun = commit_of(checkout)
    (checkout / "product.py").write_text("after")
    assert commit_of(checkout) == f"{begun}-dirty"


def test_a_tree_without_history_is_not_known(tmp_path: Path) -> None:
    assert commit_of(tmp_path) == UNKNOWN
