from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("gspo_core", "environments", "services", "tests", "benchmarks", "docs")
PAGES = [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_files_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_top_folder_says_what_is_in_it(folder: str) -> None:
    assert (ROOT / folder / "README.md").read_text().startswith("# ")


def test_make_targets_named_in_the_pages_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"`?\bmake ([a-z-]+)\b(?=[ `;\n)])", page.read_text())}
    assert {name for name in named if name in {"demo", "test", "setup"}} <= targets
    blocks = "\n".join(block for page in PAGES for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL))
    assert set(re.findall(r"^make ([a-z-]+)", blocks, re.MULTILINE)) <= targets
