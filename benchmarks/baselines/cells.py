"""What is compared: one cell is a job specification, an age of the sampling weights, and maybe a lie about the sampler.

Rule: all cells have the same task, sizes, optimizer and seeds; a cell differs from its row's first in what it names.
Every cell is a real job specification, so what is measured here is what a job with these keys computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from examples.demo.demo import JOB_FILE
from gspo_core.spec import JobSpec
from gspo_core.spec_file import load_job_spec

Attribution = Literal["recorded", "oldest", "newest"]
Model = Literal["dense", "mixture"]

ENVIRONMENT = "benchmarks.baselines.world:Calculator"
SEEDS = (0, 1, 2)
STALENESS = (0, 4, 16)
SUBJECT_STALENESS = 16
"""Where the ablations and the controls are made."""
OPTIMIZER = {"lr": 2e-4, "betas": [0.9, 0.99], "schedule": "linear"}
"""The demo's with twice its rate, so that weights of some steps ago differ."""

# As the demo's job: these episodes have about 25 sampled tokens, the paper's answers thousands.
CLIP = (5e-2, 8e-2)
PAPER_CLIP = (3e-4, 4e-4)
# The paper's baseline.
TOKEN_CLIP = (0.2, 0.27)

GSPO: Mapping[str, Any] = {"name": "gspo", "clip": list(CLIP)}
BEHAVIOR: Mapping[str, Any] = {**GSPO, "anchor": "behavior"}
GRPO: Mapping[str, Any] = {"name": "grpo", "clip": list(TOKEN_CLIP)}
NO_GATES: Mapping[str, Any] = {"k3_gate": None, "outlier_gate": None, "off_policy_gate": None}


@dataclass(frozen=True)
class Sizes:
    """The same for all cells."""

    steps: int = 24
    groups_per_step: int = 6
    group_size: int = 8
    eval_tasks: int = 100
    eval_every: int = 6


SIZES = Sizes()
_MOST_TELLING = frozenset({"gspo_s16", "behavior_s16", "grpo_s16", "gspo_s0", "gates_off_s16", "correction_none_s16"})


@dataclass(frozen=True)
class Cell:
    """One line of a table; run once for each seed."""

    name: str
    table: str
    """The table that it belongs to: main, naive, long, control, ablation or mixture."""
    label: str
    """What a reader sees."""
    objective: Mapping[str, Any]
    staleness: int
    """Age in steps of the weights that an episode begins under."""
    model: Model = "dense"
    attribution: Attribution = "recorded"
    """Which version's log-probs are trained as those of the sampler: the true ones, or those of one version for all."""
    learner: Mapping[str, Any] = field(default_factory=dict)
    times: int = 1
    """So many times the steps of the others."""

    @property
    def tier(self) -> int:
        """How telling it is, 0 the most: at the subject of the grid, on the way there, beside it, another model."""
        if self.name in _MOST_TELLING or self.table in ("naive", "control"):
            return 0
        return {"main": 1, "long": 1, "ablation": 2, "mixture": 3}[self.table]

    def job(self, model_dir: Path, seed: int, sizes: Sizes = SIZES) -> JobSpec:
        """What a user would submit for it."""
        base = load_job_spec(JOB_FILE).model_dump(mode="json", exclude_unset=True)
        changes = {
            "model": str(model_dir),
            "seed": seed,
            "environments": [{"ref": ENVIRONMENT}],
            "objective": dict(self.objective),
            "learner": dict(self.learner),
            "optimizer": OPTIMIZER,
            "rollout": {"group_size": sizes.group_size, "max_staleness": self.staleness},
            "groups_per_step": sizes.groups_per_step,
            "steps": self.times * sizes.steps,
            "evaluation": {"tasks": sizes.eval_tasks, "every": sizes.eval_every},
        }
        return JobSpec.model_validate(base | changes)


def _main() -> list[Cell]:
    kinds = {
        "gspo": ("GSPO, anchored on the proximal policy", GSPO),
        "behavior": ("GSPO, anchored on the sampler", BEHAVIOR),
        "grpo": ("GRPO (token level), corrected and gated alike", GRPO),
    }
    return [
        Cell(f"{name}_s{staleness}", "main", label, objective, staleness)
        for staleness in (SUBJECT_STALENESS, 0, 4)
        for name, (label, objective) in kinds.items()
    ]


def _ablations() -> list[Cell]:
    at = SUBJECT_STALENESS
    wide = [4 * bound for bound in CLIP]

    def gspo(name: str, label: str, **changes: Any) -> Cell:
        return Cell(f"{name}_s{at}", "ablation", label, {**GSPO, **changes}, at)

    return [
        gspo("gates_off", "no gates", **NO_GATES),
        gspo("correction_none", "correction: none", correction="none"),
        gspo("clip_paper", "clip 3e-4 / 4e-4 (the paper's)", clip=list(PAPER_CLIP)),
        gspo("minibatches_1", "minibatches: 1", minibatches=1),
        gspo("correction_geometric", "correction: geometric", correction="geometric"),
        gspo("correction_icepop", "correction: icepop", correction="icepop", correction_min=0.5, correction_max=5.0),
        gspo("clip_wide", "clip 0.2 / 0.32 (four times)", clip=wide),
    ]


def _controls() -> list[Cell]:
    """Without gates too: with them most of what a lie puts far off is withheld."""
    at = SUBJECT_STALENESS
    kinds: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
        ("", "", GSPO),
        ("_no_gates", ", no gates", {**GSPO, **NO_GATES}),
    )
    attributions: tuple[Attribution, ...] = ("oldest", "newest")
    return [
        Cell(
            f"attribution_{which}{suffix}_s{at}",
            "control",
            f"all tokens attributed to the {which} version{more}",
            objective,
            at,
            attribution=which,
        )
        for suffix, more, objective in kinds
        for which in attributions
    ]


def _naive() -> list[Cell]:
    at, nothing = SUBJECT_STALENESS, {"correction": "none", **NO_GATES}
    plain = {**BEHAVIOR, "compensate": False, **NO_GATES}
    return [
        Cell(f"naive_s{at}", "naive", "GSPO, no correction, no gates", {**GSPO, **nothing}, at),
        Cell(f"behavior_naive_s{at}", "naive", "GSPO anchored on the sampler, not compensated, no gates", plain, at),
        Cell(f"grpo_naive_s{at}", "naive", "GRPO, no correction, no gates", {**GRPO, **nothing}, at),
    ]


def _long() -> list[Cell]:
    """In the short runs most data at this staleness are by the weights of the start; in these a third."""
    at, nothing = SUBJECT_STALENESS, {"correction": "none", **NO_GATES}
    kinds: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
        ("gspo", "GSPO, anchored on the proximal policy", GSPO),
        ("naive", "GSPO, no correction, no gates", {**GSPO, **nothing}),
        ("grpo", "GRPO (token level), corrected and gated alike", GRPO),
        ("grpo_naive", "GRPO, no correction, no gates", {**GRPO, **nothing}),
        ("behavior", "GSPO, anchored on the sampler", BEHAVIOR),
        ("gates_off", "GSPO, no gates", {**GSPO, **NO_GATES}),
    )
    return [Cell(f"long_{name}_s{at}", "long", label, objective, at, times=2) for name, label, objective in kinds]


def _mixtures() -> list[Cell]:
    replay = {"routing_replay": True}
    paper = {"name": "gspo", "clip": list(PAPER_CLIP)}
    return [
        Cell("mixture_gspo", "mixture", "GSPO", GSPO, 0, "mixture"),
        Cell("mixture_grpo", "mixture", "GRPO", GRPO, 0, "mixture"),
        Cell("mixture_grpo_replay", "mixture", "GRPO with Routing Replay", GRPO, 0, "mixture", learner=replay),
        Cell("mixture_gspo_paper", "mixture", "GSPO, clip 3e-4 / 4e-4", paper, 0, "mixture"),
    ]


CELLS: tuple[Cell, ...] = (*_main(), *_naive(), *_long(), *_controls(), *_ablations(), *_mixtures())
"""The most telling first."""


def cell(name: str) -> Cell:
    return next(one for one in CELLS if one.name == name)
