"""Whole groups: dealt to updates together, and planned so that ranks have about equal work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import pytest

from gspo_core.batch import deal_minibatches
from gspo_core.batch.balance import KEYS_PER_TOKEN, plan_groups, room_of, work_of
from gspo_core.batch.packing import Ids, pack, plan_micro_batches
from gspo_core.batch.refine import Costs, refined

NUM_RANKS, BUDGET = 8, 16_384
Lengths = Callable[[np.random.Generator], int]


def around(mean: int) -> Lengths:
    return lambda rng: int(np.clip(rng.normal(mean, 0.3 * mean), 50, None))


def exponential(mean: int, longest: int) -> Lengths:
    return lambda rng: int(np.clip(rng.exponential(mean), 20, longest))


def groups_of(seed: int, number: int, members: int, prompt: int, answer: Lengths) -> tuple[list[Ids], list[int]]:
    rng = np.random.default_rng(seed)
    sequences, groups = [], []
    for group in range(number):
        shared = rng.integers(0, 150_000, prompt)
        for _ in range(members):
            sequences.append(np.concatenate([shared, rng.integers(0, 150_000, answer(rng))]))
            groups.append(group)
    return sequences, groups


def tokens_of(sequences: Sequence[Ids], members: Sequence[int]) -> int:
    return pack([sequences[m] for m in members], share=True).num_tokens if members else 0


def balance(sequences: Sequence[Ids], plan: Sequence[Sequence[Sequence[int]]]) -> float:
    """Mean over maximum of the work of ranks that wait for each other, over all rounds."""
    rounds = [
        [work_of(pack([sequences[m] for m in bin], share=True)) if bin else 0 for bin in r]
        for r in zip(*plan, strict=True)
    ]
    return sum(map(sum, rounds)) / sum(len(one) * max(one) for one in rounds)


# groups, members, prompt, answers; what may be laid out beyond the least that the budget allows
CASES = [(16, 16, 8000, around(2000), 1.15), (16, 16, 512, around(2000), 1.1), (64, 8, 300, around(600), 1.1)]


@pytest.mark.parametrize("case", CASES, ids=["long prompts", "short prompts", "small groups"])
def test_ranks_have_equal_work_and_prompts_are_laid_out_seldom(case: tuple[int, int, int, Lengths, float]) -> None:
    number, members, prompt, answer, slack = case
    sequences, groups = groups_of(7, number, members, prompt, answer)
    laid_out, balances = 0, []
    for share in deal_minibatches(groups, 4, seed=3, step=0):
        some = [sequences[index] for index in share]
        plan = plan_groups(some, [groups[index] for index in share], BUDGET, share=True, num_ranks=NUM_RANKS)
        assert sorted(chain.from_iterable(chain.from_iterable(plan))) == list(range(len(some)))
        assert all(room_of(pack([some[m] for m in one], share=True)) <= BUDGET for rank in plan for one in rank if one)
        laid_out += sum(tokens_of(some, one) for rank in plan for one in rank)
        balances.append(balance(some, plan))
    assert np.mean(balances) > 0.95
    assert laid_out < slack * least(sequences, groups, prompt)


def least(sequences: Sequence[Ids], groups: Sequence[int], prompt: int) -> int:
    """Tokens to lay out if every group were cut as seldom as the budget allows."""
    total = 0
    for group in set(groups):
        own = [len(ids) - prompt for ids, other in zip(sequences, groups, strict=True) if other == group]
        rest = sum(own) + len(own) * prompt // KEYS_PER_TOKEN
        total += sum(own) + prompt * -(-rest // (BUDGET - prompt))
    return total


def test_scattered_groups_are_laid_out_more_often() -> None:
    """The test above can tell: without groups it fails."""
    sequences, groups = groups_of(7, 16, 16, 8000, around(2000))
    laid_out = 0
    for share in deal_minibatches([None] * len(sequences), 4, seed=3, step=0):
        some = [sequences[index] for index in share]
        plan = plan_micro_batches(some, BUDGET, share=True, num_ranks=NUM_RANKS)
        laid_out += sum(tokens_of(some, one) for rank in plan for one in rank)
        assert balance(some, plan) < 0.9
    assert laid_out > 1.4 * least(sequences, groups, 8000)


def test_an_update_gets_whole_groups() -> None:
    groups = [group for group in range(10) for _ in range(3)]
    shares = deal_minibatches(groups, 4, seed=1, step=2)
    assert sorted(chain.from_iterable(shares)) == list(range(30))
    owners = [{groups[index] for index in share} for share in shares]
    assert sum(map(len, owners)) == 10
    assert {len(one) for one in owners} == {2, 3}
    assert shares == deal_minibatches(groups, 4, seed=1, step=2)
    assert shares != deal_minibatches(groups, 4, seed=1, step=3)


def test_too_few_groups_for_the_updates_are_dealt_sequence_by_sequence() -> None:
    groups: list[int | None] = [0] * 8 + [1] * 8
    assert deal_minibatches(groups, 4, seed=1, step=2) == deal_minibatches([None] * 16, 4, seed=1, step=2)


@pytest.mark.parametrize("seed", range(12))
def test_every_sequence_is_planned_once_within_the_budget(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sequences, groups = groups_of(
        seed, int(rng.integers(1, 6)), int(rng.integers(1, 7)), int(rng.integers(0, 80)), around(60)
    )
    num_ranks, budget = int(rng.integers(1, 5)), int(rng.integers(40, 500))
    for share in (True, False):
        plan = plan_groups(sequences, groups, budget, share=share, num_ranks=num_ranks)
        assert len(plan) == num_ranks
        assert len({len(rank) for rank in plan}) == 1
        assert sorted(chain.from_iterable(chain.from_iterable(plan))) == list(range(len(sequences)))
        assert plan == plan_groups(sequences, groups, budget, share=share, num_ranks=num_ranks)
        for one in chain.from_iterable(plan):
            assert len(one) <= 1 or pack([sequences[m] for m in one], share=share).num_tokens <= budget


def test_gathered_keys_count() -> None:
    """A group of sixteen with a long prompt and short answers gathers eight times its tokens."""
    sequences, groups = groups_of(0, 1, 16, 8000, lambda _: 512)
    (bins,) = plan_groups(sequences, groups, BUDGET, share=True)
    assert len(bins) == 2
    (blind,) = plan_micro_batches(sequences, BUDGET, share=True)
    assert len(blind) == 1


# groups, members, prompt, mean answer; least balance. The longest of long prompts have a micro-batch for themselves and
# cost more than any that gathers keys for several members may.
LONG_TAILS = [(16, 16, 8000, 2000, 0.92), (16, 16, 512, 2000, 0.95), (64, 8, 300, 600, 0.95)]


@pytest.mark.parametrize("seed", [7, 8128])
@pytest.mark.parametrize("case", LONG_TAILS)
def test_a_few_long_answers_leave_ranks_with_equal_work(case: tuple[int, int, int, int, float], seed: int) -> None:
    """Each of the longest fills a micro-batch, and the others of its round are filled up to it."""
    number, members, prompt, answer, bound = case
    sequences, groups = groups_of(seed, number, members, prompt, exponential(answer, min(BUDGET - prompt, 12_000)))
    balances = []
    for share in deal_minibatches(groups, 4, seed=3, step=0):
        some = [sequences[index] for index in share]
        plan = plan_groups(some, [groups[index] for index in share], BUDGET, share=True, num_ranks=NUM_RANKS)
        assert sorted(chain.from_iterable(chain.from_iterable(plan))) == list(range(len(some)))
        assert all(
            room_of(pack([some[m] for m in one], share=True)) <= BUDGET for rank in plan for one in rank if len(one) > 1
        )
        assert all(any(one) for one in zip(*plan, strict=True)), "no round is without work"
        balances.append(balance(some, plan))
    assert np.mean(balances) > bound


def random_costs(rng: np.random.Generator, number: int, num_groups: int) -> Costs:
    work = rng.exponential(100, number)
    shared = rng.uniform(0, 60, num_groups)
    return Costs(rng.integers(0, num_groups, number).tolist(), work.tolist(), work.tolist(), shared, shared, 400.0)


def counted(members: Sequence[int], costs: Costs) -> float:
    groups = {costs.group[member] for member in members}
    return float(sum(costs.work[member] for member in members) + sum(costs.group_work[group] for group in groups))


@pytest.mark.parametrize("seed", range(30))
def test_a_refined_plan_holds_the_same_and_makes_ranks_wait_less(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_ranks, number = int(rng.integers(1, 5)), int(rng.integers(6, 40))
    costs = random_costs(rng, number, int(rng.integers(1, 6)))
    num_bins = num_ranks * -(-number // (2 * num_ranks))
    order = rng.permutation(number).tolist()
    bins = [order[place::num_bins] for place in range(num_bins)]
    found = refined(bins, num_ranks, costs)
    assert sorted(chain.from_iterable(found)) == list(range(number))
    assert len(found) <= num_bins
    assert len(found) % num_ranks == 0
    kept = {tuple(sorted(one)) for one in bins}
    assert all(len(one) <= 1 or counted(one, costs) <= costs.budget or tuple(sorted(one)) in kept for one in found), (
        "what it changes fits"
    )

    def waited(plan: Sequence[Sequence[int]]) -> float:
        return sum(sorted((counted(one, costs) for one in plan), reverse=True)[::num_ranks])

    assert waited(found) <= waited(bins) * (1 + 1e-9)
    assert found == refined(bins, num_ranks, costs)


def test_refining_fills_a_round_up_to_its_longest() -> None:
    costs = Costs([0] * 7, [90, 40, 40, 40, 40, 5, 5], [0.0] * 7, [0.0], [0.0], 1.0)
    found = refined([[0], [1], [2, 5], [3, 4, 6]], 2, costs)
    assert sorted(sum(costs.work[member] for member in one) for one in found)[::-1][::2] == [90, 40]
