"""How evenly do ranks work that wait for each other, and how often is a shared prompt laid out?

    python -m benchmarks.micro_batches [--seed N ...]

The planners themselves, without a model: 8 ranks, 16,384 tokens at once, four updates a step. `scattered` deals
sequences and cuts as releases before did; `whole groups` is what is done now. Balance is the mean over the maximum of
the work of the ranks in each round, over all rounds of an update; the mean of four updates. The least is what would be
laid out if each group were cut as seldom as the budget allows, gathered keys included. That leaves ranks idle in the
last round of an update, which costs more time than cutting some groups once more; the least of full rounds counts the
prompts of as many pieces as fill it (below it, a rank was left idle after all).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np

from gspo_core.batch import deal_minibatches
from gspo_core.batch.balance import KEYS_PER_TOKEN, plan_groups, work_of
from gspo_core.batch.packing import Ids, pack, plan_micro_batches

RESULTS = Path(__file__).parent / "results" / "micro_batches.md"
NUM_RANKS, BUDGET, UPDATES = 8, 16_384, 4
Spread = Literal["normal", "even", "exponential"]
CASES = [(16, 16, 8000, 2000), (16, 16, 512, 2000), (16, 16, 8000, 512), (64, 8, 300, 600)]
"""Groups, members, tokens of the prompt, mean tokens of an answer."""


def lengths(rng: np.random.Generator, spread: Spread, mean: int, number: int) -> list[int]:
    drawn = {
        "normal": lambda: np.clip(rng.normal(mean, 0.3 * mean, number), 50, None),
        "even": lambda: rng.uniform(mean / 2, 1.5 * mean, number),
        "exponential": lambda: np.clip(rng.exponential(mean, number), 20, 12_000),
    }[spread]()
    return [int(one) for one in drawn]


def batch(seed: int, case: tuple[int, int, int, int], spread: Spread) -> tuple[list[Ids], list[int]]:
    rng = np.random.default_rng(seed)
    num_groups, members, prompt, answer = case
    sequences: list[Ids] = []
    for _ in range(num_groups):
        shared = rng.integers(0, 150_000, prompt)
        for length in lengths(rng, spread, answer, members):
            sequences.append(np.concatenate([shared, rng.integers(0, 150_000, length)]))
    return sequences, [group for group in range(num_groups) for _ in range(members)]


def judge(plan: Sequence[Sequence[Sequence[int]]], sequences: Sequence[Ids]) -> tuple[int, float, float]:
    """Tokens laid out, and the balance of tokens and of work."""
    rounds = [
        [pack([sequences[m] for m in one], share=True) if one else None for one in r] for r in zip(*plan, strict=True)
    ]
    tokens = [[0 if one is None else one.num_tokens for one in r] for r in rounds]
    works = [[0.0 if one is None else work_of(one) for one in r] for r in rounds]
    return sum(map(sum, tokens)), _balance(tokens), _balance(works)


def _balance(rounds: Sequence[Sequence[float]]) -> float:
    return sum(map(sum, rounds)) / sum(len(one) * max(one) for one in rounds)


def measure(sequences: list[Ids], groups: list[int], *, are_whole: bool) -> tuple[int, float, float]:
    found = []
    for share in deal_minibatches(groups if are_whole else [None] * len(groups), UPDATES, seed=0, step=0):
        some, named = [sequences[i] for i in share], [groups[i] for i in share]
        if are_whole:
            plan = plan_groups(some, named, BUDGET, share=True, num_ranks=NUM_RANKS)
        else:
            plan = plan_micro_batches(some, BUDGET, share=True, num_ranks=NUM_RANKS)
        found.append(judge(plan, some))
    by_tokens, by_work = (float(np.mean([one[place] for one in found])) for place in (1, 2))
    return sum(one[0] for one in found), by_tokens, by_work


def least(sequences: list[Ids], groups: list[int], prompt: int) -> tuple[int, int]:
    """Tokens; and those where rounds are full."""
    answers, pieces, in_full_rounds = 0, 0, 0
    for share in deal_minibatches(groups, UPDATES, seed=0, step=0):
        number = 0
        for group in {groups[index] for index in share}:
            own = [len(sequences[index]) - prompt for index in share if groups[index] == group]
            answers += sum(own)
            number += -(-(sum(own) + len(own) * prompt // KEYS_PER_TOKEN) // (BUDGET - prompt))
        pieces += number
        # a short prompt leaves room for several groups in one micro-batch
        in_full_rounds += number if prompt < BUDGET // 4 else NUM_RANKS * -(-number // NUM_RANKS)
    return answers + prompt * pieces, answers + prompt * in_full_rounds


def rows(seed: int) -> list[str]:
    lines = []
    spreads: tuple[Spread, ...] = ("normal", "even", "exponential")
    for case, spread in product(CASES, spreads):
        sequences, groups = batch(seed, case, spread)
        floor, floor_of_rounds = least(sequences, groups, case[2])
        name = f"| {seed} | {case[0]} x {case[1]}, prompt {case[2]} | {case[3]}, {spread}"
        for what, are_whole in (("scattered", False), ("whole groups", True)):
            laid_out, by_tokens, by_work = measure(sequences, groups, are_whole=are_whole)
            found = f"{laid_out // 1000}k | {laid_out / floor:.2f} | {laid_out / floor_of_rounds:.2f}"
            found += f" | {by_tokens:.2f} | {by_work:.2f}"
            lines.append(f"{name} | {what} | {found} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, nargs="*", default=[2701, 8128])
    lines = [line for seed in parser.parse_args().seed for line in rows(seed)]
    head = [
        "| seed | batch | answers | dealt | laid out | to the least | of full rounds | balance of tokens | of work |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    text = "\n".join([*head, *lines])
    summary = (__doc__ or "").split("\n\n", 2)[2].strip()
    RESULTS.write_text(f"# Micro-batches over ranks\n\n{summary}\n\n{text}\n")
    print(text)


if __name__ == "__main__":
    main()
