"""Texts that are drawn: sentences that no two requests have in common."""

from __future__ import annotations

import random

SOME = (
    *("mend", "the", "parser", "of", "a", "river", "Größe", "fox 🦊", "tests", "docs", "fail", "before", "noon"),
    *("while", "two", "cats", "sleep", "naïve", "日本", "lines", "9.5", "x = y", "(so)", "and", "then", "again"),
)


def sentence(rng: random.Random, most: int = 12) -> str:
    words = [rng.choice(SOME) for _ in range(rng.randint(3, most))]
    return f"{' '.join(words)} (#{rng.getrandbits(40):010x})."
