"""The walls between the rooms of `services/` that show in the source alone, such as which room names kinds of engines.

Imports are contracts in `pyproject.toml`, and have no exceptions. Paths are in `test_paths.py`.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = [path for top in ("gspo_core", "environments", "services") for path in sorted((ROOT / top).rglob("*.py"))]
ROOMS = (
    *("process", "files", "state", "engines", "episodes", "hosts", "workers"),
    *("api", "rollout", "gateway", "evaluation", "trainer", "engine", "launch"),
)


def room(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[1] if parts[0] == "services" and len(parts) > 2 else parts[0]


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


def test_states_of_an_engine_are_spelled_in_one_place() -> None:
    spelled = re.compile(r"""["'](switching|dirty|joining)["']""")
    assert {path.name for path in PRODUCT if spelled.search(path.read_text())} == {"fleet_records.py"}


def test_no_contract_has_an_exception() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert [one["name"] for one in contracts if "ignore_imports" in one] == []


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of everything that the contracts read."""
    folder = tmp_path_factory.mktemp("house")
    for top in ("gspo_core", "environments", "services", "examples"):
        shutil.copytree(ROOT / top, folder / top, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def broken(folder: Path) -> set[str]:
    """The names of the contracts that do not hold there."""
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    told = subprocess.run(command, cwd=folder, env={"PYTHONPATH": str(folder)}, capture_output=True, text=True)
    said = " ".join(told.stdout.split())
    contracts = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert "Contracts:" in said, told.stdout + told.stderr
    return {one["name"] for one in contracts if f"{one['name']} BROKEN" in said}


@pytest.mark.parametrize(
    ("planted", "text", "broke"),
    [
        (
            "services/planted/__init__.py",
            "import redis\n",
            {"nobody but state imports redis", "rooms build on each other in one direction, and there are no others"},
        ),
        ("services/api/planted.py", "import redis\n", {"nobody but state imports redis"}),
        (
            "gspo_core/planted.py",
            "def asked() -> None:\n    from redis import Redis\n",
            {"nobody but state imports redis"},
        ),
        (
            "services/engines/planted.py",
            "import services.state\n",
            {"rooms build on each other in one direction, and there are no others"},
        ),
        (
            "services/gateway/planted.py",
            "import services.rollout\n",
            {"rooms build on each other in one direction, and there are no others"},
        ),
        (
            "services/hosts/planted.py",
            "import services.hosts.inside\n",
            {"what runs inside a host is a process of its own"},
        ),
    ],
)
def test_what_goes_through_a_wall_is_refused(copy: Path, planted: str, text: str, broke: set[str]) -> None:
    path = copy / planted
    is_room = path.name == "__init__.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    try:
        assert broke <= broken(copy)
    finally:
        path.unlink()
        if is_room:
            shutil.rmtree(path.parent)


def test_every_file_of_the_services_is_in_a_room() -> None:
    folders = {path.name for path in (ROOT / "services").iterdir() if (path / "__init__.py").exists()}
    assert folders == set(ROOMS)
    assert [path.name for path in (ROOT / "services").glob("*.py")] == ["__init__.py"]


@pytest.mark.parametrize("package", sorted((ROOT / "services").rglob("__init__.py")), ids=lambda path: path.parent.name)
def test_the_modules_that_a_package_names_are_in_it(package: Path) -> None:
    inside = {path.stem for path in package.parent.rglob("*.py")} | {path.name for path in package.parent.iterdir()}
    named = re.findall(r"``([a-z_]+)``", ast.get_docstring(ast.parse(package.read_text())) or "")
    assert set(named) <= inside


def test_tests_of_the_services_lie_by_the_same_walls() -> None:
    folders = {path.name for path in (ROOT / "tests" / "services").iterdir() if any(path.glob("*.py"))}
    assert folders - {"__pycache__", "ui"} <= set(ROOMS)
    assert {path.name for path in (ROOT / "tests" / "services").glob("*.py")} == {"conftest.py"}
