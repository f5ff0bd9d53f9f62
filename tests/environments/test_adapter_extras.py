"""What an adapter asks for in its file, what its extra installs and what is pinned are one and the same version."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from services.hosts.venv import requirements_of

ROOT = Path(__file__).parents[2]
EXTRAS = {
    "environments.adapters.gym": "gym",
    "environments.adapters.mcp": "mcp",
    "environments.adapters.openenv": "openenv",
    "environments.adapters.reasoning_gym": "reasoning",
    "environments.python_tool": "python-tool",
}
# They cannot be beside us (verifiers pins another mcp), or need not be: their own virtual environment has them.
APART = {"environments.adapters.textarena", "environments.adapters.verifiers"}


@pytest.mark.parametrize("module", EXTRAS)
def test_an_extra_brings_what_the_file_asks_for(module: str) -> None:
    (asked,) = requirements_of(f"{module}:World")
    package, version = asked.split("==")
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert f"{package.partition('[')[0]}=={version}" in pins
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (offered,) = project["optional-dependencies"][EXTRAS[module]]
    name, _, least = offered.partition(">=")
    assert name == package
    assert _numbers(least) <= _numbers(version)


def test_every_world_that_asks_for_something_has_an_extra_or_stands_apart() -> None:
    files = (ROOT / "environments").rglob("*.py")
    asking = {".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files if requirements_of(f"{file}:X")}
    assert asking == set(EXTRAS) | APART
    assert all(len(requirements_of(f"{module}:World")) == 1 for module in APART)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]
