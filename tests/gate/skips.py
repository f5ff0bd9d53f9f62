"""Which tests are known to be skipped, and for which reasons: what is skipped for a new reason is told.

The list is written by `python -m tests.gate.skips RECORD` from a recorded run.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

from tests.gate.ends import Ends

LIST = Path(__file__).parents[1] / "skips.txt"


def shape(reason: str) -> str:
    """A reason without what differs from run to run."""
    return re.sub(r"/\S+|\d+", "N", reason)


def told(skips: Counter[str]) -> list[str]:
    known = set(LIST.read_text().splitlines()) if LIST.exists() else set()
    new: Counter[str] = Counter()
    for reason, count in skips.items():
        if shape(reason) not in known:
            new[reason] += count
    return [f"SKIPPED {count} for a new reason: {reason[:160]}" for reason, count in new.most_common(3)]


def main() -> int:
    (record,) = map(Path, sys.argv[1:])
    reasons = sorted({shape(reason) for reason in Ends.read(record).skips()})
    LIST.write_text("".join(f"{reason}\n" for reason in reasons))
    return 0


if __name__ == "__main__":
    sys.exit(main())
