"""Bounds that follow from a whole batch: M2PO's, the gates that do not starve a step, the effective sample size."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo_core.objective import BatchBounds, ObjectiveConfig, batch_bounds, policy_loss
from gspo_core.objective.batch_bounds import effective_share, k3, second_moment_bound
from gspo_core.objective.losses import stale_share
from tests.core.objective_support import OFF, random_example, run

VECTORS = Path(__file__).parent / "vectors"
CASES = {case["name"]: case for case in json.loads((VECTORS / "gspo_base.json").read_text())["cases"]}
M2PO = json.loads((VECTORS / "gspo_families.json").read_text())["families"]["m2po_mask"]


@pytest.mark.parametrize("entry", M2PO, ids=lambda entry: f"{entry['case']}-{entry['variant']}")
def test_the_second_moment_bound_keeps_what_the_other_implementation_keeps(entry: Any) -> None:
    given = CASES[entry["case"]]["inputs"]
    mask_BT = torch.tensor(given["mask"]) != 0
    squares_BT = (torch.tensor(given["old"]).double() - torch.tensor(given["behave"]).double()).square()
    bound = second_moment_bound(squares_BT[mask_BT], float(entry["variant"].split("=")[1]))
    kept_BT = mask_BT & (squares_BT <= bound)
    assert torch.equal(kept_BT, (torch.tensor(entry["kept_mask"]) != 0) & mask_BT)
    if float(squares_BT[mask_BT].mean()) >= float(entry["variant"].split("=")[1]):
        assert 0 < kept_BT.sum() < mask_BT.sum()


def test_the_mean_square_of_what_stays_is_below_the_bound_and_one_more_would_not_be() -> None:
    squares_N = torch.tensor([0.01, 0.5, 0.02, 0.03, 0.2], dtype=torch.float64)
    assert second_moment_bound(squares_N, 0.07) == pytest.approx(0.2)  # (0.01 + 0.02 + 0.03 + 0.2) / 4 = 0.065
    assert second_moment_bound(squares_N, 0.06) == pytest.approx(0.03)
    assert second_moment_bound(squares_N, 1e-9) == pytest.approx(0.01), "at least one stays"
    assert second_moment_bound(squares_N, 1.0) == pytest.approx(0.5)


def test_the_effective_sample_size_is_that_of_the_products_of_token_ratios() -> None:
    drifts = [torch.tensor([math.log(2.0), math.log(1.5)]), torch.tensor([0.0]), torch.tensor([]), torch.tensor([0.0])]
    weights = (3.0, 1.0, 1.0)  # the one without trained tokens does not count
    expected = sum(weights) ** 2 / sum(weight**2 for weight in weights) / len(weights)
    assert effective_share(drifts) == pytest.approx(expected)
    assert effective_share([]) == 1.0
    assert effective_share([torch.zeros(5)] * 4) == pytest.approx(1.0)
    assert effective_share([torch.full((10_000,), 1.0), torch.zeros(1)]) == pytest.approx(0.5), "no overflow"


def rows(*distances: float) -> list[Tensor]:
    """One drift of three tokens for each wanted mean log ratio."""
    return [torch.full((3,), distance, dtype=torch.float64) for distance in distances]


FED = ObjectiveConfig(k3_gate=0.05, outlier_gate=5.0, min_kept_frac=0.5)


def kept(bounds: BatchBounds, drifts: list[Tensor]) -> list[bool]:
    highest = math.inf if bounds.k3_gate is None else bounds.k3_gate
    farthest = math.inf if bounds.outlier_gate is None else bounds.outlier_gate
    return [bool(k3(one).mean() <= highest and one.abs().max() <= farthest) for one in drifts]


def test_odd_sequences_are_withheld_as_ever() -> None:
    drifts = rows(0.01, 0.02, -0.01, 2.0)
    bounds = batch_bounds(FED, drifts)
    assert (bounds.k3_gate, bounds.outlier_gate) == (0.05, 5.0)
    assert kept(bounds, drifts) == [True, True, True, False]


def test_where_the_policy_has_left_all_of_them_the_nearest_are_kept() -> None:
    drifts = rows(1.0, 0.8, 9.0, 0.01, -7.0)
    assert kept(batch_bounds(FED.model_copy(update={"min_kept_frac": None}), drifts), drifts) == [False] * 3 + [
        True,
        False,
    ]
    assert kept(batch_bounds(FED, drifts), drifts) == [True, True, False, True, False]


def test_an_outlier_gate_alone_does_not_starve_a_step_either() -> None:
    config = ObjectiveConfig(k3_gate=None, outlier_gate=0.5, min_kept_frac=0.6)
    assert kept(batch_bounds(config, rows(1.0, 0.8, 9.0)), rows(1.0, 0.8, 9.0)) == [True, True, False]


@pytest.mark.parametrize("keys", [{"min_kept_frac": 0.5, "k3_gate": 1e-3}, {"m2_bound": 0.01}], ids=str)
def test_a_batch_is_judged_as_a_whole_however_it_is_cut(keys: dict[str, Any]) -> None:
    config, example = ObjectiveConfig(**{**OFF, **keys}), random_example(3, num_rows=8)
    whole = run(config, example)
    drifts = [
        (proximal - behavior)[mask]
        for proximal, behavior, mask in zip(example.proximal, example.behavior, example.mask != 0, strict=True)
    ]
    bounds = batch_bounds(config, drifts)
    parts = []
    for row in range(len(example.mask)):
        one = example.rows(slice(row, row + 1))
        policy_BT = one.policy.clone().requires_grad_()
        loss, _ = policy_loss(
            config,
            policy_BT,
            one.mask,
            one.advantages,
            one.proximal,
            one.behavior,
            turn_ids_BT=one.turn_ids,
            staleness_BT=one.staleness,
            sequence_weights_B=one.weights,
            num_sequences=float(example.weights.sum()),
            bounds=bounds,
        )
        loss.backward()
        parts.append(policy_BT.grad)
    torch.testing.assert_close(torch.cat([part for part in parts if part is not None]), whole.grad)
    assert not torch.equal(whole.grad, run(ObjectiveConfig(**OFF), example).grad)


def test_a_stale_clip_lies_within_the_nominal_one_and_is_never_less_pessimistic() -> None:
    drifts_N = torch.tensor([0.0, 0.05, -0.1, 0.2, -0.3, 3.0], dtype=torch.float64)
    shares_N = stale_share(drifts_N, 0.1)
    assert shares_N.tolist() == pytest.approx([1, 1, 1, math.exp(-1 / 2), math.exp(-2), math.exp(-(29**2) / 2)])
    plain = ObjectiveConfig(**OFF, clip=0.05)
    narrow = plain.model_copy(update={"stale_clip": 0.02})
    differ = 0
    for seed in range(20):
        example = random_example(seed, num_rows=8)
        left, right = run(plain, example), run(narrow, example)
        assert right.loss >= left.loss - 1e-12
        differ += right.loss > left.loss
    assert differ
