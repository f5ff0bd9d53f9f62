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


@pytest.mark.parametrize("folder", ["gspo_core", "services"])
def test_every_module_has_its_place(folder: str) -> None:
    assert modules(ROOT / folder) - named(folder) == set()


@pytest.mark.parametrize("room", ["process", "files", "state", "engines", "episodes", "workers", "hosts", "launch"])
def test_every_module_of_a_shared_room_has_its_place(room: str) -> None:
    assert modules(ROOT / "services" / room) - named("services") == set()


def modules(folder: Path) -> set[str]:
    found = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    return found - {"__init__"}


def named(folder: str) -> set[str]:
    return set(re.findall(r"`([a-z_]+)[/`]", (ROOT / folder / "README.md").read_text()))


def test_every_page_is_in_the_list_of_pages() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages - set(re.findall(r"\]\(([a-z0-9-]+\.md)\)", (ROOT / "docs" / "README.md").read_text())) == set()
