"""Tests that are never set apart and never excused as a flake: what they judge is right or wrong on any machine.

Losses and all that is computed, lineage, provenance, formats and what a release left behind, the walls of security.
"""

from __future__ import annotations

PLACES = (
    *("tests/core/", "tests/environments/", "tests/oracles/", "tests/releases/", "tests/repo/", "tests/examples/"),
    *("tests/services/files/", "tests/services/state/test_lineage.py", "tests/services/state/test_oracle_bites.py"),
    *("tests/services/hosts/test_walls.py", "tests/services/hosts/test_handed_over.py"),
)


def is_never_excused(test: str) -> bool:
    return test.startswith(PLACES)
