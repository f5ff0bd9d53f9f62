"""The configuration of the objective: every key acts or is refused, and what is known to be wrong is said."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from gspo_core.objective import ObjectiveError, loss_metrics
from gspo_core.objective_config import (
    OTHER_KEYS,
    AdvantageConfig,
    Band,
    ObjectiveConfig,
    config_refusals,
    config_warnings,
)
from tests.core.objective_support import CONFIGS, random_example, run


def test_defaults_are_those_of_the_reference() -> None:
    config = ObjectiveConfig()
    assert (config.loss, config.ratio, config.gradient, config.aggregate) == (
        "clip",
        "sequence",
        "per_token",
        "sequence",
    )
    assert (config.clip_low, config.clip_high, config.minibatches) == (3e-4, 4e-4, 4)
    assert (config.anchor, config.advantage_reduction, config.log_ratio_clamp) == ("proximal", "none", 10)
    assert (config.correction, config.correction_max, config.correction_min) == ("token_truncate", 2, None)
    assert (config.k3_gate, config.outlier_gate, config.off_policy_gate) == (0.05, 5, 0.5)
    assert (config.dual_clip, config.kl_coef, config.band) == (None, 0, None)
    assert config.advantage == AdvantageConfig(baseline="mean", scale="group_std", ddof=1, eps=1e-6)
    assert config_refusals(config) == config_warnings(config) == []


def test_it_imports_without_torch_and_numpy() -> None:
    code = "import sys, gspo_core.objective_config; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("config", [*CONFIGS.values(), ObjectiveConfig(), ObjectiveConfig(name="grpo", clip=0.2)])
def test_json_round_trip(config: ObjectiveConfig) -> None:
    assert ObjectiveConfig.model_validate_json(config.model_dump_json()) == config
    assert ObjectiveConfig.model_validate(json.loads(config.model_dump_json())) == config


def test_every_key_is_documented() -> None:
    for model in (ObjectiveConfig, AdvantageConfig, Band):
        properties = model.model_json_schema()["properties"]
        assert properties.keys() >= model.model_fields.keys()
        for name, schema in properties.items():
            assert schema.get("description"), name


def test_the_schema_knows_the_other_spellings() -> None:
    schema = ObjectiveConfig.model_json_schema()
    assert schema["additionalProperties"] is False
    assert schema["properties"].keys() - ObjectiveConfig.model_fields.keys() == OTHER_KEYS.keys()
    assert {"icepop", "token_mask"} <= set(schema["properties"]["correction"]["enum"])


# Aliases


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"importance_sampling_level": "token"}, {"ratio": "token"}),
        ({"importance_sampling_level": "sequence"}, {"ratio": "sequence"}),
        ({"importance_sampling_level": "token", "ratio": "token"}, {"ratio": "token"}),
        ({"name": "gspo", "clip": [3e-4, 4e-4]}, {}),
        ({"name": "grpo", "clip": [0.2, 0.28]}, {"ratio": "token", "clip_low": 0.2, "clip_high": 0.28}),
        ({"name": "grpo", "clip": 0.2}, {"ratio": "token", "clip_low": 0.2, "clip_high": 0.2}),
        ({"name": "cispo", "clip": 0.2}, {"loss": "cispo", "ratio": "token", "clip_low": 0.2, "clip_high": 0.2}),
        ({"loss": "dppo_tv", "dppo_delta": 0.2}, {"loss": "dppo_tv", "dppo_delta": 0.2, "ratio": "token"}),
        ({"correction": "icepop"}, {"correction": "token_mask"}),
        ({"correction": "token"}, {}),
        ({"correction": "geometric"}, {"correction": "geometric_truncate"}),
        ({"correction": "product"}, {"correction": "product_truncate"}),
        ({"anchor": "behavior"}, {"anchor": "behavior", "correction": "none"}),
    ],
)
def test_other_spellings(given: dict[str, Any], meant: dict[str, Any]) -> None:
    assert ObjectiveConfig(**given) == ObjectiveConfig(**meant, name=given.get("name"))


# What is refused, and that the message names the key


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"importance_sampling_level": "token", "ratio": "sequence"}, "ratio"),
        ({"importance_sampling_level": "turn"}, "importance_sampling_level"),
        ({"name": "grpo", "ratio": "sequence"}, "ratio"),
        ({"name": "reinforce"}, "name"),
        ({"name": "ppo"}, "name"),
        ({"clip": [0.1, 0.2, 0.3]}, "clip"),
        ({"clip": 0.1, "clip_low": 0.2}, "clip_low"),
        ({"clip_low": 0}, "clip_low"),
        ({"clip_low": 1.1}, "clip_low"),
        ({"clip_high": float("inf")}, "clip_high"),
        ({"ratio": "segment"}, "ratio"),
        ({"loss": "cispo", "ratio": "sequence"}, "ratio"),
        ({"loss": "gmpo", "ratio": "token"}, "ratio"),
        ({"loss": "dppo_kl"}, "dppo_delta"),
        ({"loss": "sapo", "clip": 0.2}, "clip_low"),
        ({"loss": "sapo", "dual_clip": 3}, "dual_clip"),
        ({"loss": "vespo", "log_ratio_clamp": 5}, "log_ratio_clamp"),
        ({"loss": "cispo", "clip": 0.2, "gradient": "shared"}, "gradient"),
        ({"ratio": "token", "gradient": "shared"}, "gradient"),
        ({"ratio": "token", "band": {}}, "band"),
        ({"band": {}, "clip_low": 0.1}, "clip_low"),
        ({"band": {"min": 0.2, "max": 0.1}}, "min"),
        ({"dual_clip": 1.0}, "dual_clip"),
        ({"compensate": False}, "compensate"),
        ({"anchor": "behavior", "ratio": "token", "compensate": False}, "compensate"),
        ({"allow_one_sided_clip": True}, "allow_one_sided_clip"),
        ({"anchor": "behavior", "correction": "token"}, "correction"),
        ({"correction": "none", "correction_max": 3}, "correction_max"),
        ({"correction": "none", "correction_min": 0.5}, "correction_min"),
        ({"correction_min": 3}, "correction_min"),
        ({"geometric_gate": [0.9, 1.1, 1.2]}, "geometric_gate"),
        ({"geometric_gate": [1.1, 1.2]}, "geometric_gate_low"),
        ({"geometric_gate_low": 0.9}, "geometric_gate_low"),
        ({"correction": "sequence"}, "correction"),
        ({"product_max_tokens": 100}, "product_max_tokens"),
        ({"kl_unbiased": True}, "kl_unbiased"),
        ({"sapo_tau_positive": 2}, "sapo_tau_positive"),
        ({"vespo_negative": [1, 1]}, "vespo_negative"),
        ({"gmpo_clip": 0.2}, "gmpo_clip"),
        ({"dppo_cap": 5}, "dppo_cap"),
        ({"minibatches": 0}, "minibatches"),
        ({"minibatches": True}, "minibatches"),
        ({"min_kept_frac": 0}, "min_kept_frac"),
        ({"min_kept_frac": 1.5}, "min_kept_frac"),
        ({"min_kept_frac": 0.5, "k3_gate": None, "outlier_gate": None}, "min_kept_frac"),
        ({"anchor": "behavior", "min_kept_frac": 0.5}, "min_kept_frac"),
        ({"prefix_threshold": -0.1}, "prefix_threshold"),
        ({"correction": "geometric", "prefix_threshold": 0.2}, "prefix_threshold"),
        ({"anchor": "behavior", "prefix_threshold": 0.2}, "prefix_threshold"),
        ({"prefix_memory": 4}, "prefix_memory"),
        ({"prefix_threshold": 0.2, "prefix_memory": 0.5}, "prefix_memory"),
        ({"anchor": "behavior", "m2_bound": 0.04}, "m2_bound"),
        ({"anchor": "behavior", "stale_clip": 0.1}, "stale_clip"),
        ({"loss": "sapo", "stale_clip": 0.1}, "stale_clip"),
        *(
            ({**keys, "clip_spread": 5}, "clip_spread")
            for keys in (
                {"loss": "sapo"},
                {"name": "cispo", "clip": 0.2},
                {"name": "grpo", "clip": 0.2},
                {"ratio": "turn"},
                {"loss": "vespo"},
                {"band": {}},
                {"anchor": "behavior"},
                {"minibatches": 1},
                {"clip": 0.2},
            )
        ),
        ({"clip_spread": 0}, "clip_spread"),
        ({"clip_spread": float("inf")}, "clip_spread"),
        ({"clip": True}, "clip_low"),
        ({"k3_gate": True}, "k3_gate"),
        ({"staleness_cap": False}, "staleness_cap"),
        ({"clip_ratio_c": 10}, "clip_ratio_c"),
        ({"advantage": {"normalize": True}}, "normalize"),
        ({"advantage": {"scale": "none", "ddof": 0}}, "ddof"),
        ({"advantage": {"eps": 0}}, "eps"),
        ({"advantage": {"turn_discount": 0.5}}, "turn_discount"),
        ({"advantage": {"min_group_size": 1}}, "min_group_size"),
        ({"advantage": {"scale": "batch_std", "turn_reward_weight": 1}}, "scale"),
    ],
    ids=str,
)
def test_refused(given: dict[str, Any], key: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ObjectiveConfig(**given)
    error = caught.value.errors()[0]
    assert key in (*error["loc"], *error["msg"].removeprefix("Value error, ").split(":")[0].split(", "))


# Every key acts: it changes the loss, its gradient or what is reported

BEHAVIOR = {"anchor": "behavior", "clip": 0.02}
CISPO = {"loss": "cispo", "clip_low": 1e-3, "clip_high": 1e-3}
GMPO = {"loss": "gmpo", "advantage_reduction": "mean"}
VESPO = {"loss": "vespo"}
SHORT = ("token", "icepop", "geometric", "product")
ACTS: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "loss": [({}, {"loss": "sapo", "clip_low": 3e-4, "clip_high": 4e-4})],
    "ratio": [({}, {"ratio": "turn"}), ({}, {"ratio": "token"})],
    "gradient": [({}, {"gradient": "shared"}), ({"ratio": "turn"}, {"gradient": "shared"})],
    "clip_low": [({}, {"clip_low": 0.01}), (CISPO, {"clip_low": 0.01})],
    "clip_high": [({}, {"clip_high": 0.01}), (CISPO, {"clip_high": 0.01})],
    "band": [({}, {"band": {"kappa": 1e-6}}), *(({"band": base}, {"band": {**base, **band}}) for base, band in (
        ({}, {"kappa": 1e-8}), ({}, {"z": 1e-2}), ({"kappa": 1e-8}, {"min": 0.04}), ({}, {"max": 1e-4}),
    ))],
    "dual_clip": [({"clip": 0.9}, {"dual_clip": 1.0001})],
    "log_ratio_clamp": [(base, {"log_ratio_clamp": 1e-5}) for base in (
        {"clip": 0.9}, {"ratio": "turn", "clip": 0.9}, {"ratio": "token", "clip": 0.9}, {"loss": "sapo"}, GMPO,
    )],
    "aggregate": [({}, {"aggregate": "token"}), ({}, {"aggregate": "sum"})],
    "advantage_reduction": [({}, {"advantage_reduction": "mean"})],
    "anchor": [({"correction": "none"}, {"anchor": "behavior"})],
    "compensate": [(BEHAVIOR, {"compensate": False}), ({**BEHAVIOR, "ratio": "turn"}, {"compensate": False})],
    "correction": [({}, {"correction": kind}) for kind in (
        "none", "token_mask", "geometric_truncate", "geometric_mask", "product_truncate", "product_mask",
    )],
    "correction_max": [({"correction": kind}, {"correction_max": 1.05}) for kind in SHORT],
    "correction_min": [({"correction": kind}, {"correction_min": 0.97}) for kind in SHORT],
    "k3_gate": [({}, {"k3_gate": 0.01}), ({}, {"k3_gate": None}), (BEHAVIOR, {"k3_gate": 0.01})],
    "outlier_gate": [({}, {"outlier_gate": 0.3}), ({"k3_gate": None}, {"outlier_gate": None})],
    "geometric_gate": [({}, {"geometric_gate": 1.05})],
    "geometric_gate_low": [({"geometric_gate": 1.05}, {"geometric_gate_low": 0.999})],
    "off_policy_gate": [({}, {"off_policy_gate": 0.01}), ({}, {"off_policy_gate": None})],
    "staleness_cap": [({}, {"staleness_cap": 2}), ({}, {"staleness_cap": None})],
    "min_kept_frac": [({}, {"min_kept_frac": 1.0}), ({"k3_gate": None, "outlier_gate": 0.3}, {"min_kept_frac": 1.0})],
    "prefix_memory": [({"prefix_threshold": 0.1}, {"prefix_memory": 1.0})],
    "prefix_threshold": [({"correction": kind}, {"prefix_threshold": 0.1}) for kind in ("token", "token_mask")],
    "m2_bound": [({}, {"m2_bound": 0.01}), (CISPO, {"m2_bound": 0.01})],
    "stale_clip": [({}, {"stale_clip": 0.01}), ({"ratio": "token", "clip": 0.01}, {"stale_clip": 0.01})],
    "kl_coef": [({}, {"kl_coef": 0.1}), (CISPO, {"kl_coef": 0.1})],
    "kl_unbiased": [({"kl_coef": 0.1}, {"kl_unbiased": True})],
    "sapo_tau_positive": [({"loss": "sapo"}, {"sapo_tau_positive": 2.0})],
    "sapo_tau_negative": [({"loss": "sapo"}, {"sapo_tau_negative": 2.0})],
    "gmpo_clip": [(GMPO, {"gmpo_clip": 1e-4})],
    "dppo_delta": [({"loss": f"dppo_{kind}", "dppo_delta": 1.0}, {"dppo_delta": 1e-7}) for kind in ("tv", "kl")],
    "dppo_cap": [({"loss": "dppo_tv", "dppo_delta": 1.0}, {"dppo_cap": 1.0})],
    "vespo_positive": [(VESPO, {"vespo_positive": [1.0, 3.0]}), (VESPO, {"vespo_positive": [2.0, 1.0]})],
    "vespo_negative": [(VESPO, {"vespo_negative": [1.0, 2.0]}), (VESPO, {"vespo_negative": [3.0, 1.0]})],
}  # fmt: skip
# Read elsewhere: by a job's bounds, by the learner (two of them), by `gspo_core.advantage` (its tests), by a job's
# validation, by the product's refusal.
ELSEWHERE = {"name", "minibatches", "clip_spread", "advantage", "allow_one_sided_clip", "product_max_tokens"}
GATES = {"k3_gate": 0.08, "outlier_gate": 3.0, "off_policy_gate": 0.1, "staleness_cap": 6}


def test_every_key_has_a_case() -> None:
    assert ACTS.keys() | ELSEWHERE == ObjectiveConfig.model_fields.keys()


@pytest.mark.parametrize(
    ("key", "base", "change"), [(key, *pair) for key, pairs in ACTS.items() for pair in pairs], ids=str
)
def test_every_key_acts(key: str, base: dict[str, Any], change: dict[str, Any]) -> None:
    before = ObjectiveConfig(**{**GATES, **base})
    after = ObjectiveConfig(**{**GATES, **base, **change})
    assert getattr(before, key) != getattr(after, key)
    for seed in range(40):
        example = random_example(seed, num_rows=8)
        left, right = run(before, example), run(after, example)
        if left.loss != right.loss or not torch.equal(left.grad, right.grad):
            return
    pytest.fail(f"{key} changes neither loss nor gradient")


# Beside every loss, ratio and anchor each of these is refused or acts.
VALUES: dict[str, list[Any]] = {
    "gradient": ["shared"],
    "clip_low": [0.01],
    "clip_high": [0.01],
    "band": [{"kappa": 1e-6}],
    "dual_clip": [1.0001],
    "log_ratio_clamp": [1e-5],
    "aggregate": ["token", "sum"],
    "advantage_reduction": ["mean", "none"],
    "compensate": [False],
    "correction": [*SHORT, "geometric_mask", "product_mask", "none"],
    "correction_max": [1.05],
    "correction_min": [0.97],
    "product_max_tokens": [1],
    "k3_gate": [0.01, None],
    "outlier_gate": [0.3],
    "geometric_gate": [1.05],
    "geometric_gate_low": [0.999],
    "off_policy_gate": [0.01, None],
    "staleness_cap": [2, None],
    "min_kept_frac": [1.0],
    "prefix_threshold": [0.1],
    "prefix_memory": [2.0],
    "m2_bound": [0.01],
    "stale_clip": [0.01],
    "kl_coef": [0.1],
    "kl_unbiased": [True],
    "sapo_tau_positive": [2.0],
    "sapo_tau_negative": [2.0],
    "gmpo_clip": [1e-4],
    "dppo_delta": [1e-7],
    "dppo_cap": [1.0],
    "vespo_positive": [[1.0, 3.0]],
    "vespo_negative": [[1.0, 2.0]],
}
CHOICES = {"loss", "ratio", "anchor"}
LOSSES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "clip": (["sequence", "turn", "token"], {}),
    "sapo": (["sequence", "turn", "token"], {}),
    "cispo": (["token"], {"clip": 1e-3}),
    "gmpo": (["sequence"], {"advantage_reduction": "mean"}),
    "dppo_tv": (["token"], {"dppo_delta": 1.0}),
    "dppo_kl": (["token"], {"dppo_delta": 1.0}),
    "vespo": (["sequence"], {}),
}
BESIDE: list[dict[str, Any]] = [
    {"loss": loss, "ratio": ratio, "anchor": anchor, **keys, **more}
    for loss, (ratios, keys) in LOSSES.items()
    for ratio in ratios
    for anchor, more in (("proximal", {}), ("proximal", {"correction": "product", "kl_coef": 0.1}), ("behavior", {}))
]


def test_every_key_is_tried_beside_every_loss() -> None:
    assert VALUES.keys() | CHOICES | ELSEWHERE == ObjectiveConfig.model_fields.keys() | {"product_max_tokens"}


@pytest.mark.parametrize("base", BESIDE, ids=str)
def test_a_key_beside_any_other_acts_or_is_refused(base: dict[str, Any]) -> None:
    before = ObjectiveConfig(**{**GATES, **base})
    plain: dict[int, Any] = {}
    idle = []
    for key, value in [(key, value) for key, values in VALUES.items() for value in values]:
        try:
            after = ObjectiveConfig(**{**GATES, **base, key: value})
        except ValidationError:
            continue
        if after != before and not any(_outcome(after, seed) != _outcome_once(before, seed, plain) for seed in SEEDS):
            idle.append((key, value))
    assert idle == []


def test_a_key_that_does_not_act_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative of the test above: without refusals many keys are idle."""
    monkeypatch.setattr("gspo_core.objective_config._idle_keys", lambda config: {})
    monkeypatch.setattr(sys.modules[__name__], "SEEDS", range(3))
    for base in ({"loss": "cispo", "clip": 1e-3}, {"loss": "vespo"}, {"ratio": "token"}):
        with pytest.raises(AssertionError):
            test_a_key_beside_any_other_acts_or_is_refused(base)


SEEDS = range(60)


def _outcome_once(config: ObjectiveConfig, seed: int, known: dict[int, Any]) -> Any:
    if seed not in known:
        known[seed] = _outcome(config, seed)
    return known[seed]


def _outcome(config: ObjectiveConfig, seed: int) -> Any:
    """Loss and gradient, or why there are none."""
    try:
        result = run(config, random_example(seed, num_rows=8))
    except ObjectiveError as error:
        return str(error)
    return result.loss, result.grad.numpy().tobytes()


def test_gates_that_are_off_report_nothing() -> None:
    example = random_example(1)
    gates = {"k3_gate": "k3", "outlier_gate": "outlier", "off_policy_gate": "off_policy", "staleness_cap": "staleness"}
    for key, name in gates.items():
        on, off = ObjectiveConfig(**GATES), ObjectiveConfig(**{**GATES, key: None})
        assert f"gspo/kept_frac_{name}" in loss_metrics(run(on, example).stats, on)
        assert f"gspo/kept_frac_{name}" not in loss_metrics(run(off, example).stats, off)


# Legal, and wrong


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"clip": 0.2}, "clip_low"),
        ({"ratio": "turn", "clip": [3e-4, 0.2]}, "clip_low"),
        ({"ratio": "token"}, "clip_low"),
        ({"loss": "cispo"}, "clip_high"),
        ({"anchor": "behavior"}, "anchor"),
        ({"minibatches": 1}, "minibatches"),
        ({"aggregate": "token"}, "aggregate"),
        ({"correction": "product"}, "correction"),
        ({"gradient": "shared"}, "gradient"),
        ({"gradient": "shared", "correction": "none", "advantage": {"turn_reward_weight": 1}}, "advantage"),
        ({"k3_gate": None, "outlier_gate": None}, "k3_gate"),
    ],
    ids=str,
)
def test_warned(given: dict[str, Any], key: str) -> None:
    warnings = config_warnings(ObjectiveConfig(**given))
    assert len(warnings) == 1
    assert warnings[0].startswith(key)


@pytest.mark.parametrize(
    "given",
    [
        {"ratio": "token", "clip": [0.2, 0.27]},
        {"clip": [3e-3, 4e-3]},
        {"anchor": "behavior", "band": {}},
        {"anchor": "behavior", "clip": 0.03},
        {"loss": "cispo", "clip": [1.0, 4.0]},
        {"loss": "sapo"},
        {"gradient": "shared", "correction": "none"},
    ],
    ids=str,
)
def test_not_warned(given: dict[str, Any]) -> None:
    assert config_warnings(ObjectiveConfig(**given)) == []


def test_a_job_may_use_the_rewards_of_turns() -> None:
    assert config_refusals(ObjectiveConfig(advantage={"turn_reward_weight": 0.5})) == []


def test_a_job_refuses_a_one_sided_clip_unless_it_says_so() -> None:
    one_sided: dict[str, Any] = {"anchor": "behavior", "compensate": False}
    assert "compensate" in config_refusals(ObjectiveConfig(**one_sided))[0]
    assert config_refusals(ObjectiveConfig(**one_sided, allow_one_sided_clip=True)) == []
    for repaired in ({"clip": 1e-3}, {"band": {}}, {"ratio": "token", "compensate": True}, {"compensate": True}):
        assert config_refusals(ObjectiveConfig(**{**one_sided, **repaired})) == []
