"""Each known way to build this wrongly is noticed by a short chaos run."""

from __future__ import annotations

import pytest

from tests.chaos.mutants import MUTANTS, ROOT, run


@pytest.mark.parametrize("name", MUTANTS)
def test_what_is_to_be_changed_is_still_there(name: str) -> None:
    mutant = MUTANTS[name]
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MUTANTS)
def test_what_is_built_wrongly_is_noticed(name: str) -> None:
    assert run(MUTANTS[name]), "it got through"
