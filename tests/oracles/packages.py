"""Where `make test-oracles` puts other people's packages: apart from ours, and only looked at by the tests here."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / ".make" / "oracles"


def package(name: str) -> Path:
    """The folder in which the package lies; skips the test where nobody installed it."""
    found = FOLDER / name
    if not found.is_dir():
        pytest.skip(f"{name} is not there: make test-oracles")
    return found
