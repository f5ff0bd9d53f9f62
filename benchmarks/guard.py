"""Is anything slower than it was? `python -m benchmarks.guard --against REVISION` (or the path of another checkout).

Each piece of work of `guard_workloads` runs in a process for each tree, the two in turns, so that what neighbours on
the machine do falls on both; what counts is the median of the rounds' ratios of CPU time. It ends with 1 where one is
beyond `--most`. A piece that one of the trees cannot run is named and counts for nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.guard_workloads import WORK

ROOT = Path(__file__).parents[1]
# The same tree twice was within 8 % of itself in five rounds on a machine with a load of 10 to 13.
MOST, ROUNDS = 1.15, 9


class Tree:
    """A process that does the work with the code of one checkout."""

    def __init__(self, path: Path) -> None:
        environment = os.environ | {"PYTHONPATH": str(path), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        # -P: else the folder of the script, which is ours, would come first.
        command = [sys.executable, "-P", str(Path(__file__).with_name("guard_workloads.py"))]
        self.process = subprocess.Popen(
            command, cwd=path, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, name: str) -> float | str:
        """CPU seconds, or why not."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{name}\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("{"):
                answer = json.loads(line)
                return str(answer["problem"]) if "problem" in answer else float(answer["cpu_s"])
        raise SystemExit(f"the process of a tree ended with {self.process.wait()} at: {name}")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


@dataclass
class Row:
    name: str
    before_s: list[float] = field(default_factory=list)
    now_s: list[float] = field(default_factory=list)
    problem: str = ""

    @property
    def ratio(self) -> float:
        return statistics.median(now / before for before, now in zip(self.before_s, self.now_s, strict=True))

    def __str__(self) -> str:
        if self.problem:
            return f"| {self.name} | | | {self.problem} |"
        before, now = (f"{statistics.median(times) * 1e3:.3f}" for times in (self.before_s, self.now_s))
        return f"| {self.name} | {before} | {now} | {self.ratio:.2f} |"


@contextlib.contextmanager
def checkout(against: str) -> Iterator[Path]:
    """A path as it is; a revision in a worktree that is gone afterwards."""
    if Path(against).is_dir():
        yield Path(against).resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(path), against], check=True)
        try:
            yield path
        finally:
            subprocess.run([*git, "remove", "--force", str(path)], check=True)


def compare(before: Path, now: Path, names: Sequence[str], num_rounds: int) -> list[Row]:
    trees, rows = {"before": Tree(before), "now": Tree(now)}, [Row(name) for name in names]
    try:
        # The first round of each makes what the piece needs, and warms up.
        for number in range(num_rounds + 1):
            order = list(trees) if number % 2 else list(trees)[::-1]
            for row in rows:
                took = {} if row.problem else {side: trees[side].run(row.name) for side in order}
                problems = [f"{side}: {one}" for side, one in took.items() if isinstance(one, str)]
                row.problem = row.problem or "; ".join(problems)
                if number and not row.problem:
                    row.before_s.append(float(took["before"]))
                    row.now_s.append(float(took["now"]))
    finally:
        for tree in trees.values():
            tree.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", required=True, help="a revision, or the path of a checkout")
    parser.add_argument("--most", type=float, default=MOST, help="the greatest ratio that is no finding")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    with checkout(arguments.against) as before:
        rows = compare(before, ROOT, list(WORK), arguments.rounds)
    slower = [row.name for row in rows if not row.problem and row.ratio > arguments.most]
    print(
        f"CPU ms of each piece of work, the median of {arguments.rounds} rounds, and the median of the rounds' ratios. "
        f"Python {platform.python_version()}, {os.cpu_count()} cores, load {load:.1f} before and "
        f"{os.getloadavg()[0]:.1f} after.\n\n| work | before | now | ratio |\n|---|---|---|---|"
    )
    print(*rows, sep="\n")
    print(f"\nBeyond {arguments.most:g}: {', '.join(slower) or 'nothing'}.")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
