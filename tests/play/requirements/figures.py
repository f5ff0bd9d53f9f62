"""What the plays found: ``benchmarks/results/gateway_requirements.json``, a figure for each requirement, and its page.

Rule: figures are written by the run that found them, and by nobody else. A run takes the place of the one before.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
KEPT = "benchmarks/results/gateway_requirements.json"
PAGE = "benchmarks/results/gateway_requirements.md"
MOST_FAULTS = 40
"""Different ones that are kept of a figure."""
MOST_CHARS = 400
ELSEWHERE = {
    1: ("harnesses.md",),
    5: ("gateway_load.md", "gateway.md"),
    6: ("agents_kills.md",),
    7: ("late_rewards.md",),
}
"""Of the ten requirements: the pages of those that are shown by other runs."""

# Players count in threads.
_COUNTING = threading.Lock()


@dataclass
class Figure:
    """Of one requirement. Threads may share it."""

    number: int
    name: str
    done: str
    """What was played."""
    many: dict[str, float] = field(default_factory=dict)
    """What was counted, by what it is."""
    parts: dict[str, dict[str, int]] = field(default_factory=dict)
    """The same for parts of it, such as dialects: a table of its own."""
    held: str = ""
    """What held, in words with numbers."""
    faults: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def count(self, what: str, number: float = 1) -> None:
        with _COUNTING:
            self.many[what] = self.many.get(what, 0) + number

    def count_part(self, part: str, what: str) -> None:
        with _COUNTING:
            counts = self.parts.setdefault(part, {})
            counts[what] = counts.get(what, 0) + 1

    def told(self, what: str) -> str:
        return f"{self.many.get(what, 0):,.0f}"

    def largest(self, what: str, number: float) -> None:
        with _COUNTING:
            self.many[what] = max(self.many.get(what, number), number)

    def expect(self, held: bool, fault: str) -> bool:
        """Counts the fault where it did not hold."""
        if not held:
            with _COUNTING:
                self.faults[fault[:MOST_CHARS]] += 1
        return held

    def as_json(self) -> dict[str, Any]:
        faults = dict(self.faults.most_common(MOST_FAULTS))
        return {**asdict(self), "faults": faults, "num_faults": self.faults.total(), "seconds": round(self.seconds)}


HEAD = """# Ten requirements of the gateway that strangers can use

Written by `make play-requirements` (`python -m tests.play.requirements`). Redis, API, trainer, rollout worker, gateway
and the embedded engine are processes, as `gspo up` starts them, with their logs at `debug` and a redactor for what talk
keys say. The engine samples every token from a model of Qwen3's shape with its vocabulary of 151,669 entries, whose
weights are written so that it says drawn words and ends its turns, and can finish a call that a request forces; jobs
are trained while they are played. What agents do is drawn from the seed.

Other runs show the requirements {elsewhere}.

"""


def page(run: Mapping[str, Any]) -> str:
    links = {number: ", ".join(f"[{name}]({name})" for name in names) for number, names in ELSEWHERE.items()}
    elsewhere = ", ".join(f"{number} ({told})" for number, told in links.items())
    lines = [
        HEAD.format(elsewhere=elsewhere),
        f"Seed {run['seed']}, commit {run['commit']}, {run['date']}; Python {run['python']}, {run['cores']} cores "
        f"shared with other work, load {run['load'][0]} before and {run['load'][1]} after; {run['seconds']:,} s in "
        "all.\n\n",
        "| requirement | what was done | how many | what held | faults |\n|---|---|---|---|---|\n",
        *(f"| {' | '.join(_cells(one))} |\n" for one in run["figures"]),
        *(line for one in run["figures"] if one["parts"] for line in _parts(one)),
        *_faults(run["figures"]),
    ]
    return "".join(lines)


def _cells(one: Mapping[str, Any]) -> Sequence[str]:
    many = "; ".join(f"{name}: {_number(number)}" for name, number in one["many"].items())
    cells = [f"{one['number']} {one['name']}", one["done"], many, one["held"], f"{one['num_faults']:,}"]
    return [cell.replace("|", "\\|") for cell in cells]


def _parts(one: Mapping[str, Any]) -> Sequence[str]:
    columns = list(dict.fromkeys(what for counts in one["parts"].values() for what in counts))
    rows = [[part, *(f"{counts.get(what, 0):,}" for what in columns)] for part, counts in one["parts"].items()]
    head = [f"| {' | '.join(['', *columns])} |\n", f"|{'---|' * (1 + len(columns))}\n"]
    return [f"\n## {one['number']} {one['name']}\n\n", *head, *(f"| {' | '.join(row)} |\n" for row in rows)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.3f}"


def _faults(figures: Sequence[Mapping[str, Any]]) -> Sequence[str]:
    found = [(one["number"], text, times) for one in figures for text, times in one["faults"].items()]
    if not found:
        return []
    lines = [f"- {number}, {times} times: `{_plain(text)}`\n" for number, text, times in found]
    return ["\n## Faults\n\n", *lines]


def _plain(text: str) -> str:
    return text.replace("`", "'").replace("\n", " ")


def kept(run: Mapping[str, Any], root: Path = ROOT) -> None:
    (root / KEPT).write_text(json.dumps(run, indent=1, ensure_ascii=False) + "\n")
    (root / PAGE).write_text(page(run))
