"""What is compared: one cell is a job specification, an age of the sampling weights, and maybe a lie about the sampler.

Rule: all cells have the same task, sizes, optimizer and seeds; a cell differs from its row's first in what it names.
Every cell is a real job specification, so what is measured here is what a job with these keys computes.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from examples.demo.demo import LONG, SHORT, Scenario
from gspo_core.spec import JobSpec
from gspo_core.spec_file import load_job_spec

Attribution = Literal["recorded", "oldest", "newest"]
Model = Literal["dense", "mixture", "rare", "search", "cashbook"]
"""`rare`: as `dense`, with habits so bad that it hardly ever succeeds. `search`: the long demo's, for its
task. `cashbook`: one for the world of that name, with long episodes."""
Schedule = Literal["halving", "sustained"]
"""How an episode ages: from the whole age to half of it, or by one step only."""

CALCULATOR, SEARCH = "benchmarks.baselines.world:Calculator", "benchmarks.baselines.world:SearchQA"
CASHBOOK = "benchmarks.baselines.cashbook:Cashbook"
SEEDS = (0, 1, 2)
STALENESS = (0, 4, 16)
SUBJECT_STALENESS = 16
"""Where the ablations and the controls are made."""
OPTIMIZER: Mapping[str, Any] = {"lr": 2e-4, "betas": [0.9, 0.99], "schedule": "linear"}
"""The demo's with twice its rate, so that weights of some steps ago differ."""

LONG_MEMORY = {"betas": [0.9, 0.999]}
"""A job's default: second moments remember a thousand updates, which is more than a run here has."""

# As the demo's job: these episodes have about 25 sampled tokens, the paper's answers thousands.
CLIP = (5e-2, 8e-2)
PAPER_CLIP = (3e-4, 4e-4)
# The paper's baseline.
TOKEN_CLIP = (0.2, 0.27)

# Without its name, which would bring the bounds that some cells are about.
GSPO: Mapping[str, Any] = {"loss": "clip", "ratio": "sequence", "clip": list(CLIP)}
BEHAVIOR: Mapping[str, Any] = {**GSPO, "anchor": "behavior"}
GRPO: Mapping[str, Any] = {"loss": "clip", "ratio": "token", "clip": list(TOKEN_CLIP)}
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
STEP_S, EVALUATED_S = 0.55, 0.006
"""Seconds of a free core for a step, and for an episode of an evaluation, as 36 runs took them."""
COST: Mapping[Model, float] = {"search": 3.1, "cashbook": 12.0}
"""So many times that for the long demo's task, as five runs took it, and for the cashbook."""
LONG_EPISODES: Mapping[str, Mapping[str, Any]] = {
    "limits": {"max_turns": 13, "max_context_tokens": 704},
    "sampling": {"temperature": 0.6},
}
"""Cooler, since hundreds of sampled tokens have to be right."""
WORLDS: Mapping[Model, tuple[Scenario, str, Mapping[str, Mapping[str, Any]]]] = {
    "search": (LONG, SEARCH, {}),
    "cashbook": (SHORT, CASHBOOK, LONG_EPISODES),
}
"""Whose job file, which environment, and what else differs; of models that play another one than the short demo's."""
HELD_OUT: Mapping[Model, int] = {"dense": 200, "mixture": 200, "rare": 200, "search": 100, "cashbook": 100}
"""All held-out tasks of the world that each model plays."""
JUDGED_EPISODES = 1000
"""So many in an evaluation that judges a run: each held-out task is played equally often."""
FEWER_JUDGED: Mapping[Model, int] = {"cashbook": 400}
"""Where an episode costs twelve times as much."""


@dataclass(frozen=True)
class SustainedRun:
    """How long data of one age are trained, and with what."""

    age: int
    times: int | Fraction
    """So many times the steps of the grid."""
    eval_every: int
    judged_at: tuple[int, ...]
    """The last three evaluations, whose mean is the end of a run."""
    others: tuple[str, ...]
    """Kinds of cells beside the default, at this age."""
    suffix: str = ""
    """Of the names of its cells and of its page."""
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    """What differs from that of the other runs."""
    model: Model = "dense"
    fresh: tuple[str, ...] = ()
    """Kinds of cells beside the default on fresh data."""
    groups_per_step: int | None = None
    """Where they are not those of the grid."""

    def cell(self, kind: str, staleness: int) -> str:
        """Its name."""
        return f"sustained_{kind}_s{staleness}{self.suffix}"


SUCCESSES = "successes"
"""The kind of cell that is trained on these alone."""
SUSTAINED_RUNS = (
    SustainedRun(16, 4, 12, (84, 90, 96), ("grpo", "wide", "prefix", "faded", "signal", "both", SUCCESSES)),
    SustainedRun(64, 14, 24, (320, 328, 336), ("grpo", "faded", "signal", "both"), "_long"),
    SustainedRun(16, 4, 12, (84, 90, 96), ("grpo", "faded", "signal", "both"), "_fast", {"lr": 2 * OPTIMIZER["lr"]}),
    SustainedRun(16, 4, 12, (84, 90, 96), ("grpo", "signal"), "_rare", model="rare"),
    SustainedRun(16, 4, 12, (84, 90, 96), ("grpo", "signal", SUCCESSES), "_search", {"lr": 1.5e-4}, model="search"),
    SustainedRun(
        16,
        Fraction(10, 3),
        16,
        (72, 76, 80),
        ("grpo", "signal", SUCCESSES),
        "_cashbook",
        {"lr": 5e-5},
        "cashbook",
        (SUCCESSES,),
        4,
    ),
    SustainedRun(
        64, 14, 24, (320, 328, 336), ("grpo", "signal"), "_cashbook_long", {"lr": 5e-5}, "cashbook", groups_per_step=2
    ),
)
"""At twice the rate runs fall often enough to tell what keeps them from it; from the rare model nearly all groups fail
as a whole at first; the search is another task, at its demo's rate; the cashbook is a long one, which successes alone
do not teach."""
_MOST_TELLING = frozenset({"gspo_s16", "behavior_s16", "grpo_s16", "gspo_s0", "gates_off_s16", "correction_none_s16"})


@dataclass(frozen=True)
class Cell:
    """One line of a table; run once for each seed."""

    name: str
    table: str
    """The table that it belongs to: main, naive, long, bounded, young, sustained, control, ablation or mixture."""
    label: str
    """What a reader sees."""
    objective: Mapping[str, Any]
    staleness: int
    """Age in steps of the weights that an episode begins under."""
    model: Model = "dense"
    attribution: Attribution = "recorded"
    """Which version's log-probs are trained as those of the sampler: the true ones, or those of one version for all."""
    only_successes: bool = False
    """Whether all that failed teaches nothing: what can be learned so needs no negative advantages."""
    learner: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    """What differs from that of the others."""
    times: int | Fraction = 1
    """So many times the steps of the others."""
    groups_per_step: int | None = None
    """Where they are not those of the sizes."""
    schedule: Schedule = "halving"
    eval_tasks: int | None = None
    """Where they are not those of the sizes."""
    eval_every: int | None = None
    """Likewise."""
    judged_at: tuple[int, ...] = ()
    """After these steps an evaluation has ``JUDGED_EPISODES``."""

    @property
    def tier(self) -> int:
        """How telling it is, 0 the most: at the subject of the grid, on the way there, beside it, another model."""
        if self.name in _MOST_TELLING or self.table in ("naive", "control"):
            return 0
        return {"main": 1, "long": 1, "bounded": 1, "young": 1, "sustained": 1, "ablation": 2, "mixture": 3}[self.table]

    @property
    def judged_times(self) -> int:
        """How often each held-out task is played where a run is judged."""
        return FEWER_JUDGED.get(self.model, JUDGED_EPISODES) // HELD_OUT[self.model]

    def num_steps(self, sizes: Sizes) -> int:
        return int(self.times * sizes.steps)

    def cost_s(self, sizes: Sizes) -> float:
        """About how long a run takes a free core."""
        steps, every = self.num_steps(sizes), self.eval_every or sizes.eval_every
        judged = len(self.judged_at) * self.judged_times
        evaluated = steps // every + 1 - sum(step % every == 0 for step in self.judged_at) + judged
        share = (self.groups_per_step or sizes.groups_per_step) / SIZES.groups_per_step
        seconds = steps * share * STEP_S + evaluated * (self.eval_tasks or sizes.eval_tasks) * EVALUATED_S
        return seconds * COST.get(self.model, 1.0)

    def job(self, model_dir: Path, seed: int, sizes: Sizes = SIZES) -> JobSpec:
        """What a user would submit for it."""
        demo, environment, others = WORLDS.get(self.model, (SHORT, CALCULATOR, {}))
        base = load_job_spec(demo.job_file).model_dump(mode="json", exclude_unset=True)
        base |= {part: base.get(part, {}) | dict(changed) for part, changed in others.items()}
        changes = {
            "model": str(model_dir),
            "seed": seed,
            "environments": [{"ref": environment}],
            "objective": dict(self.objective),
            "learner": dict(self.learner),
            "optimizer": {**OPTIMIZER, **self.optimizer},
            "rollout": {"group_size": sizes.group_size, "max_staleness": self.staleness},
            "groups_per_step": self.groups_per_step or sizes.groups_per_step,
            "steps": self.num_steps(sizes),
            "evaluation": {
                "tasks": self.eval_tasks or sizes.eval_tasks,
                "every": self.eval_every or sizes.eval_every,
            },
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


def _bounded() -> list[Cell]:
    """The gradient bounded by another constant or by what is usual, the step bounded as a whole or scaled by what its
    data are worth, gates that do not starve a step, and clips of other widths."""
    usual = {"max_grad_growth": 1.0}
    kinds: tuple[tuple[str, str, Mapping[str, Any], Mapping[str, Any]], ...] = (
        ("norm", "GSPO, max_grad_norm: 0.1", GSPO, {"max_grad_norm": 0.1}),
        ("growth_1", "GSPO, max_grad_growth: 1", GSPO, {"max_grad_growth": 1.0}),
        ("growth_1.5", "GSPO, max_grad_growth: 1.5", GSPO, {"max_grad_growth": 1.5}),
        ("growth_2", "GSPO, max_grad_growth: 2", GSPO, {"max_grad_growth": 2.0}),
        ("grpo_growth_1", "GRPO, max_grad_growth: 1", GRPO, {"max_grad_growth": 1.0}),
        ("region_0.003", "GSPO, max_step_k3: 0.003", GSPO, {"max_step_k3": 0.003}),
        ("both_0.01", "GSPO, max_grad_growth: 1, max_step_k3: 0.01", GSPO, {**usual, "max_step_k3": 0.01}),
        ("both_0.003", "GSPO, max_grad_growth: 1, max_step_k3: 0.003", GSPO, {**usual, "max_step_k3": 0.003}),
        ("memory", "GSPO, betas: 0.9, 0.999", GSPO, LONG_MEMORY),
        ("memory_1", "GSPO, betas: 0.9, 0.999, max_grad_growth: 1", GSPO, {**usual, **LONG_MEMORY}),
        ("signal", "GSPO, max_grad_growth: 1, signal_scaling", GSPO, {**usual, "signal_scaling": True}),
        ("ess", "GSPO, max_grad_growth: 1, ess_scaling", GSPO, {**usual, "ess_scaling": True}),
        ("m2", "GSPO, max_grad_growth: 1, m2_bound: 0.04", {**GSPO, "m2_bound": 0.04}, usual),
        ("fed", "GSPO, min_kept_frac: 0.5", {**GSPO, "min_kept_frac": 0.5}, {}),
        ("usual_fed", "GSPO, max_grad_growth: 1, min_kept_frac: 0.5", {**GSPO, "min_kept_frac": 0.5}, usual),
        ("paper", "GSPO, max_grad_growth: 1, clip 3e-4 / 4e-4", {**GSPO, "clip": list(PAPER_CLIP)}, usual),
        (
            "spread",
            "GSPO, max_grad_growth: 1, clip 3e-4 / 4e-4, clip_spread: 5",
            {**GSPO, "clip": list(PAPER_CLIP), "clip_spread": 5.0},
            usual,
        ),
        (
            "band",
            "GSPO, max_grad_growth: 1, band: z: 3",
            {"loss": "clip", "ratio": "sequence", "band": {"z": 3.0}},
            usual,
        ),
        (
            "faded",
            "GSPO, max_grad_growth: 1, correction_max: 5, prefix_threshold: 0.2",
            {**GSPO, "correction_max": 5.0, "prefix_threshold": 0.2},
            usual,
        ),
    )
    at = SUBJECT_STALENESS
    return [
        Cell(f"bounded_{name}_s{at}", "bounded", label, objective, at, optimizer=optimizer, times=2)
        for name, label, objective, optimizer in kinds
    ]


def _young() -> list[Cell]:
    """Whether the bound slows learning where no run falls: beside ``gspo_s4``."""
    return [Cell("young_growth_1_s4", "young", "GSPO, max_grad_growth: 1", GSPO, 4, optimizer={"max_grad_growth": 1.0})]


def _sustained(run: SustainedRun) -> list[Cell]:
    """An age that lasts: after the first so many steps all of the data are so old, to the end."""
    usual = {"max_grad_growth": 1.0}
    scaled = {**usual, "signal_scaling": True}
    wide = {**GSPO, "correction_max": 5.0}
    told, short, endless = "correction_max: 5", "prefix_threshold: 0.2", "prefix_memory: 1e9"
    kinds: dict[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
        "gspo": ("GSPO, max_grad_growth: 1", GSPO, usual),
        "grpo": ("GRPO, max_grad_growth: 1", GRPO, usual),
        "wide": (f"GSPO, max_grad_growth: 1, {told}", wide, usual),
        "prefix": (
            f"GSPO, max_grad_growth: 1, {told}, {short}, {endless}",
            {**wide, "prefix_threshold": 0.2, "prefix_memory": 1e9},
            usual,
        ),
        "faded": (f"GSPO, max_grad_growth: 1, {told}, {short}", {**wide, "prefix_threshold": 0.2}, usual),
        "signal": ("GSPO, max_grad_growth: 1, signal_scaling", GSPO, scaled),
        SUCCESSES: ("GSPO, max_grad_growth: 1, successes alone", GSPO, usual),
        "both": (
            f"GSPO, max_grad_growth: 1, {told}, {short}, signal_scaling",
            {**wide, "prefix_threshold": 0.2},
            scaled,
        ),
    }
    return [
        Cell(
            run.cell(kind, staleness),
            "sustained",
            kinds[kind][0],
            kinds[kind][1],
            staleness,
            run.model,
            only_successes=kind == SUCCESSES,
            optimizer={**kinds[kind][2], **run.optimizer},
            times=run.times,
            groups_per_step=run.groups_per_step,
            schedule="sustained",
            eval_tasks=HELD_OUT[run.model],
            eval_every=run.eval_every,
            judged_at=run.judged_at,
        )
        for kind, staleness in [
            ("gspo", run.age),
            ("gspo", 0),
            *((kind, run.age) for kind in run.others),
            *((kind, 0) for kind in run.fresh),
        ]
    ]


def _mixtures() -> list[Cell]:
    replay = {"routing_replay": True}
    paper = {**GSPO, "clip": list(PAPER_CLIP)}
    return [
        Cell("mixture_gspo", "mixture", "GSPO", GSPO, 0, "mixture"),
        Cell("mixture_grpo", "mixture", "GRPO", GRPO, 0, "mixture"),
        Cell("mixture_grpo_replay", "mixture", "GRPO with Routing Replay", GRPO, 0, "mixture", learner=replay),
        Cell("mixture_gspo_paper", "mixture", "GSPO, clip 3e-4 / 4e-4", paper, 0, "mixture"),
    ]


CELLS: tuple[Cell, ...] = (*_main(), *_naive(), *_long(), *_controls(), *_ablations(), *_mixtures())
"""The most telling first."""
BOUNDED: tuple[Cell, ...] = (*_bounded(), *_young())
"""What keeps long runs from falling; run with seeds of their own, and reported by ``falls`` beside the long ones."""
DRAWN = tuple(sorted(random.Random("falls").sample(range(1000, 100_000), 50)))
"""Seeds that nobody chose, for cells of BOUNDED."""
CONFIRMING = tuple(random.Random("signal").sample(range(1000, 100_000), 50))
"""Drawn after `signal_scaling` was chosen, to see whether a run with it collapses."""
UNSEEN = tuple(random.Random("unseen").sample(range(1000, 100_000), 30))
"""Drawn after all of the others had run: for cells that had never run, and for sustained ages."""
LATEST = tuple(random.Random("default").sample(range(1000, 100_000), 20))
"""Drawn when `signal_scaling` had become the default on old data, to judge it."""
SUSTAINED: tuple[Cell, ...] = tuple(one for run in SUSTAINED_RUNS for one in _sustained(run))
"""What an age costs that lasts; reported by ``sustained``."""
RUNNABLE = (*CELLS, *BOUNDED, *SUSTAINED)


def cell(name: str) -> Cell:
    return next(one for one in RUNNABLE if one.name == name)
