"""A plugin of pytest: `-p tests.gate.shuffle --shuffle SEED` draws the order of the files and of the tests in each."""

from __future__ import annotations

import random

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, help="draw the order of files, and of tests in them, from this seed")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed: int | None = config.getoption("shuffle")
    if seed is None:
        return
    draw = random.Random(seed)
    by_file: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(str(item.path), []).append(item)
    files = list(by_file.values())
    draw.shuffle(files)
    for of_file in files:
        draw.shuffle(of_file)
    items[:] = [item for of_file in files for item in of_file]
