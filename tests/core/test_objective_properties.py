"""What must hold for every loss, ratio and aggregation, with gates and corrections on.

Each property is a plain function of a configuration and a seed. It is run on the loss as it is, and then, in the table
of mutations at the end, on a loss with one mistake in it, where it must fail.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gspo_core.codec import decode, encode
from gspo_core.objective import LossStats, NonFiniteInput, ObjectiveConfig, ObjectiveError, loss_metrics, policy_loss
from gspo_core.objective import inputs as inputs_module
from gspo_core.objective import loss as loss_module
from gspo_core.objective import losses as losses_module
from gspo_core.objective import pooling as pooling_module
from gspo_core.objective import stats as stats_module
from gspo_core.objective import weights as weights_module
from gspo_core.objective.pooling import Pool
from gspo_core.objective.stats import BUCKETS, SEQUENCE_SUMS, TOKEN_SUMS
from gspo_core.types import Branch, EpisodeKey, Outcome, Segment, StopReason, Trajectory
from tests.core.objective_support import CONFIGS, OFF, Example, Result, assert_same, random_example, run

Property = Callable[[ObjectiveConfig, int], None]
GARBAGE = [7.0, math.nan, math.inf, -math.inf, -1e30]


# Cutting, splitting, padding, ordering


def segmentation_is_free(config: ObjectiveConfig, seed: int) -> None:
    """Cutting episodes into segments anywhere, also inside a turn, changes nothing."""
    rng = np.random.default_rng(seed)
    example = random_example(seed)
    versions = np.cumsum(rng.random(example.mask.shape) < 0.15, axis=1)
    turns = np.minimum(example.turn_ids.numpy(), 40)
    whole = run(config, _stitched(example, versions, turns, cuts=None))
    cuts = rng.random(example.mask.shape) < rng.uniform(0, 1)
    assert_same(run(config, _stitched(example, versions, turns, cuts)), whole, tolerance=0)


def _stitched(example: Example, versions: Any, turns: Any, cuts: Any) -> Example:
    """The example as it comes out of its episodes' segments; without cuts, one segment per turn and version."""
    rows = [_episode(example, row, versions, turns, cuts) for row in range(len(example.mask))]
    branches = [branch for trajectory in rows for branch in [Branch(trajectory.segments)]]
    for branch, trajectory in zip(branches, rows, strict=True):
        assert sum(segment.num_actions for segment in trajectory.segments) == branch.num_actions
        parts = sum(segment.logprob_sum for segment in trajectory.segments)
        assert abs(parts - branch.behavior_logprobs.sum(dtype="float64")) < 1e-12
    return example.change(
        behavior=torch.tensor(np.stack([branch.behavior_logprobs for branch in branches]).astype(np.float64)),
        mask=torch.tensor(np.stack([branch.action_mask for branch in branches])),
        turn_ids=torch.tensor(np.stack([branch.turn_ids for branch in branches])),
        staleness=torch.tensor(versions.max() - np.stack([branch.versions for branch in branches])),
    )


def _episode(example: Example, row: int, versions: Any, turns: Any, cuts: Any) -> Trajectory:
    num_tokens = example.mask.shape[1]
    changes = (np.diff(versions[row]) != 0) | (np.diff(turns[row]) != 0)
    if cuts is not None:
        changes |= cuts[row, 1:]
    bounds = [0, *(np.flatnonzero(changes) + 1).tolist(), num_tokens]
    segments = []
    for index, (start, end) in enumerate(itertools.pairwise(bounds)):
        segments.append(
            Segment(
                key=EpisodeKey("job", 0, row),
                attempt=0,
                branch=0,
                index=index,
                turn=int(turns[row, start]),
                version=int(versions[row, start]),
                temperature=1.0,
                engine_id="engine",
                token_ids=np.arange(start, end, dtype=np.int32),
                action_mask=example.mask[row, start:end].numpy(),
                behavior_logprobs=example.behavior[row, start:end].numpy().astype(np.float32),
                outcome=Outcome(StopReason.COMPLETED, 1.0) if end == num_tokens else None,
            )
        )
    return Trajectory(tuple(segments))


def splitting_is_free(config: ObjectiveConfig, seed: int) -> None:
    """Micro-batches (and ranks) sum to the whole, statistics too; one is empty, one may be fully masked or gated."""
    rng = np.random.default_rng(seed)
    example = random_example(seed, num_rows=7)
    whole = run(config, example, **example.denominators)
    parts = rng.integers(0, 4, len(example.mask))
    loss, grad, stats = 0.0, torch.zeros_like(example.policy), LossStats.zero()
    for part in range(5):  # the last is always empty
        rows = np.flatnonzero(parts == part)
        result = run(config, example.rows(rows), **example.denominators)
        loss, stats = loss + result.loss, stats + result.stats
        grad[rows] = result.grad
    assert_same(Result(loss, grad, stats), whole)


def padding_is_free(config: ObjectiveConfig, seed: int) -> None:
    """Columns on either side and rows of weight 0, whatever they hold, change nothing."""
    rng = np.random.default_rng(seed)
    example = random_example(seed)
    left, right, below = (int(number) for number in rng.integers(0, 4, 3))

    def pad(name: str, value: Tensor) -> Tensor:
        fill = 0 if name in ("mask", "weights") else int(rng.integers(1, 9))
        shape = (left, right, 0, below) if value.ndim == 2 else (0, below)
        return torch.nn.functional.pad(value, shape, value=fill)

    padded = run(config, example.map(pad))
    inside = padded.grad[: len(example.mask), left : left + example.mask.shape[1]]
    assert_same(Result(padded.loss, inside, padded.stats), run(config, example))
    assert padded.grad.count_nonzero() == inside.count_nonzero()


def masked_positions_are_inert(config: ObjectiveConfig, seed: int) -> None:
    """Garbage, NaN and infinity at masked positions of every input change nothing, to the bit."""
    rng = np.random.default_rng(seed)
    example = random_example(seed)

    def spoil(name: str, value: Tensor, zero: bool) -> Tensor:
        if name in ("mask", "weights"):
            return value
        if not value.is_floating_point():
            noise = torch.tensor(rng.integers(-50, 50, value.shape))
        else:
            noise = torch.tensor(rng.choice(GARBAGE, value.shape))
        return torch.where(example.mask, value, torch.zeros_like(noise) if zero else noise)

    clean = run(config, example.map(lambda name, value: spoil(name, value, True)))
    spoiled = run(config, example.map(lambda name, value: spoil(name, value, False)))
    assert_same(spoiled, clean, tolerance=0)
    assert not spoiled.grad[~example.mask].any()
    assert math.isfinite(spoiled.loss)


def order_is_free(config: ObjectiveConfig, seed: int) -> None:
    """Permuted rows permute the gradient and nothing else."""
    example = random_example(seed)
    order = torch.tensor(np.random.default_rng(seed).permutation(len(example.mask)))
    permuted = run(config, example.rows(order))
    plain = run(config, example)
    assert_same(permuted, Result(plain.loss, plain.grad[order], plain.stats))


# What a loss is


def gating_is_local(config: ObjectiveConfig, seed: int) -> None:
    """Withholding one sequence leaves every other gradient bit for bit as it was; withholding all gives exactly 0."""
    example = random_example(seed)
    config = config.model_copy(update={"kl_coef": 0.0, "kl_unbiased": False})
    row = 1 + seed % (len(example.mask) - 1)
    before = run(config, example)
    gated = example.behavior.clone()
    gated[row] -= torch.where(example.mask[row], 9.0, 0.0)
    after = run(config, example.change(behavior=gated))
    others = torch.arange(len(example.mask)) != row
    assert not after.grad[row].any(), "the gate did not act"
    assert torch.equal(after.grad[others], before.grad[others])
    nothing = run(config, example.change(behavior=torch.where(example.mask, example.behavior - 9.0, 0.0)))
    assert nothing.loss == 0
    assert not nothing.grad.any()


def withheld_tokens_leave_the_rest(config: ObjectiveConfig, seed: int) -> None:
    """A token beyond the staleness cap changes neither lengths nor ratios nor, per token, any other gradient."""
    example = random_example(seed)
    assert config.staleness_cap is not None
    fresh = example.change(staleness=torch.zeros_like(example.staleness))
    stale = fresh.staleness.clone()
    stale[:, seed % stale.shape[1]] = config.staleness_cap + 1
    before, after = run(config, fresh), run(config, fresh.change(staleness=stale))
    for name in ("tokens", "clipped_positive", "clipped_negative", "log_ratio", "log_ratio_squared", "weight"):
        assert after.stats.total(name) == pytest.approx(before.stats.total(name), abs=1e-12)
    per_token = config.loss in ("clip", "sapo") and config.gradient == "per_token" and not config.kl_coef
    if per_token:
        left = stale <= config.staleness_cap
        assert torch.equal(after.grad[left], before.grad[left])
        assert not after.grad[~left].any()


def single_step_is_reinforce(config: ObjectiveConfig, seed: int) -> None:
    """In the first update the ratio is 1, nothing is clipped, and the gradient is -w A times the token's share."""
    example = random_example(seed)
    example = example.change(proximal=example.policy)
    plain = run(config, example)
    explicit = run(config, example, proximal_logprobs_BT=None)
    assert_same(explicit, plain, tolerance=0)
    metrics = loss_metrics(plain.stats, config)
    if not example.mask.any():
        return
    assert metrics["gspo/ratio_mean"] == pytest.approx(1, abs=1e-12)
    assert metrics["gspo/clip_frac"] == 0
    inputs, weights = _weights(config, example)
    share = loss_module._scale(config, inputs, None, None) * weights.kept_BT * weights.weights_BT
    expected = -share * inputs.advantages_BT
    if config.loss == "clip":
        assert plain.loss == pytest.approx(float(expected.sum()), abs=1e-12)
    torch.testing.assert_close(plain.grad, expected, rtol=1e-12, atol=1e-12)


def _weights(config: ObjectiveConfig, example: Example) -> tuple[Any, Any]:
    inputs = inputs_module.prepare(
        config,
        example.policy,
        example.mask,
        example.advantages,
        example.proximal,
        example.behavior,
        None,
        example.turn_ids,
        example.staleness,
        example.weights,
    )
    return inputs, weights_module.make_weights(config, inputs)


def forms_agree(config: ObjectiveConfig, seed: int) -> None:
    """Shared = per token for uniform advantages and weights; one turn = the sequence; (B,) = (B, T)."""
    example = random_example(seed, per_token=False)
    uniform = example.change(staleness=torch.zeros_like(example.staleness))
    update = {"correction": "geometric_truncate" if config.anchor == "proximal" else "none"}
    per_token = config.model_copy(update={**update, "gradient": "per_token"})
    shared = config.model_copy(update={**update, "gradient": "shared"})
    assert_same(run(shared, uniform), run(per_token, uniform))
    rows = uniform.change(advantages=uniform.advantages[:, 0])
    assert_same(run(per_token, rows), run(per_token, uniform))
    one_turn = uniform.change(turn_ids=torch.zeros_like(uniform.turn_ids))
    for form in (shared, per_token):
        turn, sequence = (form.model_copy(update={"ratio": ratio}) for ratio in ("turn", "sequence"))
        assert_same(run(turn, one_turn), run(sequence, one_turn))


def one_token_sequences_are_tokens(config: ObjectiveConfig, seed: int) -> None:
    """With one trained token per sequence the sequence ratio is the token ratio."""
    example = random_example(seed, num_tokens=6)
    only = torch.zeros_like(example.mask)
    only[:, seed % 6] = example.mask[:, seed % 6]
    example = example.change(mask=only)
    token, sequence = (config.model_copy(update={"ratio": ratio}) for ratio in ("token", "sequence"))
    if config.anchor == "behavior":  # compensation is defined on pooled ratios
        sequence = sequence.model_copy(update={"compensate": False})
    assert_same(run(token, example), run(sequence, example))


def synchronous_is_plain(config: ObjectiveConfig, seed: int) -> None:
    """Behaviour = proximal, whatever the versions: weights 1, gates open, the plain loss; versions say nothing."""
    example = random_example(seed)
    assert config.staleness_cap is not None
    fresh = example.change(behavior=example.proximal, staleness=example.staleness % (config.staleness_cap + 1))
    result = run(config, fresh)
    off = {key: value for key, value in OFF.items() if not (key == "correction" and config.anchor == "behavior")}
    plain = run(config.model_copy(update={**off, "geometric_gate": None, "staleness_cap": None}), fresh)
    assert result.loss == plain.loss
    assert torch.equal(result.grad, plain.grad)
    relabelled = run(config, fresh.change(staleness=(fresh.staleness + 1) % (config.staleness_cap + 1)))
    assert relabelled.loss == result.loss
    assert torch.equal(relabelled.grad, result.grad)


def scale_of_advantages(config: ObjectiveConfig, seed: int) -> None:
    """A positive factor on the advantages scales loss and gradient; advantage 0 gives exactly 0."""
    example = random_example(seed)
    config = config.model_copy(update={"kl_coef": 0.0, "kl_unbiased": False})
    factor = 0.25 + seed % 7
    scaled = run(config, example.change(advantages=factor * example.advantages))
    plain = run(config, example)
    assert scaled.loss == pytest.approx(factor * plain.loss, rel=1e-12, abs=1e-14)
    torch.testing.assert_close(scaled.grad, factor * plain.grad, rtol=1e-12, atol=1e-14)
    zero = run(config, example.change(advantages=0 * example.advantages))
    assert zero.loss == 0
    assert not zero.grad.any()


def constant_shift(config: ObjectiveConfig, seed: int) -> None:
    """A constant per token on policy, proximal and behaviour changes no loss of the clip type."""
    example = random_example(seed)
    shift = torch.tensor(np.random.default_rng(seed).normal(0, 0.5, example.mask.shape))
    moved = run(
        config,
        example.change(
            policy=example.policy + shift,
            proximal=example.proximal + shift,
            behavior=example.behavior + shift,
            reference=example.reference + shift,
        ),
    )
    plain = run(config, example)
    torch.testing.assert_close(moved.grad, plain.grad, rtol=1e-9, atol=1e-12)
    if config.loss not in ("cispo", "vespo"):
        assert moved.loss == pytest.approx(plain.loss, rel=1e-9, abs=1e-12)


def gradient_is_the_derivative(config: ObjectiveConfig, seed: int) -> None:
    """Central differences of the loss, for forms whose loss is a function of the policy alone."""
    example = random_example(seed)
    gradient = run(config, example).grad
    step = 1e-7
    for row, token in np.argwhere(example.mask.numpy())[:: max(1, int(example.mask.sum()) // 6)]:
        values = []
        for sign in (1, -1):
            policy = example.policy.clone()
            policy[row, token] += sign * step
            values.append(run(config, example.change(policy=policy)).loss)
        numeric = (values[0] - values[1]) / (2 * step)
        assert numeric == pytest.approx(float(gradient[row, token]), abs=2e-7)


def _ungated(config: ObjectiveConfig) -> ObjectiveConfig:
    gates = ("k3_gate", "outlier_gate", "geometric_gate", "off_policy_gate", "staleness_cap")
    return config.model_copy(update=dict.fromkeys(gates))


def clip_has_a_side(config: ObjectiveConfig, seed: int) -> None:
    """Only (high, A > 0) and (low, A < 0) lose their gradient; exactly at a bound it passes."""
    rng = np.random.default_rng(seed)
    num_tokens = int(rng.integers(1, 6))
    low, high = config.clip_low, config.clip_high
    ratios = [1 + 1.01 * high, 1 + 0.99 * high, 1 - 1.01 * low, 1 - 0.99 * low, 1 + high, 1 - low]
    rows = [(ratio, sign) for ratio in ratios for sign in (1.0, -1.0)]
    proximal = torch.tensor(-rng.exponential(1.0, (len(rows), num_tokens)))
    policy = proximal + torch.tensor([[math.log(ratio)] for ratio, _ in rows])
    advantages = torch.tensor([sign for _, sign in rows])
    policy.requires_grad_()
    loss, stats = policy_loss(_ungated(config), policy, torch.ones_like(proximal), advantages, proximal)
    loss.backward()
    assert policy.grad is not None
    passes = policy.grad.abs().sum(-1) > 0
    expected = [not ((ratio > 1 + high and sign > 0) or (ratio < 1 - low and sign < 0)) for ratio, sign in rows]
    assert passes.tolist() == expected
    assert stats.total("sequences_clipped") == 2
    assert stats.total("clipped_positive") == num_tokens == stats.total("clipped_negative")


def clip_ignores_the_sampler(config: ObjectiveConfig, seed: int) -> None:
    """Whatever the recorded log-probs say, clip decisions on the proximal policy stay."""
    example = random_example(seed)
    moved = example.behavior + torch.tensor(np.random.default_rng(seed).normal(0, 2, example.mask.shape))
    before, after = run(config, example), run(config, example.change(behavior=moved))
    for name in ("clipped_positive", "clipped_negative", "capped", "log_ratio"):
        assert before.stats.total(name) == after.stats.total(name)


def lengths_weigh_alike(config: ObjectiveConfig, seed: int) -> None:
    """Lengths 20, 200, 2000 with one advantage: a third each by sequence; by token, their share of tokens."""
    lengths = torch.tensor([20, 200, 2000])
    mask = torch.arange(2000) < lengths.unsqueeze(-1)
    policy = torch.full((3, 2000), -1.0, dtype=torch.float64, requires_grad=True)
    config = _ungated(config).model_copy(update={"correction": "none", "kl_coef": 0.0, "kl_unbiased": False})
    loss, _ = policy_loss(config, policy, mask, torch.full((3,), 0.3, dtype=torch.float64))
    loss.backward()
    assert policy.grad is not None
    mass = policy.grad.abs().sum(-1)
    shares = {"sequence": torch.ones(3), "token": lengths, "sum": lengths}[config.aggregate].double()
    torch.testing.assert_close(mass / mass.sum(), shares / shares.sum(), rtol=1e-12, atol=1e-12)
    total = {"sequence": 0.3, "token": 0.3, "sum": 0.3 * 2220 / 3}[config.aggregate]
    assert float(mass.sum()) == pytest.approx(total, rel=1e-12)


def repeating_a_sequence_keeps_its_ratio(config: ObjectiveConfig, seed: int) -> None:
    """The log ratio is a mean: a sequence written twice has the same one."""
    example = random_example(seed)
    example = example.change(turn_ids=torch.zeros_like(example.turn_ids))
    twice = example.map(lambda name, value: torch.cat([value, value], -1) if value.ndim == 2 else value)
    one, two = run(config, example).stats, run(config, twice).stats
    assert two.total("log_ratio") == pytest.approx(one.total("log_ratio"), abs=1e-12)
    if config.ratio == "sequence":
        assert two.total("ratio") == pytest.approx(one.total("ratio"), abs=1e-12)


def drift_identity(config: ObjectiveConfig, seed: int) -> None:
    """log s + mean k3 = mean ratio - 1, exactly."""
    example = random_example(seed)
    inputs, _ = _weights(config, example)
    pool = Pool("sequence", inputs.num_actions_B, None)
    log_ratio_BT = inputs.policy_BT - inputs.behavior_BT
    left = pool.mean_N(log_ratio_BT) + pool.mean_N(weights_module.k3(log_ratio_BT))
    right = pool.mean_N(torch.where(inputs.mask_BT, log_ratio_BT.exp() - 1, 0.0))
    torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


def per_token_form_is_precise(config: ObjectiveConfig, seed: int) -> None:
    """In float32, beside log-probs of -20, the ratio of the per-token form is exp(log s)."""
    rng = np.random.default_rng(seed)
    proximal = torch.full((1, 61), -20.0, dtype=torch.float64)
    policy = (proximal + torch.tensor(rng.normal(3e-4, 1e-3, (1, 61)))).float()
    config = _ungated(config).model_copy(update={"clip_high": 1.0})
    exact = float((policy.double() - proximal.float().double()).mean())
    leaf = policy.clone().requires_grad_()
    loss, _ = policy_loss(config, leaf, torch.ones_like(proximal), torch.ones(1), proximal.float())
    loss.backward()
    assert leaf.grad is not None
    # 1 + x and the sum over tokens are rounded in float32; the log ratio itself must not be.
    assert float(-loss.detach()) - 1 == pytest.approx(math.expm1(exact), abs=5e-7)
    assert float(-leaf.grad.double().sum()) - 1 == pytest.approx(math.expm1(exact), abs=5e-7)


def float32_and_the_wire(config: ObjectiveConfig, seed: int) -> None:
    """Log-probs that went through the codec decide every clip as before."""
    example = random_example(seed)
    versions = np.zeros(example.mask.shape, dtype=np.int64)
    turns = np.minimum(example.turn_ids.numpy(), 40)
    travelled = []
    for row in range(len(example.mask)):
        segments = _episode(example, row, versions, turns, None).segments
        travelled.append(Branch(tuple(decode(encode(segment)) for segment in segments)).behavior_logprobs)
    behavior = torch.tensor(np.stack(travelled).astype(np.float64))
    assert_same(run(config, example.change(behavior=behavior)), run(config, example), tolerance=0)


def metrics_are_shares(config: ObjectiveConfig, seed: int) -> None:
    """Fractions lie in [0, 1], every number is finite, and buckets add up to the total."""
    example = random_example(seed, num_rows=8)
    stats = run(config, example).stats
    metrics = loss_metrics(stats, config)
    for name, value in metrics.items():
        assert math.isfinite(value), name
        if "frac" in name or "/ess_" in name:
            assert 0 <= value <= 1, (name, value)
    for name in (*TOKEN_SUMS, *SEQUENCE_SUMS):
        assert sum(stats.bucket(name, bucket) for bucket in BUCKETS) == pytest.approx(stats.total(name), abs=1e-9)
    assert stats.total("tokens") == int(example.mask.sum())
    assert stats.total("sequences") + stats.total("empty") == len(example.mask)
    clipped = stats.total("clipped_positive") + stats.total("clipped_negative")
    assert clipped <= stats.total("tokens")


# Running them

SMOOTH = ("sequence_shared", "sequence_mean_advantage", "behavior_plain", "turn_shared_by_token", "token", "gmpo")
POOLED = tuple(name for name, config in CONFIGS.items() if config.loss == "clip" and config.ratio != "token")
CLIPPED = tuple(name for name, config in CONFIGS.items() if config.loss == "clip" and config.anchor == "proximal")
ALL = tuple(CONFIGS)
REINFORCE = tuple(
    name
    for name, config in CONFIGS.items()
    if config.loss in ("clip", "sapo")
    and config.anchor == "proximal"
    and config.gradient == "per_token"
    # the KL term and the dual clip are no part of the formula
    and name not in ("sequence_kl", "sequence_dual_clip")
)

PROPERTIES: dict[Property, tuple[str, ...]] = {
    segmentation_is_free: ALL,
    splitting_is_free: ALL,
    padding_is_free: ALL,
    masked_positions_are_inert: ALL,
    order_is_free: ALL,
    gating_is_local: ALL,
    withheld_tokens_leave_the_rest: ALL,
    single_step_is_reinforce: REINFORCE,
    forms_agree: POOLED,
    one_token_sequences_are_tokens: ("sequence", "sequence_by_token", "sequence_by_sum", "behavior", "sapo"),
    synchronous_is_plain: ALL,
    scale_of_advantages: ALL,
    constant_shift: tuple(name for name in ALL if not name.startswith("dppo")),
    gradient_is_the_derivative: SMOOTH,
    clip_has_a_side: ("sequence", "sequence_shared", "sequence_by_sum", "turn", "token", "token_by_token"),
    clip_ignores_the_sampler: tuple(name for name, config in CONFIGS.items() if config.anchor == "proximal"),
    lengths_weigh_alike: CLIPPED,
    repeating_a_sequence_keeps_its_ratio: ALL,
    drift_identity: ("sequence",),
    per_token_form_is_precise: ("sequence", "turn"),
    float32_and_the_wire: ALL,
    metrics_are_shares: ALL,
}


@pytest.mark.parametrize(
    ("check", "name"),
    [(check, name) for check, names in PROPERTIES.items() for name in names],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
@settings(
    max_examples=4,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 2**32 - 1))
def test_property(check: Property, name: str, seed: int) -> None:
    check(CONFIGS[name], seed)


# Mistakes that the properties must notice


@contextlib.contextmanager
def _patched(target: Any, name: str, mutate: Callable[[Any], Any]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, name, mutate(getattr(target, name)))
        yield


@dataclass(frozen=True)
class Mutation:
    """A mistake in the formula: `mutate` takes the right function and returns the wrong one."""

    name: str
    breaks: Property
    config: str
    target: Any
    attribute: str
    mutate: Callable[[Any], Any]


def _local_denominators(right: Any) -> Any:
    return lambda config, inputs, num_sequences, num_tokens: right(config, inputs, None, None)


def _renormalised(right: Any) -> Any:
    """Denominators counted after gating."""

    def wrong(config: ObjectiveConfig, inputs: Any, num_sequences: Any, num_tokens: Any) -> Tensor:
        kept_B = weights_module.make_weights(config, inputs).kept_BT.any(-1)
        return right(config, inputs, (inputs.sequence_weights_B * kept_B).sum().clamp(min=1), num_tokens)

    return wrong


def _lengths_after_gates(right: Any) -> Any:
    """The mask that everything is counted on shrinks to what the staleness cap leaves."""

    def wrong(config: ObjectiveConfig, *given: Any) -> Any:
        inputs = right(config, *given)
        kept_BT = inputs.mask_BT & (inputs.staleness_BT <= config.staleness_cap)
        return replace(inputs, mask_BT=kept_BT, num_actions_B=kept_BT.sum(-1))

    return wrong


def _padded_length(right: Any) -> Any:
    def wrong(self: Pool, values_BT: Tensor) -> Tensor:
        return values_BT.mean(-1) if self.level == "sequence" else right(self, values_BT)

    return wrong


def _sum_instead_of_mean(right: Any) -> Any:
    return lambda self, values_BT: values_BT.sum(-1) if self.level == "sequence" else right(self, values_BT)


def _multiplied_mask(right: Any) -> Any:
    """Masking by a product, which keeps NaN."""

    def wrong(config: ObjectiveConfig, policy: Tensor, mask: Tensor, advantages: Tensor, *rest: Any) -> Any:
        inputs = right(config, torch.nan_to_num(policy), mask, torch.nan_to_num(advantages), *rest)
        return replace(inputs, policy_BT=policy * (mask != 0))

    return wrong


def _unmasked_sampler(right: Any) -> Any:
    """Recorded log-probs used as they come, without masking them."""

    def wrong(config: ObjectiveConfig, *given: Any) -> Any:
        return replace(right(config, *given), behavior_BT=torch.nan_to_num(given[4], nan=0.0, posinf=9.0, neginf=-9.0))

    return wrong


def _without_gradient(right: Any) -> Any:
    return lambda config, inputs, pool, log_ratio_N: (
        right(config, inputs, pool, log_ratio_N).detach() + 0 * inputs.policy_BT
    )


def _wrong_order(right: Any) -> Any:
    """The log ratio is added before the policy is subtracted, and rounded away."""

    def wrong(config: ObjectiveConfig, inputs: Any, pool: Pool, log_ratio_N: Tensor) -> Tensor:
        return (inputs.policy_BT + pool.spread_BT(log_ratio_N.detach())) - inputs.policy_BT.detach()

    return wrong


def _half_gradient(right: Any) -> Any:
    def wrong(config: ObjectiveConfig, inputs: Any, pool: Pool, log_ratio_N: Tensor) -> Tensor:
        log_ratio_BT = right(config, inputs, pool, log_ratio_N)
        return (log_ratio_BT + log_ratio_BT.detach()) / 2

    return wrong


def _two_sided_clip(right: Any) -> Any:
    """Clips whatever the sign of the advantage."""

    def wrong(context: Any) -> Any:
        terms = right(context)
        log_ratio_BT = context.pool.spread_BT(terms.log_ratio_N).expand(terms.loss_BT.shape)
        high, low = math.log1p(context.config.clip_high), math.log1p(-context.config.clip_low)
        outside_BT = (log_ratio_BT > high + 1e-12) | (log_ratio_BT < low - 1e-12)
        return replace(terms, loss_BT=torch.where(outside_BT, terms.loss_BT.detach(), terms.loss_BT))

    return wrong


def _clip_at_the_bound(right: dict[Any, float]) -> dict[Any, float]:
    return dict.fromkeys(right, -1e-9)


def _sampler_anchored(right: Any) -> Any:
    return property(lambda context: context.inputs.behavior_BT)


def _weight_from_policy(right: Any) -> Any:
    """The correction runs from the sampler to the policy of now, so the ratio is counted twice."""
    return lambda config, inputs, mismatch_BT, level: right(
        config, inputs, inputs.policy_BT.detach() - inputs.behavior_BT, level
    )


def _by_staleness(right: Any) -> Any:
    """Older tokens count less."""

    def wrong(config: ObjectiveConfig, inputs: Any, bounds: Any) -> Any:
        weights = right(config, inputs, bounds)
        return replace(weights, weights_BT=weights.weights_BT * 0.9**inputs.staleness_BT)

    return wrong


def _first_row_kept(right: Any) -> Any:
    """A gate that depends on where a row stands."""

    def wrong(config: ObjectiveConfig, inputs: Any, bounds: Any) -> Any:
        weights = right(config, inputs, bounds)
        kept_BT = weights.kept_BT.clone()
        kept_BT[-1:] = False
        return replace(weights, kept_BT=kept_BT)

    return wrong


def _by_token(right: Any) -> Any:
    """The paper's aggregation replaced by a mean over tokens."""

    def wrong(config: ObjectiveConfig, inputs: Any, num_sequences: Any, num_tokens: Any) -> Tensor:
        return right(config.model_copy(update={"aggregate": "token"}), inputs, num_sequences, num_tokens)

    return wrong


def _squared(right: Any) -> Any:
    return lambda *given: right(*given) * right(*given).abs()


def _inverted_k3(right: Any) -> Any:
    return lambda log_ratio: right(-log_ratio)


def _anchor_unshifted(right: Any) -> Any:
    """A ratio that looks at more than the difference of log-probs."""
    return property(lambda context: right.fget(context) * 1.01)


def _segments_as_turns(right: Any) -> Any:
    def wrong(self: Branch) -> Any:
        return self._repeat("index")

    return property(wrong)


def _per_segment_mean(right: Any) -> Any:
    """Log-probs of a segment replaced by their mean, as if one number per segment were enough."""

    def wrong(self: Branch) -> Any:
        parts = []
        for segment in self.segments:
            mean = segment.behavior_logprobs.sum() / max(segment.num_actions, 1)
            parts.append(np.where(segment.action_mask, mean, 0).astype(np.float32))
        return np.concatenate(parts)

    return property(wrong)


def _half_precision_wire(right: Any) -> Any:
    def wrong(data: bytes) -> Segment:
        segment = right(data)
        rounded = torch.tensor(segment.behavior_logprobs).bfloat16().float().numpy()
        return replace(segment, behavior_logprobs=rounded)

    return wrong


def _mean_of_means(right: Any) -> Any:
    """Statistics that are averaged where they should be added."""
    return lambda self, other: LossStats((self.sums + other.sums) / 2, torch.maximum(self.maxima, other.maxima))


def _unmasked_clip_count(right: Any) -> Any:
    """Counts clipped positions without looking at the mask or the sign."""

    def wrong(inputs: Any, weights: Any, terms: Any) -> Tensor:
        clipped_BT = torch.ones_like(terms.clipped_BT)
        table = right(inputs, weights, terms)
        table[TOKEN_SUMS.index("clipped_positive")] = clipped_BT.double().flatten()
        return table

    return wrong


_LOSS, _LOSSES, _POOLING = loss_module, losses_module, pooling_module
MUTATIONS = [
    Mutation(
        "one number per segment", segmentation_is_free, "sequence", Branch, "behavior_logprobs", _per_segment_mean
    ),
    Mutation("segments are turns", segmentation_is_free, "turn", Branch, "turn_ids", _segments_as_turns),
    Mutation("local denominators", splitting_is_free, "sequence", _LOSS, "_scale", _local_denominators),
    Mutation("local denominators", splitting_is_free, "sequence_by_token", _LOSS, "_scale", _local_denominators),
    Mutation("statistics averaged", splitting_is_free, "sequence", LossStats, "__add__", _mean_of_means),
    Mutation("padded length", padding_is_free, "sequence", Pool, "mean_N", _padded_length),
    Mutation("sampler unmasked", padding_is_free, "sequence", _LOSS, "prepare", _unmasked_sampler),
    Mutation("mask multiplied", masked_positions_are_inert, "sequence", _LOSS, "prepare", _multiplied_mask),
    Mutation("sampler unmasked", masked_positions_are_inert, "behavior", _LOSS, "prepare", _unmasked_sampler),
    Mutation("gate by position", order_is_free, "sequence", _LOSS, "make_weights", _first_row_kept),
    Mutation("renormalised", gating_is_local, "sequence", _LOSS, "_scale", _renormalised),
    Mutation("lengths after gates", withheld_tokens_leave_the_rest, "sequence", _LOSS, "prepare", _lengths_after_gates),
    Mutation("no gradient path", single_step_is_reinforce, "sequence", _LOSSES, "token_log_ratio", _without_gradient),
    Mutation(
        "by token",
        single_step_is_reinforce,
        "sequence_icepop",
        _POOLING.Pool,
        "spread_BT",
        lambda right: lambda self, values_N: right(self, values_N) + 1e-3,
    ),
    Mutation(
        "half gradient",
        forms_agree,
        "sequence",
        _LOSSES,
        "token_log_ratio",
        lambda right: (
            lambda config, *given: (_half_gradient(right) if config.gradient == "shared" else right)(config, *given)
        ),
    ),
    Mutation("sum of log ratios", forms_agree, "turn", Pool, "mean_N", _sum_instead_of_mean),
    Mutation(
        "gate by position",
        one_token_sequences_are_tokens,
        "sequence",
        _LOSSES,
        "token_log_ratio",
        lambda right: (
            lambda config, *given: (_half_gradient(right) if config.ratio == "token" else right)(config, *given)
        ),
    ),
    Mutation(
        "correction to the policy", synchronous_is_plain, "sequence", weights_module, "_log_weight", _weight_from_policy
    ),
    Mutation("discount by staleness", synchronous_is_plain, "sequence", _LOSS, "make_weights", _by_staleness),
    Mutation("squared advantage", scale_of_advantages, "sequence", inputs_module, "_advantages", _squared),
    Mutation("scaled anchor", constant_shift, "sequence", _LOSSES.LossContext, "anchor_BT", _anchor_unshifted),
    Mutation(
        "half gradient", gradient_is_the_derivative, "sequence_shared", _LOSSES, "token_log_ratio", _half_gradient
    ),
    Mutation("no gradient path", gradient_is_the_derivative, "token", _LOSSES, "token_log_ratio", _without_gradient),
    Mutation("clips both sides", clip_has_a_side, "sequence", _LOSSES, "clip_loss", _two_sided_clip),
    Mutation("clips at the bound", clip_has_a_side, "sequence", _LOSSES, "BOUND_SLACK", _clip_at_the_bound),
    Mutation(
        "sampler anchored", clip_ignores_the_sampler, "sequence", _LOSSES.LossContext, "anchor_BT", _sampler_anchored
    ),
    Mutation("by token", lengths_weigh_alike, "sequence", _LOSS, "_scale", _by_token),
    Mutation(
        "sum of log ratios", repeating_a_sequence_keeps_its_ratio, "sequence", Pool, "mean_N", _sum_instead_of_mean
    ),
    Mutation("inverted k3", drift_identity, "sequence", weights_module, "k3", _inverted_k3),
    Mutation("wrong order", per_token_form_is_precise, "sequence", _LOSSES, "token_log_ratio", _wrong_order),
    Mutation("half precision", float32_and_the_wire, "sequence", None, "decode", _half_precision_wire),
    Mutation("unmasked count", metrics_are_shares, "sequence", stats_module, "_token_sums", _unmasked_clip_count),
]


@pytest.mark.parametrize(
    "mutation", MUTATIONS, ids=lambda m: f"{m.breaks.__name__}-{m.name}-{m.config}".replace(" ", "_")
)
def test_property_notices_the_mistake(mutation: Mutation) -> None:
    target = mutation.target or sys.modules[__name__]
    table = {**losses_module.LOSSES}
    with _patched(target, mutation.attribute, mutation.mutate), pytest.MonkeyPatch.context() as patch:
        # the table holds the functions themselves
        patch.setattr(loss_module, "LOSSES", {**table, "clip": losses_module.clip_loss})
        with pytest.raises(AssertionError):
            _repeat(mutation.breaks, CONFIGS[mutation.config])


def _repeat(check: Property, config: ObjectiveConfig) -> None:
    for seed in range(40):
        check(config, seed)


def test_every_property_has_a_mistake_that_it_notices() -> None:
    assert {mutation.breaks for mutation in MUTATIONS} == set(PROPERTIES)


# Types and refusals


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("field", ["policy", "proximal", "behavior"])
def test_half_precision_is_refused(field: str, dtype: torch.dtype) -> None:
    example = random_example(1)
    with pytest.raises(ObjectiveError, match=f"{field}_logprobs_BT is"):
        run(CONFIGS["sequence"], example.change(**{field: getattr(example, field).to(dtype)}))


@pytest.mark.parametrize("name", ALL)
def test_autocast_changes_nothing(name: str) -> None:
    example = random_example(3).map(lambda _, value: value.float() if value.is_floating_point() else value)
    plain = run(CONFIGS[name], example)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(run(CONFIGS[name], example), plain, tolerance=0)


@pytest.mark.parametrize("field", ["policy", "proximal", "behavior", "advantages"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_at_a_trained_position_is_refused(field: str, value: float) -> None:
    example = random_example(4)
    row, token = (int(i) for i in np.argwhere(example.mask.numpy())[-1])
    spoiled = getattr(example, field).clone()
    spoiled[row, token] = value
    with pytest.raises(NonFiniteInput, match=rf"1 sequences \(rows \[{row}\]\)"):
        run(CONFIGS["sequence"], example.change(**{field: spoiled}))


def test_gates_on_huge_ratios_leave_no_nan() -> None:
    """A withheld row whose ratio overflows has gradient 0, not 0 times infinity."""
    proximal = torch.full((2, 3), -900.0, dtype=torch.float64)
    policy = torch.tensor([[-0.1] * 3, [-900.0] * 3], dtype=torch.float64, requires_grad=True)
    config = ObjectiveConfig(log_ratio_clamp=None, correction="none", off_policy_gate=None, clip=0.5)
    behavior = torch.tensor([[-1.0] * 3, [-900.0] * 3], dtype=torch.float64)
    loss, stats = policy_loss(config, policy, torch.ones(2, 3), torch.tensor([-1.0, -1.0]), proximal, behavior)
    loss.backward()
    assert policy.grad is not None
    assert policy.grad.isfinite().all()
    assert not policy.grad[0].any()
    assert policy.grad[1].any()
    assert stats.sums.isfinite().all()


def test_turns_without_ids_are_runs_of_trained_tokens() -> None:
    example = random_example(5)
    mask = example.mask.numpy()
    starts = mask & ~np.pad(mask, ((0, 0), (1, 0)))[:, :-1]
    runs = example.change(turn_ids=torch.tensor(np.cumsum(starts, axis=1) + 7))
    assert_same(run(CONFIGS["turn"], example, turn_ids_BT=None), run(CONFIGS["turn"], runs), tolerance=0)


def test_product_weights_refuse_long_sequences() -> None:
    config = ObjectiveConfig(correction="product")
    for length, fits in ((512, True), (513, False)):
        logprobs = torch.full((2, length), -1.0)
        given: Any = (config, logprobs, torch.ones(2, length), torch.ones(2), logprobs, logprobs)
        if fits:
            policy_loss(*given)
        else:
            with pytest.raises(ObjectiveError, match="product_max_tokens"):
                policy_loss(*given)


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (ObjectiveConfig(anchor="behavior"), {"behavior_logprobs_BT": None}, "anchor: behavior"),
        (ObjectiveConfig(kl_coef=0.1), {"reference_logprobs_BT": None}, "kl_coef"),
        (ObjectiveConfig(staleness_cap=3), {"staleness_BT": None}, "staleness_cap"),
        (ObjectiveConfig(), {"num_sequences": 0}, "num_sequences"),
        (ObjectiveConfig(aggregate="token"), {"num_tokens": math.nan}, "num_tokens"),
        (ObjectiveConfig(), {"sequence_weights_B": torch.tensor([1.0, -1, 1, 1, 1])}, "sequence_weights_B"),
        (ObjectiveConfig(), {"sequence_weights_B": torch.ones(4)}, "sequence_weights_B"),
        (ObjectiveConfig(), {"behavior_logprobs_BT": torch.zeros(5, 13)}, "behavior_logprobs_BT has shape"),
        (ObjectiveConfig(), {"staleness_BT": torch.full((5, 14), -1)}, "negative staleness"),
        (ObjectiveConfig(), {"turn_ids_BT": torch.zeros(5, 14)}, "turn_ids_BT holds whole numbers"),
        (ObjectiveConfig(loss="gmpo"), {}, "one advantage per sequence"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_inputs_that_do_not_fit_are_refused(config: ObjectiveConfig, change: dict[str, Any], message: str) -> None:
    example = random_example(6)
    example = example.change(mask=torch.ones_like(example.mask))
    with pytest.raises(ObjectiveError, match=message):
        run(config, example, **change)
