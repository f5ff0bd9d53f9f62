"""What a user may set about the objective and its advantages.

One rule: every key acts or is refused. A key that cannot act beside the others must stay at its default, so that no
setting is ever dropped in silence. Numbers that are legal but known to be wrong are named by `config_warnings`.

It imports neither torch nor numpy and computes no loss (`gspo_core.objective` does).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gspo_core.documented import Documented
from gspo_core.json_value import JSON

PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Name = Literal["gspo", "grpo", "cispo", "sapo", "gmpo", "dppo_tv", "dppo_kl", "vespo"]
Share = Annotated[float, Field(gt=0, le=1)]

Loss = Literal["clip", "cispo", "sapo", "gmpo", "dppo_tv", "dppo_kl", "vespo"]
Correction = Literal[
    "none",
    "token_truncate",
    "token_mask",
    "geometric_truncate",
    "geometric_mask",
    "product_truncate",
    "product_mask",
]

# Names under which an objective is known, and the keys that they stand for.
NAMES: Mapping[str, Mapping[str, str]] = {
    "gspo": {"loss": "clip", "ratio": "sequence"},
    "grpo": {"loss": "clip", "ratio": "token"},
    "cispo": {"loss": "cispo"},
    "sapo": {"loss": "sapo"},
    "gmpo": {"loss": "gmpo"},
    "dppo_tv": {"loss": "dppo_tv"},
    "dppo_kl": {"loss": "dppo_kl"},
    "vespo": {"loss": "vespo"},
}
# Names that are refused with a reason.
WITHDRAWN: Mapping[str, str] = {
    "ppo": "ppo needs a critic, and there is none here; its clip on each token, with advantages that compare the "
    "members of a group, is grpo",
}
CORRECTION_NAMES: Mapping[str, Correction] = {
    "token": "token_truncate",
    "icepop": "token_mask",
    "geometric": "geometric_truncate",
    "product": "product_truncate",
}
# Keys that are accepted besides the fields, as their JSON schema describes them.
OTHER_KEYS: Mapping[str, Mapping[str, JSON]] = {
    "clip": {
        "anyOf": [
            {"type": "number"},
            {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
        ],
        "description": "Sets clip_low and clip_high: one number for both, or [low, high].",
    },
    "importance_sampling_level": {
        "enum": ["sequence", "token"],
        "type": "string",
        "description": "Another name for ratio.",
    },
}
# The ratio that a loss is defined on, where it leaves no choice.
RATIO_OF_LOSS: Mapping[str, str] = {
    "cispo": "token",
    "dppo_tv": "token",
    "dppo_kl": "token",
    "gmpo": "sequence",
    "vespo": "sequence",
}
# Below this width a clip on the sampler's own log-probs reads the drift between engine and trainer, not the update.
TIGHT_BEHAVIOR_CLIP = 1e-3
WIDE_SEQUENCE_CLIP = 0.1
# What a clip may widen to by itself: a wider one lets the spread grow that it follows.
MAX_SPREAD_CLIP_LOW = 0.2
TIGHT_TOKEN_CLIP = 0.01


def _is_none(value: float | str | None) -> bool:
    return value is None


def _is_default(config: BaseModel, key: str) -> bool:
    return bool(getattr(config, key) == type(config).model_fields[key].get_default(call_default_factory=True))


class AdvantageConfig(Documented):
    """How the rewards of a group become advantages."""

    baseline: Literal["mean", "leave_one_out"] = "mean"
    """What is subtracted: the mean of all members with a reward, or of the others."""
    scale: Literal["group_std", "batch_std", "batch_centered_std", "none"] = "group_std"
    """What the difference is divided by: the standard deviation of the group's rewards, of all rewards of the batch,
    of the batch's rewards after their group's mean was subtracted, or nothing (Dr. GRPO)."""
    ddof: Literal[0, 1] = 1
    """The standard deviation divides by n - ddof."""
    eps: NonNegativeFloat = 1e-6
    """Added to the standard deviation."""
    min_std: NonNegativeFloat = 0.0
    """A smaller standard deviation is raised to this, so that tiny differences are not blown up; counted."""
    min_group_size: Annotated[int, Field(ge=2)] = 2
    """Groups with fewer rewards get advantage 0; counted."""
    zero_variance: Literal["keep", "drop"] = "keep"
    """Groups whose rewards are all equal teach nothing. `keep`: they stay in the batch with advantage 0. `drop`
    (dynamic sampling): they are dropped before the batch is formed and others take their place; counted."""
    turn_reward_weight: NonNegativeFloat = 0.0
    """Above 0, every turn gets an advantage of its own: the episode's, plus this weight times the advantage of the
    turn rewards from that turn on, compared within the group at the same turn."""
    turn_discount: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount of later turn rewards, per turn."""
    # Release 0.2.0 does not know these keys.
    turn_groups: Literal["turn", "observation"] = Field(default="turn", exclude_if=lambda groups: groups == "turn")
    """What a turn is compared with, where turns have advantages of their own: the same turn of the other members, or
    every turn of the group that read exactly the same before its first sampled token (after GiGPO)."""
    part_weights: dict[str, Annotated[float, Field(allow_inf_nan=False)]] | None = Field(
        default=None, min_length=1, exclude_if=lambda weights: weights is None
    )
    """Compare each part of the reward within the group by itself, over its own standard deviation, and take the sum by
    these weights in place of the reward (GDPO, which then has `scale: batch_std`): a part with a small spread is not
    drowned by one with a large spread. A part that an episode does not report is 0, and a part without a weight is
    left out. Null: the reward is compared as a whole."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.part_weights is not None and self.scale not in ("batch_std", "none"):
            raise ValueError(
                f"part_weights: each part has a scale of its own already, so scale: {self.scale} would "
                "divide twice; use batch_std (GDPO) or none"
            )
        if self.part_weights is not None and self.zero_variance == "drop":
            raise ValueError("part_weights: zero_variance: drop looks at the reward as a whole; use keep")
        is_unscaled = self.scale == "none" and self.part_weights is None
        idle = [key for key in ("ddof", "eps", "min_std") if is_unscaled and not _is_default(self, key)]
        if idle:
            raise ValueError(f"{', '.join(idle)}: only acts on a standard deviation, but scale is none; remove it")
        if not is_unscaled and self.eps == 0 and self.min_std == 0:
            raise ValueError("eps: 0 together with min_std 0 can divide by almost zero; set one of them")
        if self.turn_reward_weight and self.scale.startswith("batch"):
            raise ValueError(f"scale: {self.scale} is not defined for turn rewards; use group_std or none")
        for key in ("turn_discount", "turn_groups"):
            if not self.turn_reward_weight and not _is_default(self, key):
                raise ValueError(f"{key}: only acts on turn rewards; set turn_reward_weight or remove it")
        if self.turn_groups == "observation" and self.zero_variance == "drop":
            raise ValueError("turn_groups: zero_variance: drop looks at rewards alone, not at what was read; use keep")
        return self


class Band(Documented):
    """A clip width for each sequence of n trained tokens: z * sqrt(2 * kappa / n), within [min, max]."""

    kappa: PositiveFloat = 2.5e-4
    """Target KL divergence per token. Below the measured mismatch of engine and trainer it clips noise."""
    z: PositiveFloat = 1.0
    """Standard deviations of the log ratio that stay unclipped."""
    min: NonNegativeFloat = 0.0
    """Narrowest width."""
    max: Annotated[float, Field(gt=0, le=1)] = 0.05
    """Widest width."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min: {self.min} is above max: {self.max}")
        return self


def _add_other_spellings(schema: dict[str, Any]) -> None:
    properties = schema["properties"]
    properties.update({name: dict(described) for name, described in OTHER_KEYS.items()})
    properties["correction"]["enum"] = [*properties["correction"]["enum"], *CORRECTION_NAMES]


T = TypeVar("T")
Given: TypeAlias = dict[str, JSON]
"""The configuration as it was written."""


class ObjectiveConfig(Documented):
    """The loss. The default is decoupled GSPO: the trust region is measured from the trainer's own policy when the
    batch entered it, and the gap between that policy and the sampler is corrected by a bounded weight.

    Also accepted: `clip` sets clip_low and clip_high, `importance_sampling_level` is
    another name for ratio, and the corrections have the short names token, icepop, geometric and product.
    """

    model_config = ConfigDict(json_schema_extra=_add_other_spellings)

    # Release 0.2.0 reads the key and stores what it stands for, so a job that has it stored was submitted later.
    name: Name | None = Field(default=None, exclude_if=_is_none)
    """Sets loss and ratio; `gspo` also bounds gradients, where `optimizer.max_grad_growth` does not say how. A job that
    names no objective is named so when it is submitted, if its loss and ratio are those of `gspo`."""
    loss: Loss = "clip"
    """`clip` is the pessimistic clip of PPO, GRPO and GSPO; the others are alternatives to it."""
    ratio: Literal["sequence", "turn", "token"] = "sequence"
    """What log ratios are averaged over: an episode (GSPO), each of its turns, or nothing (GRPO, PPO)."""
    gradient: Literal["per_token", "shared"] = "per_token"
    """How the gradient of a sequence or turn ratio reaches its tokens. `per_token` (GSPO-token): each token with its
    own advantage and weight. `shared` (GSPO): their mean. Equal where advantage and weight are constant."""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 3e-4
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]. Token ratios need about 0.2."""
    clip_high: PositiveFloat = 4e-4
    """See clip_low. Token ratios need about 0.27."""
    band: Band | None = None
    """A clip width that shrinks with the length of the sequence, in place of clip_low and clip_high."""
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """Where the advantage is negative the loss is capped at this many times its size. Null: never."""
    log_ratio_clamp: PositiveFloat | None = 10.0
    """Log ratios above it are clamped, without gradient, and counted. Null: never."""
    aggregate: Literal["sequence", "token", "sum"] = "sequence"
    """Mean over the tokens of a sequence, then over sequences; mean over all tokens; or sum over the tokens of a
    sequence and mean over sequences. Only the first gives episodes of all lengths the same weight."""
    advantage_reduction: Literal["none", "mean"] = "none"
    """`mean` averages advantages per token over their sequence before the clip."""

    anchor: Literal["proximal", "behavior"] = "proximal"
    """What the ratio compares with: the trainer's policy when the batch entered it, or the recorded sampler (which
    saves a forward pass, and clips drift instead of updates: see the documentation before using it)."""
    compensate: bool = True
    """With `anchor: behavior`: clip decisions are taken on the ratio with its expected drift removed. Acts on
    sequence and turn ratios of the loss `clip`."""
    allow_one_sided_clip: bool = False
    """Accept a clip narrower than 0.001 on the sampler's log-probs without compensation, which a job refuses."""

    correction: Correction = "token_truncate"
    """Weight that corrects from the sampler to the proximal policy: exp of the difference per token, its geometric mean
    over the sequence, or its product; `truncate` bounds it, `mask` drops what lies outside the bounds.
    With `anchor: behavior` the ratio already contains it, so it is `none`."""
    correction_max: PositiveFloat = 2.0
    """Upper bound of the weight."""
    correction_min: PositiveFloat | None = None
    """Lower bound of the weight. Null: 0."""
    prefix_threshold: NonNegativeFloat | None = Field(default=None, exclude_if=_is_none)
    """Tokens behind others whose log-prob has changed by more than this since they were sampled are weighted by how
    much less likely those have become, too: what follows an error that the policy no longer makes teaches it little.
    Smaller changes are taken for noise. Null: never."""
    prefix_memory: Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(
        default=10.0, exclude_if=lambda tokens: tokens == 10.0
    )
    """How many trained tokens such a change counts for what follows it: with each it counts 1 - 1 / this as much."""
    product_max_tokens: Annotated[int, Field(gt=0)] = 512
    """Product weights refuse sequences with more trained tokens, because almost all of their weights vanish."""

    k3_gate: PositiveFloat | None = 0.05
    """Sequences whose mean k3 between sampler and anchor is larger are withheld. Null: never."""
    outlier_gate: PositiveFloat | None = 5.0
    """Sequences with a token whose log-prob differs by more between sampler and anchor are withheld. Null: never."""
    geometric_gate: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """Sequences whose geometric mean weight lies outside [1 / this, this] are withheld. Null: never. A pair names both
    ends: `[0.999, 1.002]`."""
    off_policy_gate: PositiveFloat | None = 0.5
    """Sequences with a negative advantage whose mean log-prob fell by more since they were sampled are withheld (OPSM).
    Null: never."""
    staleness_cap: Annotated[int, Field(ge=0)] | None = None
    """Tokens staler than this many steps are withheld. Null: none. A job takes it from its rollout section."""
    # Release 0.2.0 does not know these keys and refuses a job with them, so a job that does not use them is stored
    # without.
    geometric_gate_low: Annotated[float, Field(gt=0, lt=1)] | None = Field(default=None, exclude_if=_is_none)
    """The lower end of `geometric_gate`, where it is not 1 / the upper one."""
    min_kept_frac: Share | None = Field(default=None, exclude_if=_is_none)
    """Where k3_gate and outlier_gate would keep a smaller share of the batch's sequences than this, it is the policy
    that has moved, not some sequences that are odd: then this share is kept, the nearest first. Null: the gates may
    withhold everything."""
    m2_bound: PositiveFloat | None = Field(default=None, exclude_if=_is_none)
    """Tokens with the largest squared log ratio to the sampler are withheld until the mean square of the rest of the
    batch is below this (M2PO; 0.04 is usual). Null: never."""
    stale_clip: PositiveFloat | None = Field(default=None, exclude_if=_is_none)
    """Where the log ratio of proximal policy to sampler of a sequence (turn, token: what `ratio` says) is further from
    0 than this, the clip becomes narrower, the more the further (after SAT). Null: never."""
    clip_spread: PositiveFloat | None = Field(default=None, exclude_if=_is_none)
    """The clip of a sequence is as wide as so many times the spread of log ratios that the steps before it showed
    (`gspo/log_ratio_std`; 5 is usual), but never narrower than clip_low and clip_high and never wider than 0.2 below;
    above, it grows by the same factor. Null: it is what clip_low and clip_high say."""

    kl_coef: NonNegativeFloat = 0.0
    """Coefficient of the k3 estimate of the KL divergence from a frozen reference model."""
    kl_unbiased: bool = False
    """Multiply that estimate by the ratio of the policy to the anchor, which makes its gradient unbiased."""

    sapo_tau_positive: PositiveFloat = 1.0
    """Loss `sapo`: steepness where the advantage is positive."""
    sapo_tau_negative: PositiveFloat = 1.05
    """Loss `sapo`: steepness where the advantage is negative."""
    gmpo_clip: PositiveFloat = 0.4
    """Loss `gmpo`: bound of the log ratio of a token."""
    dppo_delta: PositiveFloat | None = None
    """Losses `dppo_tv` (0.2 is usual) and `dppo_kl` (0.05): the divergence beyond which a token is left out."""
    dppo_cap: PositiveFloat = 20.0
    """Losses `dppo_tv` and `dppo_kl`: upper bound of the token ratio."""
    vespo_positive: tuple[PositiveFloat, PositiveFloat] = (2.0, 3.0)
    """Loss `vespo`: k and lambda where the advantage is not negative."""
    vespo_negative: tuple[PositiveFloat, PositiveFloat] = (3.0, 2.0)
    """Loss `vespo`: k and lambda where the advantage is negative."""

    minibatches: Annotated[int, Field(ge=1)] = 4
    """Optimizer updates per batch. With 1 the proximal policy is the policy itself: the ratio is 1 and nothing
    can be clipped."""
    advantage: AdvantageConfig = Field(default_factory=AdvantageConfig)
    """How rewards become advantages."""

    @property
    def geometric_log_band(self) -> tuple[float, float] | None:
        """The logarithms of the ends of `geometric_gate`."""
        if self.geometric_gate is None:
            return None
        high = math.log(self.geometric_gate)
        return -high if self.geometric_gate_low is None else math.log(self.geometric_gate_low), high

    @property
    def bounds_ratio(self) -> bool:
        """Whether the loss takes `log_ratio_clamp`."""
        return self.loss in ("clip", "sapo", "gmpo")

    @property
    def compensates(self) -> bool:
        """Whether clip decisions have the expected drift removed."""
        return self.compensate and self.anchor == "behavior" and self.loss == "clip" and self.ratio != "token"

    @model_validator(mode="before")
    @classmethod
    def _resolve_names(cls, data: T) -> T | Given:
        if not isinstance(data, Mapping):
            return data
        given: Given = dict(data)
        name = given.get("name")
        if name is not None:
            if isinstance(name, str) and name in WITHDRAWN:
                raise ValueError(f"name: {WITHDRAWN[name]}")
            if not isinstance(name, str) or name not in NAMES:
                raise ValueError(f"name: {name!r} is unknown; use one of {', '.join(NAMES)}")
            for key, value in NAMES[name].items():
                _put(given, key, value, f"name: {name}")
        if "importance_sampling_level" in given:
            level = given.pop("importance_sampling_level")
            if level not in ("sequence", "token"):
                raise ValueError(f"importance_sampling_level: must be sequence or token, not {level!r}")
            _put(given, "ratio", level, f"importance_sampling_level: {level}")
        if "clip" in given:
            _resolve_clip(given)
        if isinstance(gate := given.get("geometric_gate"), list | tuple):
            _resolve_gate(given, gate)
        correction = given.get("correction")
        if isinstance(correction, str):
            given["correction"] = CORRECTION_NAMES.get(correction, correction)
        _fill_dependent_defaults(given)
        return given

    @model_validator(mode="after")
    def _check(self) -> Self:
        required = RATIO_OF_LOSS.get(self.loss)
        if required is not None and self.ratio != required:
            raise ValueError(f"ratio: the loss {self.loss} is defined on ratio: {required}, not {self.ratio}")
        if self.loss.startswith("dppo") and self.dppo_delta is None:
            raise ValueError(f"dppo_delta: the loss {self.loss} needs it (about 0.2 for dppo_tv, 0.05 for dppo_kl)")
        if self.loss == "gmpo" and self.advantage.turn_reward_weight and self.advantage_reduction != "mean":
            raise ValueError(
                "loss: gmpo takes one advantage per sequence, but advantage.turn_reward_weight gives each turn its "
                "own; set advantage_reduction: mean or remove the weight"
            )
        if self.correction_min is not None and self.correction_min > self.correction_max:
            raise ValueError(f"correction_min: {self.correction_min} is above correction_max: {self.correction_max}")
        for key, condition in _idle_keys(self).items():
            if not _is_default(self, key):
                raise ValueError(f"{key}: only acts with {condition}; remove it or change the other key")
        return self


def default_name(objective: ObjectiveConfig) -> Name | None:
    """What a newly submitted objective without a name is called."""
    is_gspo = all(getattr(objective, key) == value for key, value in NAMES["gspo"].items())
    return "gspo" if objective.name is None and is_gspo else objective.name


def _put(given: Given, key: str, value: JSON, reason: str) -> None:
    if given.setdefault(key, value) != value:
        raise ValueError(f"{key}: {given[key]!r} contradicts {reason}")


def _resolve_clip(given: Given) -> None:
    clip = given.pop("clip")
    pair = list(clip) if isinstance(clip, list | tuple) else [clip, clip]
    if len(pair) != 2:
        raise ValueError(f"clip: must be a number or [low, high], not {clip!r}")
    _put(given, "clip_low", pair[0], f"clip: {clip}")
    _put(given, "clip_high", pair[1], f"clip: {clip}")


def _resolve_gate(given: Given, pair: Sequence[JSON]) -> None:
    if len(pair) != 2:
        raise ValueError(f"geometric_gate: must be a number or [low, high], not {pair!r}")
    given["geometric_gate"] = pair[1]
    _put(given, "geometric_gate_low", pair[0], f"geometric_gate: {pair}")


def _fill_dependent_defaults(given: Given) -> None:
    """Defaults that follow from another key, written out, so that a stored configuration says what it does."""
    required = RATIO_OF_LOSS.get(str(given.get("loss")))
    if required is not None:
        given.setdefault("ratio", required)
    if given.get("anchor") == "behavior":
        given.setdefault("correction", "none")


def _idle_keys(config: ObjectiveConfig) -> dict[str, str]:
    """Keys that cannot act beside the others, with the condition under which they would."""
    loss, behavior = config.loss, config.anchor == "behavior"
    pooled = config.ratio != "token"
    acts: dict[str, tuple[bool, str]] = {
        "gradient": (pooled and loss in ("clip", "sapo"), "ratio: sequence or turn of the losses clip and sapo"),
        "clip_low": (loss in ("clip", "cispo") and config.band is None, "the losses clip and cispo, without a band"),
        "clip_high": (loss in ("clip", "cispo") and config.band is None, "the losses clip and cispo, without a band"),
        "band": (loss == "clip" and pooled, "ratio: sequence or turn of the loss clip"),
        "dual_clip": (loss == "clip", "the loss clip"),
        "log_ratio_clamp": (config.bounds_ratio, "the losses clip, sapo and gmpo"),
        "compensate": (behavior and loss == "clip" and pooled, "anchor: behavior, loss: clip, ratio: sequence or turn"),
        "allow_one_sided_clip": (_is_one_sided(config), "a narrow clip on anchor: behavior without compensation"),
        "correction_max": (config.correction != "none", "a correction"),
        "correction_min": (config.correction != "none", "a correction"),
        "product_max_tokens": (config.correction.startswith("product"), "correction: product"),
        "min_kept_frac": (not behavior and _has_distance_gate(config), "anchor: proximal and k3_gate or outlier_gate"),
        "geometric_gate_low": (config.geometric_gate is not None, "geometric_gate"),
        "prefix_memory": (config.prefix_threshold is not None, "prefix_threshold"),
        "prefix_threshold": (config.correction.startswith("token"), "correction: token_truncate or token_mask"),
        "m2_bound": (not behavior, "anchor: proximal"),
        "stale_clip": (not behavior and loss == "clip", "anchor: proximal and the loss clip"),
        "clip_spread": (
            _can_widen(config),
            "anchor: proximal, the loss clip on ratio: sequence without a band, a clip_low below "
            f"{MAX_SPREAD_CLIP_LOW} and minibatches of 2 and more",
        ),
        "kl_unbiased": (config.kl_coef > 0, "kl_coef above 0"),
        "dppo_delta": (loss.startswith("dppo"), "the losses dppo_tv and dppo_kl"),
        "dppo_cap": (loss.startswith("dppo"), "the losses dppo_tv and dppo_kl"),
        "gmpo_clip": (loss == "gmpo", "the loss gmpo"),
    }
    for name in ("sapo_tau_positive", "sapo_tau_negative", "vespo_positive", "vespo_negative"):
        acts[name] = (loss == name.split("_")[0], f"the loss {name.split('_')[0]}")
    idle = {key: condition for key, (does_act, condition) in acts.items() if not does_act}
    if behavior and config.correction != "none":
        raise ValueError("correction: with anchor: behavior the ratio already contains the correction; set it to none")
    return idle


def _has_distance_gate(config: ObjectiveConfig) -> bool:
    return config.k3_gate is not None or config.outlier_gate is not None


def _can_widen(config: ObjectiveConfig) -> bool:
    """The spread is measured for sequences, and with a single update it is 0."""
    clips_sequences = config.loss == "clip" and config.ratio == "sequence" and config.band is None
    is_measured = config.anchor == "proximal" and config.minibatches > 1
    return clips_sequences and is_measured and config.clip_low < MAX_SPREAD_CLIP_LOW


def _is_one_sided(config: ObjectiveConfig) -> bool:
    """Drift makes this clip drop negative advantages only (`docs/objective.md`, the drift law)."""
    pooled_clip = config.loss == "clip" and config.ratio != "token" and config.band is None
    tight = min(config.clip_low, config.clip_high) < TIGHT_BEHAVIOR_CLIP
    return config.anchor == "behavior" and pooled_clip and tight and not config.compensate


def config_refusals(config: ObjectiveConfig) -> list[str]:
    """Why a job must not run with this configuration, each naming its key; `policy_loss` computes it all the same."""
    refusals = []
    if _is_one_sided(config) and not config.allow_one_sided_clip:
        refusals.append(
            f"compensate: a clip of {config.clip_low:g}/{config.clip_high:g} on anchor: behavior without compensation "
            "drops negative advantages only, as soon as engine and trainer differ; use anchor: proximal, "
            "compensate: true or a band, or set allow_one_sided_clip: true"
        )
    return refusals


def config_warnings(config: ObjectiveConfig) -> list[str]:
    """What is legal but known to be wrong or easily misunderstood, one sentence each, naming the key."""
    return [*_clip_warnings(config), *_weight_warnings(config)]


def _clip_warnings(config: ObjectiveConfig) -> list[str]:
    warnings = []
    low, high = config.clip_low, config.clip_high
    clips = config.loss == "clip" and config.band is None
    if clips and config.ratio != "token" and max(low, high) > WIDE_SEQUENCE_CLIP:
        warnings.append(
            f"clip_low, clip_high: {low:g}/{high:g} on a {config.ratio} ratio hardly ever binds, unless episodes "
            "have a few dozen tokens (the paper: 0.0003/0.0004)"
        )
    if clips and config.ratio == "token" and min(low, high) < TIGHT_TOKEN_CLIP:
        warnings.append(
            f"clip_low, clip_high: {low:g}/{high:g} on a token ratio clips almost every token (usual: 0.2/0.27)"
        )
    if config.loss == "cispo" and high < TIGHT_TOKEN_CLIP:
        warnings.append(f"clip_high: a CISPO weight bounded by {1 + high:g} is no importance weight (usual: 0.2 to 4)")
    if clips and config.anchor == "behavior" and config.ratio != "token" and min(low, high) < TIGHT_BEHAVIOR_CLIP:
        warnings.append(
            f"anchor: behavior with a clip of {low:g}/{high:g} drops much of the data as soon as engine and trainer "
            "differ; anchor: proximal does not see that difference"
        )
    if config.minibatches == 1 and config.anchor == "proximal" and config.loss == "clip":
        warnings.append("minibatches: with 1 the ratio is always 1 and the clip cannot bind")
    return warnings


def _weight_warnings(config: ObjectiveConfig) -> list[str]:
    warnings = []
    if config.ratio != "token" and config.loss == "clip" and config.aggregate != "sequence":
        warnings.append(
            f"aggregate: {config.aggregate} weights episodes by their length, which the GSPO paper does not"
        )
    if config.correction.startswith("product"):
        warnings.append("correction: product weights vanish on long episodes although every clip metric looks healthy")
    uses_shared = config.gradient == "shared" and config.ratio != "token"
    if uses_shared and config.correction.startswith("token"):
        warnings.append("gradient: shared replaces the weight of each token by their mean; per_token keeps them")
    if config.advantage.turn_reward_weight and (uses_shared or config.advantage_reduction == "mean"):
        warnings.append("advantage.turn_reward_weight: gradient: shared or advantage_reduction: mean average it away")
    if config.k3_gate is None and config.outlier_gate is None:
        warnings.append(
            "k3_gate, outlier_gate: without them corrupt or far too stale episodes are trained at full weight"
        )
    return warnings
