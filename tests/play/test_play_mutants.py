"""What is built wrongly on purpose is built so: each change finds the one line that it changes."""

from __future__ import annotations

import pytest

from tests.play.mutants import MUTANTS, ROOT


@pytest.mark.parametrize("name", MUTANTS)
def test_the_line_that_a_mutant_changes_is_there_once(name: str) -> None:
    mutant = MUTANTS[name]
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1
