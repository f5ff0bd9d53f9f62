"""What callers may hand to the loss: tensors, arrays or lists give the same numbers, and padding is never looked at."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gspo_core.objective import ObjectiveConfig, ObjectiveError, loss_denominators, loss_metrics, policy_loss
from tests.core.objective_support import CONFIGS, Example, assert_same, random_example, run


def _given(example: Example, convert: Any) -> dict[str, Any]:
    return {
        "proximal_logprobs_BT": convert(example.proximal),
        "behavior_logprobs_BT": convert(example.behavior),
        "turn_ids_BT": convert(example.turn_ids),
        "staleness_BT": convert(example.staleness),
        "sequence_weights_B": convert(example.weights),
    }


@pytest.mark.parametrize("convert", [torch.Tensor.tolist, torch.Tensor.numpy], ids=["lists", "arrays"])
@pytest.mark.parametrize("name", ["sequence", "turn", "token"])
def test_lists_and_arrays_give_what_tensors_give(name: str, convert: Any) -> None:
    example = random_example(3)
    policy = example.policy.clone().requires_grad_()
    loss, _ = policy_loss(
        CONFIGS[name], policy, convert(example.mask), convert(example.advantages), **_given(example, convert)
    )
    expected = run(CONFIGS[name], example)
    assert float(loss.detach()) == expected.loss, "a list keeps all digits of a float64 policy"
    assert torch.equal(torch.autograd.grad(loss, policy)[0], expected.grad)
    assert loss_denominators(convert(example.mask)) == loss_denominators(example.mask)


@pytest.mark.parametrize("advantages", [["high", "low"], [1.0, None], [[1.0], [1.0, 2.0]]])
def test_what_is_no_table_of_numbers_is_named(advantages: Any) -> None:
    with pytest.raises(ObjectiveError, match="advantages is no tensor"):
        policy_loss(ObjectiveConfig(), torch.zeros(2, 3, requires_grad=True), np.ones((2, 3)), advantages)


def test_a_policy_without_a_gradient_path_is_named() -> None:
    given: Any = [[-1.0, -2.0]]
    with pytest.raises(ObjectiveError, match="policy_logprobs_BT carries the gradient"):
        policy_loss(ObjectiveConfig(), given, [[1, 1]], [1.0])


@pytest.mark.parametrize("garbage", [0.5, float("nan")])
@pytest.mark.parametrize("name", CONFIGS)
def test_rows_of_weight_zero_are_padding_whatever_they_hold(name: str, garbage: float) -> None:
    example = random_example(11)
    kept = example.change(weights=torch.where(example.weights > 0, example.weights, 1.0))

    def padded(field: str, value: torch.Tensor) -> torch.Tensor:
        filling: Any = {"weights": 0, "mask": True, "turn_ids": 1, "staleness": 40}.get(field, garbage)
        return torch.cat([value, torch.full_like(value[:2], filling)])

    expected, found = run(CONFIGS[name], kept), run(CONFIGS[name], kept.map(padded))
    assert_same(expected, found, found.grad[:-2])
    assert not found.grad[-2:].any()
    assert loss_metrics(found.stats, CONFIGS[name]).keys() == loss_metrics(expected.stats, CONFIGS[name]).keys()
