"""What is compared: objectives as a job would name them, and lies about who sampled.

All but those that name their clip have one that is wide enough not to decide, and no gates unless they are named, so
that what differs is what the name says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gspo_core.objective_config import ObjectiveConfig

Attribution = Literal["recorded", "oldest", "newest"]

WIDE = [0.05, 0.08]
TOKEN_CLIP = [0.2, 0.27]
NO_GATES: Mapping[str, Any] = {"k3_gate": None, "outlier_gate": None, "off_policy_gate": None}
OPEN: Mapping[str, Any] = {"clip": WIDE, **NO_GATES}


@dataclass(frozen=True)
class Estimator:
    """One line of the tables."""

    name: str
    objective: Mapping[str, Any] = field(default_factory=dict)
    attribution: Attribution = "recorded"

    @property
    def config(self) -> ObjectiveConfig:
        return ObjectiveConfig.model_validate(dict(self.objective))

    def can_take(self, length: int) -> bool:
        config = self.config
        return not config.correction.startswith("product") or length <= config.product_max_tokens


CLIPS = ((3e-4, 4e-4), (1e-3, 1.5e-3), (3e-3, 4e-3), (1e-2, 1.5e-2), (2e-2, 3e-2))
"""With token weights and no gates, narrower than WIDE: which is the narrowest that points the right way?"""


def _only(gate: str) -> Mapping[str, Any]:
    """Token weights and one gate, as it is by default."""
    return {key: value for key, value in OPEN.items() if key != gate}


HARDLY_CUT: Mapping[str, Any] = {**OPEN, "correction_max": 20.0}
TRUTH = Estimator("token weights up to 20", HARDLY_CUT)
"""Lies are told about weights that are hardly cut: a cut hides part of a lie."""
PLAIN = Estimator("token weights", OPEN)
GATED = Estimator("token weights and gates", {"clip": WIDE})
LIES: Mapping[str, tuple[Estimator, ...]] = {
    one.name: tuple(
        Estimator(f"{one.name}, all attributed to the {which} version", one.objective, which)
        for which in ("oldest", "newest")
    )
    for one in (TRUTH, PLAIN, GATED)
}
"""By the name of what they are told about."""
NARROWER: tuple[Estimator, ...] = tuple(
    Estimator(f"clip {low:g} / {high:g}", {**NO_GATES, "clip": [low, high]}) for low, high in CLIPS
)
ESTIMATORS: tuple[Estimator, ...] = (
    Estimator("default (clip 3e-4 / 4e-4)"),
    Estimator("default, clip 3e-3 / 4e-3", {"clip": [3e-3, 4e-3]}),
    GATED,
    PLAIN,
    Estimator("no correction, no gates", {**OPEN, "correction": "none"}),
    Estimator("gates without correction", {"clip": WIDE, "correction": "none"}),
    Estimator("token weights up to 5", {**OPEN, "correction_max": 5.0}),
    TRUTH,
    *(
        Estimator(
            f"token weights up to 5, prefix_threshold: {threshold:g} and memory {memory:g}",
            {**OPEN, "correction_max": 5.0, "prefix_threshold": threshold, "prefix_memory": memory},
        )
        for threshold, memory in ((0.2, 10.0), (0.2, 1e9), (0.5, 10.0))
    ),
    Estimator("token weights up to 2, prefix_threshold: 0.2", {**OPEN, "prefix_threshold": 0.2}),
    Estimator(
        "token weights up to 5 and gates, prefix_threshold: 0.2",
        {"clip": WIDE, "correction_max": 5.0, "prefix_threshold": 0.2},
    ),
    Estimator("icepop 0.5 to 5", {**OPEN, "correction": "icepop", "correction_min": 0.5, "correction_max": 5.0}),
    Estimator("geometric weights", {**OPEN, "correction": "geometric"}),
    Estimator("product weights", {**OPEN, "correction": "product"}),
    Estimator("anchored on the sampler", {**OPEN, "anchor": "behavior"}),
    Estimator("anchored on the sampler, clip 3e-4 / 4e-4", {**NO_GATES, "anchor": "behavior"}),
    Estimator("GRPO, corrected", {"name": "grpo", "clip": TOKEN_CLIP, **NO_GATES}),
    Estimator("GRPO anchored on the sampler", {"name": "grpo", "clip": TOKEN_CLIP, "anchor": "behavior", **NO_GATES}),
    Estimator("CISPO, up to 5", {"name": "cispo", "clip": [1.0, 4.0], **NO_GATES}),
    Estimator(
        "CISPO anchored on the sampler, up to 5",
        {"name": "cispo", "clip": [1.0, 4.0], "anchor": "behavior", **NO_GATES},
    ),
    Estimator("SAPO", {"name": "sapo", **NO_GATES}),
    Estimator("GMPO", {"name": "gmpo", **NO_GATES}),
    Estimator("DPPO-TV 0.2", {"name": "dppo_tv", "dppo_delta": 0.2, **NO_GATES}),
    Estimator("DPPO-KL 0.05", {"name": "dppo_kl", "dppo_delta": 0.05, **NO_GATES}),
    Estimator("VESPO", {"name": "vespo", **NO_GATES}),
    Estimator("VESPO anchored on the sampler", {"name": "vespo", "anchor": "behavior", **NO_GATES}),
    Estimator("default, clip by length (band)", {"band": {}}),
    Estimator("band, no gates", {"band": {}, **NO_GATES}),
    Estimator("band three times as wide (z: 3), no gates", {"band": {"z": 3.0}, **NO_GATES}),
    Estimator("ratio: turn", {**OPEN, "ratio": "turn"}),
    Estimator("ratio: turn, clip 3e-4 / 4e-4", {**NO_GATES, "ratio": "turn"}),
    Estimator("k3 gate alone", _only("k3_gate")),
    Estimator("outlier gate alone", _only("outlier_gate")),
    Estimator("off-policy gate alone", _only("off_policy_gate")),
    Estimator("min_kept_frac 0.5, gates", {"clip": WIDE, "min_kept_frac": 0.5}),
    Estimator("m2_bound 0.04", {**OPEN, "m2_bound": 0.04}),
    Estimator("stale_clip 0.02", {**OPEN, "stale_clip": 0.02}),
    *NARROWER,
    *(lie for lies in LIES.values() for lie in lies),
)
LIED_ABOUT: Mapping[str, str] = {lie.name: truth for truth, lies in LIES.items() for lie in lies}
BESIDE: Mapping[str, str] = {**LIED_ABOUT, **{one.name: PLAIN.name for one in NARROWER}}
"""By name, what an estimator is compared with on the same episodes."""
