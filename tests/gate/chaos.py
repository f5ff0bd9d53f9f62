"""The chaos of the gate: one seed of a list, chosen by the tree, so that a tree always meets the same.

Every other seed is searched by `make verify`; one that failed and is mended joins `tests/chaos/seeds.txt`. What came
late may say that the machine was busy: the same seed is played once more.
"""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

from tests.gate.phases import Done, Phase, run

SEEDS = Path(__file__).parents[1] / "chaos" / "seeds.txt"
PYTHON = ".venv/bin/python"
LATE = 3
"""As in `tests/chaos/lateness.py`, which cannot be imported before anything is installed."""
NO_FINDING = "oracle: lengths of what was"
"""What the oracle tells of every run."""
LIMIT_S = 1800.0


def seeds(text: str) -> list[list[str]]:
    """The flags of each run."""
    return [shlex.split(line.partition("#")[0]) for line in text.splitlines() if line.partition("#")[0].strip()]


def phase(tree: str) -> Phase:
    """``tree``: the hash of what is tried."""
    listed = seeds(SEEDS.read_text())
    return Phase("chaos", [PYTHON, "-m", "tests.chaos", *listed[int(tree, 16) % len(listed)]], LIMIT_S)


def tree() -> str:
    try:
        said = subprocess.run(["git", "rev-parse", "HEAD^{tree}"], capture_output=True, text=True, check=False)
    except OSError:
        return "0"
    return said.stdout.strip() or "0"


def played(logs: Path) -> tuple[Done, str]:
    """How it ended, and what is to be told of a first try."""
    first = run(phase(tree()), logs)
    if first.status != LATE:
        return first, ""
    again = run(Phase("chaos again", first.phase.command, LIMIT_S), logs)
    return again, f"late at the first try: {(reasons(first) or ['no reason was given'])[0]}"


def reasons(done: Done) -> list[str]:
    """Why the run gave up, then what the oracle found wrong, which it says before all else."""
    said = done.log.read_text(errors="replace").splitlines()
    found = [line for line in said if line.startswith("oracle: ") and not line.startswith(NO_FINDING)]
    return [line for line in said if line.startswith("chaos: FAILED")] + found
