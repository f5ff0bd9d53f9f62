"""Each known way to build this wrongly is noticed by a short chaos run."""

from __future__ import annotations

import pytest

from tests.chaos.mutants import MUTANTS, run


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MUTANTS)
def test_what_is_built_wrongly_is_noticed(name: str) -> None:
    assert run(MUTANTS[name]), "it got through"
