"""Losses, gradients, ratios and clip metrics of other projects, and the worked numbers of the decoupled objective.

The files in `vectors/` hold results of those projects' own code; `SETTINGS` says which of our keys equal them.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo_core.objective import LossStats, ObjectiveConfig, loss_metrics, policy_loss
from gspo_core.objective import loss as loss_module
from gspo_core.objective import losses as losses_module
from gspo_core.objective import weights as weights_module
from gspo_core.objective.inputs import Inputs, prepare
from gspo_core.objective.losses import band_width
from gspo_core.objective.weights import make_weights
from tests.core.objective_support import OFF

VECTORS = Path(__file__).parent / "vectors"
CASES: dict[str, Any] = {case["name"]: case for case in json.loads((VECTORS / "gspo_base.json").read_text())["cases"]}
FAMILIES: dict[str, Any] = json.loads((VECTORS / "gspo_families.json").read_text())["families"]
TOLERANCES = {torch.float64: {"rtol": 1e-6, "atol": 2e-8}, torch.float32: {"rtol": 1e-4, "atol": 1e-6}}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=["float64", "float32"])

PLAIN = {**OFF, "log_ratio_clamp": None}
SHARED = {**PLAIN, "gradient": "shared"}
BY_TOKEN = {**SHARED, "aggregate": "token", "advantage_reduction": "mean"}
# A weight that is bounded nowhere.
UNBOUNDED = {"correction": "token", "correction_max": 1e12}


def tensor(values: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    rows = [[float(value) for value in row] for row in values] if isinstance(values[0], list) else values
    return torch.tensor(rows, dtype=dtype)


def compute(
    config: ObjectiveConfig, case: Any, dtype: torch.dtype, denominator: str, survivors: Tensor | None = None
) -> tuple[float, Tensor, LossStats]:
    """Loss, gradient and statistics of a case. `survivors` replaces its mask, as rejection does elsewhere."""
    given = case["inputs"]
    original = tensor(given["mask"])
    policy, anchor = tensor(given["new"], dtype), tensor(given["old"], dtype)
    if case.get("holes"):
        policy[original == 0] = math.nan
        anchor[original == 0] = -math.inf
    mask = original if survivors is None else survivors.to(original.dtype)
    counts = {"rows": len(mask), "nonempty": max(int((mask.sum(-1) > 0).sum()), 1)}
    policy.requires_grad_()
    loss, stats = policy_loss(
        config,
        policy,
        mask,
        tensor(given["adv"], dtype),
        anchor,
        tensor(given["behave"], dtype) if "behave" in given else None,
        num_sequences=counts[denominator],
        num_tokens=float(original.sum()),
    )
    loss.backward()
    assert policy.grad is not None
    return float(loss.detach()), policy.grad, stats


def assert_equals(loss: float, grad: Tensor, expected: Any, dtype: torch.dtype) -> None:
    assert loss == pytest.approx(float(expected["loss"]), rel=TOLERANCES[dtype]["rtol"], abs=TOLERANCES[dtype]["atol"])
    torch.testing.assert_close(grad.double(), tensor(expected["grad"]), **TOLERANCES[dtype])


# Base cases: our keys, and whether rows without trained tokens count

PEERS: dict[str, tuple[dict[str, Any], str]] = {
    "gspo_sequence": (SHARED, "rows"),
    "gspo_token": (PLAIN, "rows"),
    "trl_1.16.0_sequence_grpo": (SHARED, "rows"),
    "verl_gspo": (OFF, "nonempty"),
    "verl_gspo_global_batch_size_B": (OFF, "rows"),
    "areal_ppo_actor_loss_sequence_2d": (BY_TOKEN, "rows"),
    "skyrl_gspo_sequence_mean": (OFF, "rows"),
    "pipelinerl_gspo": ({**SHARED, "aggregate": "sum", "advantage_reduction": "mean"}, "rows"),
    "roll_agentic_segment": ({**SHARED, "ratio": "turn"}, "nonempty"),
}


def expected_of(case: Any, peer: str) -> Any:
    return case["reference"].get(peer) or case["peers"][peer]


def is_finite(expected: Any) -> bool:
    return "error" not in expected and math.isfinite(float(expected["loss"]))


BASE = [(case, peer) for case in CASES for peer in PEERS if is_finite(expected_of(CASES[case], peer))]


@DTYPES
@pytest.mark.parametrize(("name", "peer"), BASE)
def test_base_case(name: str, peer: str, dtype: torch.dtype) -> None:
    case, (keys, denominator) = CASES[name], PEERS[peer]
    expected = expected_of(case, peer)
    config = ObjectiveConfig(clip=[case["clip_low"], case["clip_high"]], **keys)
    loss, grad, stats = compute(config, case, dtype, denominator)
    assert_equals(loss, grad, expected, dtype)
    num_rows = len(case["inputs"]["mask"])
    metrics = loss_metrics(stats, config)
    ours = {
        "clipfrac_token": metrics["gspo/clip_frac"],
        "clipfrac_seq": stats.total("sequences_clipped") / num_rows,
        "low_mean": stats.total("sequences_clipped_negative") / num_rows,
        "high_mean": stats.total("sequences_clipped_positive") / num_rows,
        "region_mean": stats.total("sequences_clipped") / num_rows,
        "pg_clipfrac": metrics["gspo/clip_frac"],
        "clip_ratio": metrics["gspo/clip_frac"],
        "clip_tokens": stats.total("clipped_positive") + stats.total("clipped_negative"),
        "ppo_kl": metrics["gspo/k1_policy_proximal"],
        "k1": metrics["gspo/k1_policy_proximal"],
    }
    # ROLL's first metric averages over sequences; per-token advantages split a sequence that TRL counts as one sign.
    skipped = {"clipfrac", *(("low_mean", "high_mean", "region_mean", "clipfrac_seq") if name[0] == "D" else ())}
    for metric in ours.keys() & expected.keys() - skipped:
        assert ours[metric] == pytest.approx(float(expected[metric]), rel=1e-4, abs=1e-6), metric


def test_the_base_covers_every_peer_and_finite_result() -> None:
    assert {peer for _, peer in BASE} == set(PEERS)
    assert len(BASE) == sum(is_finite(expected_of(case, peer)) for case in CASES.values() for peer in PEERS) > 190


@DTYPES
@pytest.mark.parametrize("name", CASES)
def test_ratios(name: str, dtype: torch.dtype) -> None:
    """Ratio and log ratio of every sequence, and of every turn."""
    case = CASES[name]
    reference = case["reference"]["gspo_sequence"]
    for row in range(len(case["inputs"]["mask"])):
        one = {**case, "inputs": {key: [value[row]] for key, value in case["inputs"].items()}}
        if not sum(one["inputs"]["mask"][0]):
            continue
        stats = compute(ObjectiveConfig(**SHARED), one, dtype, "rows")[2]
        tolerance = 1e-9 if dtype == torch.float64 else 5e-7
        assert stats.total("log_ratio") == pytest.approx(reference["seq_log_ratio"][row], rel=1e-6, abs=tolerance)
        assert stats.total("ratio") == pytest.approx(reference["seq_ratio"][row], rel=3e-6, abs=tolerance)
        turns = [math.exp(log_ratio) for _, _, log_ratio in case["reference"]["turns"][row]]
        by_turn = ObjectiveConfig(**SHARED, ratio="turn")
        metrics = loss_metrics(compute(by_turn, one, dtype, "rows")[2], by_turn)
        assert metrics["gspo/ratio_mean"] == pytest.approx(sum(turns) / len(turns), rel=3e-6)
        assert metrics["gspo/ratio_max"] == pytest.approx(max(turns), rel=3e-6)
        assert metrics["gspo/ratio_min"] == pytest.approx(min(turns), rel=3e-6)


@pytest.mark.parametrize("name", ["B07_garbage_in_holes", "C08_nan_in_holes"])
@pytest.mark.parametrize("keys", [SHARED, PLAIN, {**PLAIN, "ratio": "turn"}, {**PLAIN, "ratio": "token"}])
def test_what_stands_in_holes_is_not_seen(name: str, keys: dict[str, Any]) -> None:
    case = CASES[name]
    given = case["inputs"]
    mask = given["mask"]
    zeros = {
        key: [[x * m for x, m in zip(*pair, strict=True)] for pair in zip(given[key], mask, strict=True)]
        for key in ("new", "old")
    }
    clean = {**case, "holes": None, "inputs": {**given, **zeros}}
    spoiled = {**case, "holes": "nan and -inf"}
    results = [compute(ObjectiveConfig(**keys), each, torch.float64, "rows") for each in (clean, spoiled)]
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
    assert torch.equal(results[0][2].sums, results[1][2].sums)


# Families: the same, with corrections and rejections as their own projects make them


def settings(family: str, entry: Any, case: Any) -> tuple[dict[str, Any], str]:
    """Our keys for an entry of a family, and its denominator."""
    return {
        "is_correction_on_gspo": _correction,
        "behaviour_anchored_gspo": _behavior_anchored,
        "sapo": _sapo,
        "cispo": _cispo,
        "gmpo": lambda *_: ({**PLAIN, "loss": "gmpo"}, "rows"),
        "grpo_token_level": lambda _, case: ({**PLAIN, **_clip(case), "ratio": "token"}, "rows"),
        "vespo": lambda *_: ({**OFF, "loss": "vespo", "aggregate": "token"}, "rows"),
        "dppo": _dppo,
        "opsm_on_gspo": _opsm,
        "dual_clip": lambda _, case: ({**SHARED, **_clip(case), "dual_clip": 3.0}, "rows"),
        "roll_dual_clip": lambda _, case: ({**SHARED, **_clip(case), "dual_clip": 1.4}, "nonempty"),
    }[family](entry, case)


def _clip(case: Any) -> dict[str, Any]:
    return {"clip": [case["clip_low"], case["clip_high"]]}


def _correction(entry: Any, case: Any) -> tuple[dict[str, Any], str]:
    peer, variant = entry["peer"], entry["variant"]
    if peer.startswith("trl"):
        names = {"token_truncate": "token", "token_mask": "icepop"}
        names |= {"sequence_truncate": "product", "sequence_mask": "product_mask"}
        return {**SHARED, **_clip(case), "correction": names[variant.split()[0]], "correction_min": 0.5}, "rows"
    if peer == "verl_gspo":
        level = "token" if "rollout_is=token" in variant else "product"
        if "0.5_2.0" in variant:
            return {**OFF, **_clip(case), "correction": f"{level}_mask", "correction_min": 0.5}, "nonempty"
        return {**OFF, **_clip(case), "correction": f"{level}_truncate"}, "nonempty"
    if peer == "nemo_rl_sequence_level":
        low = {"correction_min": 0.5} if variant.startswith("icepop") else {}
        kind = "product_mask" if low else "product"
        return {**SHARED, **_clip(case), "correction": kind, **low}, "nonempty"
    if peer == "slime_gspo":
        return {**SHARED, **_clip(case), "correction": "token", "correction_min": 0.5}, "rows"
    band = {"correction_min": 0.98, "correction_max": 1.02}
    areal = {
        "token clamp [0.5,2]": {"correction": "token", "correction_min": 0.5},
        "sequence clamp geo [0.98,1.02]": {"correction": "geometric", **band},
        "sequence mask geo [0.98,1.02]": {"correction": "geometric_mask", **band},
        "token mask [0.9,1.1]": {"correction": "token_mask", "correction_min": 0.9, "correction_max": 1.1},
        "sequence mask k3 mean 0.002": {**UNBOUNDED, "k3_gate": 0.002},
        "sequence mask k2 max 0.02": {**UNBOUNDED, "outlier_gate": math.sqrt(2 * 0.02)},
    }
    return {**BY_TOKEN, **_clip(case), **areal[variant]}, "rows"


def _behavior_anchored(entry: Any, case: Any) -> tuple[dict[str, Any], str]:
    return {**SHARED, **_clip(case), "anchor": "behavior", "compensate": False}, "nonempty"


def _sapo(entry: Any, case: Any) -> tuple[dict[str, Any], str]:
    form = {"ratio": "token"} if entry["variant"].startswith("token") else {"gradient": "shared"}
    areal = {"aggregate": "token", "advantage_reduction": "mean"} if entry["peer"] == "areal" else {}
    return {**PLAIN, "loss": "sapo", **form, **areal}, "nonempty" if entry["peer"] == "verl" else "rows"


def _cispo(entry: Any, case: Any) -> tuple[dict[str, Any], str]:
    return {
        **OFF,
        "loss": "cispo",
        "clip": [0.2 if entry["peer"] == "verl" else 1.0, 0.2],
        "aggregate": "token",
    }, "rows"


def _dppo(entry: Any, case: Any) -> tuple[dict[str, Any], str]:
    _, kind, delta = entry["variant"].split()
    return {**OFF, "loss": f"dppo_{kind}", "dppo_delta": float(delta.split("=")[1]), "aggregate": "token"}, "rows"


def _opsm(entry: Any, case: Any) -> tuple[dict[str, Any], str]:
    return {**SHARED, **_clip(case), "off_policy_gate": float(entry["variant"].split("=")[1])}, "rows"


OTHER = ("rejection_masks", "m2po_mask")
ENTRIES = [(family, number) for family in FAMILIES if family not in OTHER for number in range(len(FAMILIES[family]))]


@DTYPES
@pytest.mark.parametrize(("family", "number"), ENTRIES)
def test_family(family: str, number: int, dtype: torch.dtype) -> None:
    entry = FAMILIES[family][number]
    case = CASES[entry["case"]]
    keys, denominator = settings(family, entry, case)
    config = ObjectiveConfig(**keys)
    # AReaL's token mask also takes tokens out of the ratio; ours never does, so its mask becomes the action mask here.
    survivors = kept_mask(config, case) if entry["variant"].startswith("token mask") else None
    loss, grad, stats = compute(config, case, dtype, denominator, survivors)
    assert_equals(loss, grad, entry, dtype)
    if "weight" in entry:
        _assert_weights(config, case, entry["weight"])
    _assert_clip_metric(config, stats, entry)


def _assert_clip_metric(config: ObjectiveConfig, stats: LossStats, entry: Any) -> None:
    metrics = loss_metrics(stats, config)
    by_sequence = "dual" in entry["variant"] or entry["peer"] == "slime_gspo"
    clip_frac = metrics["gspo/clip_frac_sequence" if by_sequence else "gspo/clip_frac"]
    # AReaL counts clipping after rejection; we count it whatever a gate says.
    if entry["peer"] == "areal_decoupled" and " mask " in entry["variant"]:
        return
    for metric in ("pg_clipfrac", "clip_ratio", "clipfrac", "clipfrac_token", "region_mean"):
        if metric in entry:
            assert clip_frac == pytest.approx(entry[metric], rel=1e-6, abs=2e-8), metric
    if "ppo_kl" in entry and config.anchor == "proximal":
        assert metrics["gspo/k1_policy_proximal"] == pytest.approx(entry["ppo_kl"], rel=1e-4, abs=1e-6)


def _assert_weights(config: ObjectiveConfig, case: Any, expected: Any) -> None:
    """TRL's weight of every trained token, or of every sequence."""
    inputs = prepared(config, case)
    weights_BT = make_weights(config, inputs).weights_BT
    wanted = tensor(expected)
    assert ((weights_BT - wanted.expand_as(weights_BT)).abs()[inputs.mask_BT] < 1e-6).all()


def prepared(config: ObjectiveConfig, case: Any) -> Inputs:
    given = case["inputs"]
    logprobs = (tensor(given["old"]), tensor(given["behave"]), None)
    return prepare(
        config, tensor(given["new"]), tensor(given["mask"]), tensor(given["adv"]), *logprobs, None, None, None
    )


def kept_mask(config: ObjectiveConfig, case: Any) -> Tensor:
    return make_weights(config, prepared(config, case)).kept_BT


# Rejection in verl: which tokens survive, and a loss with everything counted over them

BOUNDS: dict[str, Any] = {
    # k1 is -c, bounded by the logs of the two thresholds
    "token_k1": lambda low, high: {"correction": "token_mask", "correction_min": 1 / high, "correction_max": 1 / low},
    "seq_sum_k1": lambda low, high: {
        "correction": "product_mask",
        "correction_min": 1 / high,
        "correction_max": 1 / low,
    },
    "seq_mean_k1": lambda low, high: {
        "correction": "geometric_mask",
        "correction_min": 1 / high,
        "correction_max": 1 / low,
    },
    "seq_mean_k3": lambda limit: {"k3_gate": limit},
    "seq_max_k2": lambda limit: {"outlier_gate": math.sqrt(2 * limit)},
}


@DTYPES
@pytest.mark.parametrize("number", range(len(FAMILIES["rejection_masks"])))
def test_rejection(number: int, dtype: torch.dtype) -> None:
    entry = FAMILIES["rejection_masks"][number]
    case = CASES[entry["case"]]
    options, thresholds = (part.split("=")[1] for part in entry["variant"].split())
    keys: dict[str, Any] = {**OFF}
    for option, threshold in zip(options.split(","), thresholds.split(","), strict=True):
        keys |= BOUNDS[option](*(float(bound) for bound in threshold.split("_")))
    survivors = kept_mask(ObjectiveConfig(**keys), case)
    assert survivors.int().tolist() == entry["kept_mask"]
    plain = ObjectiveConfig(**OFF, **_clip(case))
    loss, grad, _ = compute(plain, case, dtype, "nonempty", survivors)
    if math.isnan(float(entry["loss"])):  # everything is rejected: verl has no number, we have 0
        assert loss == 0
        assert not grad.any()
        return
    assert_equals(loss, grad, entry, dtype)
    # What this project does: lengths, ratio and N stay, so other tokens keep their gradient bit for bit.
    ours = compute(ObjectiveConfig(**keys, **_clip(case)), case, dtype, "rows")[1]
    assert not ours[~survivors].any()


# The worked numbers of the decoupled objective

N4 = {"off_policy_gate": None, "outlier_gate": None, "log_ratio_clamp": 10.0}
DECOUPLED = {**N4, "k3_gate": None}
BEHAVIOR = {**DECOUPLED, "anchor": "behavior"}
BAND = {**BEHAVIOR, "band": {"z": 1.0, "kappa": 2.5e-4}}
WORKED: list[tuple[str, dict[str, Any], float, float, list[float] | None, list[int] | None]] = [
    ("E01", DECOUPLED, 0.049308216544, 0.086860789437, [0, 0.24826695, -0.12519532, 0], None),
    ("E01", {**DECOUPLED, "gradient": "shared"}, 0.049308216544, 0.086818081038, [0, 0.24826695, -0.12519532, 0], None),
    ("E02", DECOUPLED, 0.049153138133, 0.075724346568, [0, 0.24908966, -0.12623353, 0], None),
    ("E02", {**DECOUPLED, "gradient": "shared"}, 0.049153138133, 0.075219779554, [0, 0.24908966, -0.12623353, 0], None),
    ("E04", DECOUPLED, -0.022867613177, 0.081257637392, [0, 0.225254, -0.1533615, 0], None),
    ("E04", {**DECOUPLED, "gradient": "shared"}, -0.022867613177, 0.072178117546, [0, 0.225254, -0.1533615, 0], None),
    ("E04", {**N4, "k3_gate": 0.05}, 0.0, 0.0, [0, 0, 0, 0], None),
    (
        "E04",
        {**N4, "k3_gate": 0.4, "clip": 0.02},
        -0.094821641088,
        0.097401001641,
        [-0.26826836, 0, 0, 0.17344672],
        None,
    ),
    ("E01", {**BEHAVIOR, "compensate": False}, 0.051266695938, 0.082851934687, None, None),
    ("E01", BEHAVIOR, 0.051266695938, 0.082851934687, None, [1, 2, 3]),
    ("E01", BAND, 0.049596407664, 0.107359287700, None, [1]),
    ("E02", {**BEHAVIOR, "compensate": False}, 0.052756482978, 0.053663436243, None, [0, 1, 2]),
    ("E02", BEHAVIOR, 0.052756482978, 0.053663436243, None, [0, 1, 2]),
    ("E02", BAND, 0.048170879464, 0.087096374912, None, [0, 2]),
]


@pytest.mark.parametrize(("name", "keys", "loss", "norm", "row_sums", "clipped"), WORKED)
def test_worked_numbers(
    name: str,
    keys: dict[str, Any],
    loss: float,
    norm: float,
    row_sums: list[float] | None,
    clipped: list[int] | None,
) -> None:
    case = next(case for case in CASES.values() if case["name"].startswith(name))
    ours, grad, stats = compute(ObjectiveConfig(**keys), case, torch.float64, "rows")
    assert ours == pytest.approx(loss, abs=5e-13)
    assert float(grad.norm()) == pytest.approx(norm, abs=5e-13)
    if row_sums is not None:
        assert grad.sum(-1).tolist() == pytest.approx(row_sums, abs=5e-8)
    if clipped is not None:
        assert [row for row in range(4) if not grad[row].any()] == clipped
        assert stats.total("sequences_clipped") == len(clipped)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("E01", [0.000574, 0.000737, 0.000200, 0.000312]),
        ("E02", [0.006998, 0.007046, 0.003619, 0.004753]),
        ("E04", [0.318, 0.797, 0.416, 0.105]),
    ],
)
def test_worked_drift(name: str, expected: list[float]) -> None:
    """k3 per sequence, as the gate sees it: it keeps at its value and withholds just below."""
    case = next(case for case in CASES.values() if case["name"].startswith(name))
    for row, value in enumerate(expected):
        for factor, kept in ((1.01, True), (0.99, False)):
            mask = kept_mask(ObjectiveConfig(**{**OFF, "k3_gate": value * factor}), case)
            assert bool(mask[row].any()) == kept


def test_worked_weights_and_band() -> None:
    config = ObjectiveConfig(**DECOUPLED)
    case = next(case for case in CASES.values() if case["name"].startswith("E04"))
    metrics = loss_metrics(compute(config, case, torch.float64, "rows")[2], config)
    assert metrics["gspo/weight_truncated_frac"] == 0.125
    assert metrics["gspo/weight_mean"] == pytest.approx(1.066, abs=5e-4)
    assert metrics["gspo/ess_token"] == pytest.approx(0.81, abs=5e-3)
    product = ObjectiveConfig(**{**DECOUPLED, "correction": "product", "correction_max": 1e12})
    metrics = loss_metrics(compute(product, case, torch.float64, "rows")[2], product)
    assert metrics["gspo/ess_sequence"] == pytest.approx(0.34, abs=5e-3)
    band = ObjectiveConfig(**BAND).band
    assert band is not None
    lengths = torch.tensor(CASES["E01_stitched_2seg"]["reference"]["gspo_sequence"]["n_tokens"])
    widths = band_width(band, lengths, torch.float64).tolist()
    assert widths == pytest.approx([0.00745, 0.00598, 0.01, 0.005], abs=5e-6)


# Mistakes that these numbers must notice


def _negated_mismatch(right: Any) -> Any:
    return lambda config, inputs, mismatch_BT, level: right(config, inputs, -mismatch_BT, level)


def _arithmetic_mean(right: Any) -> Any:
    """The "sequence" weight as a mean of token weights."""

    def wrong(config: ObjectiveConfig, inputs: Inputs, mismatch_BT: Tensor, level: str) -> Tensor:
        mean_BT = inputs.sequence_mean_BT(torch.where(inputs.mask_BT, mismatch_BT.exp(), 0.0)).log()
        return mean_BT.expand(mismatch_BT.shape) if level == "geometric" else right(config, inputs, mismatch_BT, level)

    return wrong


def _raw_decision(right: Any) -> Any:
    return lambda context, log_ratio_N: log_ratio_N


def _length_without_root(right: Any) -> Any:
    return lambda band, lengths, dtype: right(band, lengths, dtype) ** 2


def _gate_both_signs(right: Any) -> Any:
    """OPSM without looking at the sign of the advantage."""

    def wrong(config: ObjectiveConfig, inputs: Inputs, policy_BT: Tensor) -> Any:
        return right(config, replace(inputs, advantages_BT=-inputs.advantages_BT.abs()), policy_BT)

    return wrong


def _k2(right: Any) -> Any:
    return lambda log_ratio: log_ratio.square() / 2


def _floor_of_one(right: Any) -> Any:
    """The sum over tokens divided by N, without the length."""

    def wrong(config: ObjectiveConfig, inputs: Inputs, num_sequences: Any, num_tokens: Any) -> Tensor:
        return right(config.model_copy(update={"aggregate": "sum"}), inputs, num_sequences, num_tokens)

    return wrong


def _family(family: str) -> None:
    for number in range(len(FAMILIES[family])):
        test_family(family, number, torch.float64)


def _base(peer: str) -> None:
    for name, other in BASE:
        if other == peer:
            test_base_case(name, peer, torch.float64)


def _worked() -> None:
    for given in WORKED:
        test_worked_numbers(*given)


MISTAKES: list[tuple[str, Any, str, Any, Any]] = [
    ("inverted weight", weights_module, "_log_weight", _negated_mismatch, lambda: _family("is_correction_on_gspo")),
    ("arithmetic mean", weights_module, "_log_weight", _arithmetic_mean, lambda: _family("is_correction_on_gspo")),
    ("raw decision", losses_module, "_decision", _raw_decision, _worked),
    ("no root of the length", losses_module, "band_width", _length_without_root, _worked),
    ("k2 for k3", weights_module, "k3", _k2, lambda: test_worked_drift("E04", [0.318, 0.797, 0.416, 0.105])),
    ("both signs withheld", weights_module, "_token_gates", _gate_both_signs, lambda: _family("opsm_on_gspo")),
    ("length forgotten", loss_module, "_scale", _floor_of_one, lambda: _base("trl_1.16.0_sequence_grpo")),
    ("length forgotten", loss_module, "_scale", _floor_of_one, lambda: _family("gmpo")),
]


@pytest.mark.parametrize(("name", "module", "attribute", "mutate", "check"), MISTAKES)
def test_numbers_notice_the_mistake(name: str, module: Any, attribute: str, mutate: Any, check: Any) -> None:
    check()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, attribute, mutate(getattr(module, attribute)))
        with pytest.raises(AssertionError):
            check()
