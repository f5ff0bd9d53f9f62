"""How long it took until a job had gone on after a fault, by kind: the table at the end of a run."""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import Any


class Recoveries:
    def __init__(self) -> None:
        self._struck: Counter[str] = Counter()
        self._seconds: dict[str, list[float]] = {}

    def struck(self, kind: str) -> None:
        self._struck[kind] += 1

    def recovered(self, kind: str, seconds: float) -> None:
        self._seconds.setdefault(kind, []).append(seconds)

    def total(self) -> int:
        return self._struck.total()

    def to_dict(self) -> dict[str, Any]:
        return {
            kind: {"count": count, "seconds": [round(one, 3) for one in self._seconds.get(kind, [])]}
            for kind, count in sorted(self._struck.items())
        }


def table(recoveries: dict[str, Any]) -> str:
    """As markdown."""
    rows = ["| fault | count | recovery, median s | worst s |", "|---|---:|---:|---:|"]
    for kind, found in recoveries.items():
        seconds = found["seconds"]
        shown = f"{median(seconds):.1f} | {max(seconds):.1f}" if seconds else "- | -"
        rows.append(f"| {kind} | {found['count']} | {shown} |")
    everything = [one for found in recoveries.values() for one in found["seconds"]]
    total = sum(found["count"] for found in recoveries.values())
    shown = f"{median(everything):.1f} | {max(everything):.1f}" if everything else "- | -"
    return "\n".join([*rows, f"| all | {total} | {shown} |"])
