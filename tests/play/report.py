"""What plays at length found: ``benchmarks/results/agents_play.json``, a row for each package and seed, and its page.

Rule: rows are written by the play that found them, and by nobody else. A row takes the place of that of the same
package, seed and length; one that is there, of the same commit and as many episodes, is not played again.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ladder.commit import commit_of
from tests.play.packages import PACKAGES, Package, python_of
from tests.play.tasks import LONGEST, MANY, SHORTEST
from tests.play.verdict import Tally

ROOT = Path(__file__).parents[2]
KEPT = "benchmarks/results/agents_play.json"
PAGE = "benchmarks/results/agents_play.md"
Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """What one row tells of, before it is played."""

    package: Package
    seed: int
    episodes: int
    is_long: bool
    commit: str

    def row(self, found: Tally, seconds: float) -> Row:
        return {
            "package": self.package.name,
            "seed": self.seed,
            "is_long": self.is_long,
            "commit": self.commit,
            "versions": {name: version_of(self.package, name) for name in self.package.shows},
            "seconds": round(seconds),
            "load": round(os.getloadavg()[0], 1),
            "cores": os.cpu_count() or 0,
            "python": platform.python_version(),
            **vars(found),
            "branches": dict(sorted(found.branches.items())),
            "features": dict(sorted(found.features.items())),
        }

    def has_place_of(self, row: Row) -> bool:
        return (row["package"], row["seed"], row["is_long"]) == (self.package.name, self.seed, self.is_long)

    def is_told_by(self, row: Row) -> bool:
        is_clean = "-" not in self.commit
        return self.has_place_of(row) and is_clean and (row["commit"], row["episodes"]) == (self.commit, self.episodes)


def commit_now() -> str:
    return commit_of(ROOT, (KEPT, PAGE))


def version_of(package: Package, name: str) -> str:
    script = f"from importlib.metadata import version; print(version({name!r}))"
    shown = subprocess.run([python_of(package), "-c", script], capture_output=True, text=True, check=True)
    return shown.stdout.strip()


class Record:
    def __init__(self, root: Path = ROOT) -> None:
        self._kept, self._page = root / KEPT, root / PAGE

    def rows(self) -> list[Row]:
        return json.loads(self._kept.read_text()) if self._kept.is_file() else []

    def row_of(self, run: Run) -> Row | None:
        """The one that tells of this run, if it was played."""
        return next((row for row in self.rows() if run.is_told_by(row)), None)

    def add(self, run: Run, row: Row) -> None:
        rows = [*(one for one in self.rows() if not run.has_place_of(one)), row]
        self._kept.write_text("[\n" + ",\n".join(json.dumps(one) for one in rows) + "\n]\n")
        self._page.write_text(page(rows))


HEAD = """# Unmodified packages play random episodes at the gateway

Written by `python -m tests.play --record` ({conditions}); `--seed SEED` plays the same again.
Each package, in an environment of its own and unmodified, plays episodes of a random policy over HTTP: the gateway's
own code before a real Redis, real episodes of two jobs at once, Qwen3's vocabulary of 151,669 entries.
Of every ten episodes each thing that a row's package does happens in one at least: parallel calls, a retry by the
package itself (503, a connection that breaks before the answer, an answer that is lost behind the gateway; by hand also
a stream that is torn), an edited history, a sub-agent, a second sample of an equal request, a compaction, other tools,
a handover. What the policy says and what tools return spell added tokens; the policy also samples them.

Judged from what is stored, against what the policy recorded as it sampled: ids and masks equal, each sampled token
trained in one branch, and the branches, counted by reason, those that the player says it caused; calls that were spoken
to be several arrive. What is sampled behind a stop text is not stored, and a sample of an equal request that nobody
went on from may be untrained (`agent.rejected`). A fault is an episode in which any of it does not hold.

"""
COLUMNS = (
    *("seed", "commit", "episodes", "turns", "sampled", "branches by reason", "retries", "parallel"),
    *("rendered again", "prompts", "s", "load", "faults"),
)
LONG = f"""
At a user's sizes: {MANY} turns at least; what the agent is told first has {SHORTEST} to {LONGEST:,} tokens beside its
tools.

"""
FOOT = """
`parallel`: turns with more than one call. `rendered again`: tokens that a branch read anew because no stored ids could
be gone on from, sub-agents left out. `prompts`: tokens of the shortest that began an episode, and of the longest.
`load`: of the machine, at the end of the row. smolagents tells the policy in words of its own what it called ("Calling
tools: ..."), so that nearly each of its turns begins a branch (`edited_history`), and reads its history anew.
`edited_history` of openai-agents counts its handovers too, which put other instructions before the same conversation
(`compacted` in rows of before 2026-11-27, as was a reminder that moved);
`assistant_message` are the turns behind one, whose history holds words that were sampled in another branch.
"""
# Of rows that were played before they were rebased: these names are not in the history any more.
REBASED = ("b1ae5f0593", "714bb684a7")
_FAULT = re.compile(r"episode (?P<number>\d+) \(\{.*?\}\): (?P<text>.*)", re.DOTALL)


def page(rows: Sequence[Row]) -> str:
    conditions = ", ".join(
        sorted({f"Python {one['python']}, {one['cores']} cores shared with other work" for one in rows})
    )
    text = HEAD.format(conditions=conditions) + _table([one for one in rows if not one["is_long"]])
    long = [one for one in rows if one["is_long"]]
    return text + (LONG + _table(long) if long else "") + FOOT + _rebased(rows) + _faults(rows)


def _rebased(rows: Sequence[Row]) -> str:
    names = [f"`{name}`" for name in REBASED if any(row["commit"].startswith(name) for row in rows)]
    if not names:
        return ""
    return f"Older rows name commits that were rebased, and are not in the history any more: {', '.join(names)}.\n"


def _faults(rows: Sequence[Row]) -> str:
    """Each row's, with the episodes that have the same one together."""
    lines = []
    for row in _in_order([one for one in rows if one["faults"]]):
        texts: dict[str, list[str]] = {}
        for fault in row["faults"]:
            found = _FAULT.match(fault)
            number, text = (found["number"], found["text"]) if found else ("?", fault)
            texts.setdefault(text.splitlines()[0].replace("`", "'"), []).append(number)
        for text, numbers in texts.items():
            episodes = f"episode{'s' * (len(numbers) > 1)} {', '.join(numbers)}"
            lines.append(f"- {row['package']}, seed {row['seed']}, `{row['commit']}`, {episodes}: `{text}`\n")
    return "\n## Faults\n\nThe first line of each.\n\n" + "".join(lines) if lines else ""


def _table(rows: Sequence[Row]) -> str:
    lines = ["| package | " + " | ".join(COLUMNS) + " |", "|---" * (1 + len(COLUMNS)) + "|"]
    lines += [f"| {' | '.join(_cells(row))} |" for row in _in_order(rows)]
    return "\n".join([*lines, ""])


def _in_order(rows: Sequence[Row]) -> list[Row]:
    order = list(PACKAGES)
    return sorted(rows, key=lambda one: (order.index(one["package"]), rows.index(one)))


def _cells(row: Row) -> list[str]:
    names = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
    branches = ", ".join(f"{reason} {number:,}" for reason, number in row["branches"].items())
    counts = [f"{row[name]:,}" for name in ("retries", "parallel", "rendered_again")]
    head = [names, str(row["seed"]), row["commit"], *(f"{row[name]:,}" for name in ("episodes", "turns", "tokens"))]
    prompts = f"{row['shortest']:,} to {row['longest']:,}"
    return [*head, branches, *counts, prompts, str(row["seconds"]), str(row["load"]), str(len(row["faults"]))]
