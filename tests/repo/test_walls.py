"""The walls between the rooms of `services/` that an import contract cannot say: who may build paths, who names
engines.

Imports are contracts in `pyproject.toml`; here is that they have no exceptions, and what is seen in the source alone.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = [path for top in ("gspo_core", "environments", "services") for path in sorted((ROOT / top).rglob("*.py"))]
ROOMS = ("process", "files", "state", "engines", "episodes", "hosts", "api", "rollout", "trainer", "engine", "launch")

# Names of folders and files below the data directory.
BELOW = frozenset(
    {
        *("jobs", "weights", "checkpoints", "batches", "trained", "exports", "keys", "environments", "venvs", "models"),
        *("logs", "redis", "metrics.jsonl", "audit.jsonl", "status.jsonl", "spec.json", "tensorboard"),
    }
)


def room(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[1] if parts[0] == "services" and len(parts) > 2 else parts[0]


def built_below_the_data_directory(tree: ast.AST) -> Iterator[int]:
    """Lines with ``something / "jobs"``, whatever the something is called."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)):
            continue
        is_named = isinstance(node.right, ast.Constant) and node.right.value in BELOW
        if is_named or "'data_dir'" in ast.dump(node.left):
            yield node.lineno


def test_files_alone_builds_paths_below_the_data_directory() -> None:
    """Secrets are no data; what a stack keeps for itself (ports, logs) lies beside the jobs, and `launch` says
    where."""
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in PRODUCT
        if room(path) not in ("files", "launch", "environments", "gspo_core")
        for line in built_below_the_data_directory(ast.parse(path.read_text()))
    ]
    assert found == []


def test_engines_alone_names_a_kind_of_engine() -> None:
    """`launch` starts them; `engine` is one of them, and its text says whose protocol it speaks."""
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in PRODUCT
        if path.is_relative_to(ROOT / "services") and room(path) not in ("engines", "launch", "engine")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search("sglang", line, re.IGNORECASE)
    ]
    assert found == []


def test_no_contract_has_an_exception() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert [one["name"] for one in contracts if "ignore_imports" in one] == []


def test_every_file_of_the_services_is_in_a_room() -> None:
    folders = {path.name for path in (ROOT / "services").iterdir() if (path / "__init__.py").exists()}
    assert folders == set(ROOMS)
    assert [path.name for path in (ROOT / "services").glob("*.py")] == ["__init__.py"]


def test_tests_of_the_services_lie_by_the_same_walls() -> None:
    folders = {path.name for path in (ROOT / "tests" / "services").iterdir() if any(path.glob("*.py"))}
    assert folders - {"__pycache__", "ui"} <= set(ROOMS)
    assert {path.name for path in (ROOT / "tests" / "services").glob("*.py")} == {"conftest.py"}


@pytest.mark.parametrize(
    "line",
    ['data / "jobs"', 'settings.data_dir / "x"', 'root / "weights" / name', 'context.job_dir(id) / "checkpoints"'],
)
def test_the_search_finds_a_path(line: str) -> None:
    assert list(built_below_the_data_directory(ast.parse(line)))
