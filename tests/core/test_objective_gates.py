"""What a gate measures, and what it has no say over.

Each test was written for a mistake that no other test noticed; `docs/objective.md` states the rules.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gspo_core.objective import ObjectiveConfig, loss_metrics, policy_loss
from gspo_core.objective.inputs import prepare
from gspo_core.objective.weights import faded_before, make_weights
from tests.core.objective_support import OFF

MASK = torch.ones(2, 3)
ADVANTAGES = torch.tensor([1.0, -1.0], dtype=torch.float64)
LEVEL = torch.full((2, 3), -1.0, dtype=torch.float64)
# Each gate alone, with a bound that a drift of 0.5 in one direction or the other exceeds.
GATES: dict[str, dict[str, Any]] = {
    "k3": {"k3_gate": 0.01},
    "outlier": {"outlier_gate": 0.4},
    "geometric": {"geometric_gate": 1.05},
}


def only(gate: str, **keys: Any) -> ObjectiveConfig:
    return ObjectiveConfig(**{**OFF, **GATES[gate], **keys})


def kept(config: ObjectiveConfig, *, proximal: Tensor, behavior: Tensor, policy: Tensor = LEVEL) -> list[bool]:
    inputs = prepare(config, policy, MASK, ADVANTAGES, proximal, behavior, None, None, None, None)
    return make_weights(config, inputs).kept_BT.all(-1).tolist()


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_gate_looks_at_drift_in_both_directions(gate: str, sign: int) -> None:
    """Also where a single token drifts: the sampler thought it more likely, or less."""
    behavior = LEVEL.clone()
    behavior[1, 2] += sign * 0.5
    assert kept(only(gate), proximal=LEVEL, behavior=behavior) == [True, False]


@pytest.mark.parametrize("gate", GATES)
def test_a_gate_measures_from_what_the_ratio_is_anchored_to(gate: str) -> None:
    """With `anchor: proximal` from the proximal policy to the sampler, whatever the policy is now; with
    `anchor: behavior` from the policy to the sampler, whatever proximal policy a caller gives."""
    moved = LEVEL.clone()
    moved[1] += torch.tensor([0.5, 0.0, 0.0], dtype=torch.float64)
    anchored = only(gate, anchor="behavior", clip=0.02)
    assert kept(anchored, policy=moved, proximal=LEVEL, behavior=LEVEL) == [True, False]
    assert kept(anchored, policy=LEVEL, proximal=moved, behavior=LEVEL) == [True, True]
    assert kept(only(gate), policy=moved, proximal=LEVEL, behavior=LEVEL) == [True, True]
    assert kept(only(gate), policy=LEVEL, proximal=moved, behavior=LEVEL) == [True, False]


@pytest.mark.parametrize("keys", [{"outlier_gate": 0.4}, {"k3_gate": 0.01}, {"staleness_cap": 0}])
def test_the_pull_to_the_reference_obeys_no_gate(keys: dict[str, Any]) -> None:
    """Gates judge the sampler's data; what the policy may drift from the reference is none of their business."""
    config = ObjectiveConfig(**{**OFF, **keys, "kl_coef": 0.1})
    drifted = LEVEL + torch.tensor([[0.0], [0.5]], dtype=torch.float64)
    staleness = torch.tensor([[0] * 3, [1] * 3])

    def gradient(advantages: Tensor) -> Tensor:
        policy = LEVEL.clone().requires_grad_()
        reference = LEVEL + torch.tensor([0.2, -0.3, 0.1], dtype=torch.float64)
        loss, _ = policy_loss(config, policy, MASK, advantages, LEVEL, drifted, reference, staleness_BT=staleness)
        loss.backward()
        assert policy.grad is not None
        return policy.grad

    pull = 0.1 * (1 - torch.exp(torch.tensor([0.2, -0.3, 0.1], dtype=torch.float64))) / 3 / 2
    both = gradient(ADVANTAGES)
    torch.testing.assert_close(both[1], pull)  # withheld by the gate: nothing but the pull is left
    torch.testing.assert_close(gradient(torch.zeros(2, dtype=torch.float64)), pull.expand(2, 3))
    assert (both[0] - pull).abs().min() > 0.1


def weights(config: ObjectiveConfig, mismatch: Tensor, mask: Tensor) -> Tensor:
    inputs = prepare(config, LEVEL, mask, ADVANTAGES, LEVEL + mismatch, LEVEL, None, None, None, None)
    return make_weights(config, inputs).weights_BT


def test_what_follows_a_lost_token_counts_by_how_likely_that_still_is() -> None:
    """By hand. A rise before a token makes up for a fall and no more, small changes are noise, and what is not trained
    was not sampled."""
    endless = {"prefix_threshold": 0.2, "prefix_memory": 1e12}
    config = ObjectiveConfig(**{**OFF, "correction": "token", "correction_max": 2.0, **endless})
    mismatch = torch.tensor([[-1.0, 0.1, 0.6], [0.5, -0.2, 0.9]], dtype=torch.float64)
    expected = torch.tensor([[-1.0, -0.9, -0.4], [0.5, -0.2, math.log(2)]], dtype=torch.float64).exp()
    torch.testing.assert_close(weights(config, mismatch, MASK), expected)
    fading = config.model_copy(update={"prefix_memory": 4.0})
    faded = torch.tensor([[-1.0, -0.9, 0.6 - 0.75], [0.5, -0.2, math.log(2)]], dtype=torch.float64).exp()
    torch.testing.assert_close(weights(fading, mismatch, MASK), faded)
    plain = config.model_copy(update={"prefix_threshold": None})
    torch.testing.assert_close(weights(plain, mismatch, MASK), mismatch.exp().clamp(max=2.0))
    later = torch.tensor([[0.5, -1.0, 0.1], [0.0, 0.0, 0.0]], dtype=torch.float64)
    told = weights(config, later, MASK)
    torch.testing.assert_close(told[0], torch.tensor([0.5, -1.0, 0.1 - 0.5], dtype=torch.float64).exp())
    read = torch.tensor([[1, 0, 1], [1, 1, 1]])
    torch.testing.assert_close(weights(config, later, read)[0, 2], torch.tensor(0.1, dtype=torch.float64).exp())


@given(st.data(), st.integers(1, 40), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_what_came_before_fades_with_every_trained_token(data: st.DataObject, length: int, kept: float) -> None:
    values = data.draw(st.lists(st.floats(-3, 3), min_size=length, max_size=length))
    mask = data.draw(st.lists(st.booleans(), min_size=length, max_size=length))
    expected, sum_before = [], 0.0
    for value, is_trained in zip(values, mask, strict=True):
        expected.append(sum_before if is_trained else 0.0)
        sum_before = kept * sum_before + value if is_trained else sum_before
    found = faded_before(torch.tensor([values], dtype=torch.float64), torch.tensor([mask]), kept)
    torch.testing.assert_close(found[0], torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("threshold", [0.0, 0.3])
def test_nothing_counts_more_for_what_came_before_it(threshold: float) -> None:
    config = ObjectiveConfig(**{**OFF, "correction": "token", "prefix_threshold": threshold})
    plain = config.model_copy(update={"prefix_threshold": None})
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        mismatch = torch.randn((2, 3), generator=generator, dtype=torch.float64)
        assert (weights(config, mismatch, MASK) <= weights(plain, mismatch, MASK) + 1e-12).all()
        torch.testing.assert_close(weights(config, mismatch, MASK)[:, 0], weights(plain, mismatch, MASK)[:, 0])


def test_a_gate_may_be_closer_on_one_side() -> None:
    """MLPerf's band: a drift of 0.0015 is allowed upwards and refused downwards."""
    config = ObjectiveConfig(**{**OFF, "geometric_gate": [0.999, 1.002]})
    assert (config.geometric_gate_low, config.geometric_gate) == (0.999, 1.002)
    drift = torch.tensor([[0.0015], [-0.0015]], dtype=torch.float64)
    assert kept(config, proximal=LEVEL + drift, behavior=LEVEL) == [True, False]
    even = ObjectiveConfig(**{**OFF, "geometric_gate": 1.002})
    assert kept(even, proximal=LEVEL + drift, behavior=LEVEL) == [True, True]


@pytest.mark.parametrize(
    ("given", "clamp"),
    [
        ({"loss": "cispo", "clip": 0.2}, None),
        ({"loss": "vespo"}, None),
        ({"loss": "dppo_tv", "dppo_delta": 1.0}, None),
        ({"clip": 0.2}, 10.0),
        ({"clip": 0.2, "log_ratio_clamp": None}, None),
    ],
    ids=str,
)
def test_the_factor_of_the_kl_is_bounded_only_where_the_loss_says_so(
    given: dict[str, Any], clamp: float | None
) -> None:
    """At a log ratio of 12; with advantage 0 the KL is all that there is."""
    config = ObjectiveConfig(**{**OFF, "kl_coef": 1.0, "kl_unbiased": True, **given})
    policy = torch.full((1, 1), -1.0, dtype=torch.float64, requires_grad=True)
    proximal, reference = torch.full_like(policy, -13.0), torch.full_like(policy, -1.5)
    loss, stats = policy_loss(
        config,
        policy,
        torch.ones(1, 1),
        torch.zeros(1, dtype=torch.float64),
        proximal.detach(),
        None,
        reference.detach(),
    )
    loss.backward()  # type: ignore[no-untyped-call]
    value, slope = math.expm1(-0.5) + 0.5, 1 - math.exp(-0.5)
    ratio = math.exp(12.0 if clamp is None else clamp)
    assert policy.grad is not None
    assert float(loss.detach()) == pytest.approx(ratio * value)
    assert float(policy.grad) == pytest.approx(ratio * (slope + (value if clamp is None else 0.0)))
    assert loss_metrics(stats, config)["gspo/kl_ratio_clamped"] == (0 if clamp is None else 1)
