"""Parsing holds although the collector finalises something that parses: tests that read our modules met that."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator

import pytest


class ParsesAtItsEnd:
    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        ast.parse("1 + 2 * 3")


@pytest.fixture
def eager_collector() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(50, 2, 2)
    yield
    gc.set_threshold(*before)


def test_a_finaliser_that_parses_does_not_disturb_a_parse(eager_collector: None) -> None:
    source = "value = [first + second * (third - fourth)]\n" * 200
    for _ in range(50):
        for _ in range(60):
            ParsesAtItsEnd()
        assert len(ast.parse(source).body) == 200
    assert gc.isenabled()
