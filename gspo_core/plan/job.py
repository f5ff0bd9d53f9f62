"""The plan of a whole job on given machines: the settings it would get, what they take, and what a step would cost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gspo_core.plan.arrangement import arrangement_problem
from gspo_core.plan.choice import LayoutChoice, LearnerPlace, choose, refusal
from gspo_core.plan.machines import Machines
from gspo_core.plan.shapes import ModelShape, planned_shape
from gspo_core.plan.step_time import StepTime, Work, predict_step
from gspo_core.spec import JobSpec


@dataclass(frozen=True)
class JobPlan:
    machines: Machines
    choice: LayoutChoice
    refusal: str | None
    """Why it cannot run there, and what would help."""
    step: StepTime
    longest: int
    """Tokens of the longest sequence that the job can make."""


def plan_job(spec: JobSpec, machines: Machines, shape: ModelShape | None = None) -> JobPlan:
    """Raises `UnknownShape`. Reads the model's configuration unless `shape` is given."""
    shape = shape or planned_shape(Path(spec.model), spec.learner)
    context = spec.longest_sequence
    place = LearnerPlace(
        num_ranks=machines.num_devices,
        device="cuda",
        usable_bytes=machines.device.usable_bytes,
        has_reference=bool(spec.objective.kl_coef),
        longest=context,
        has_small_moments=spec.optimizer.moments == "8bit",
    )
    choice = choose(shape, spec.learner, place)
    problem = arrangement_problem(spec.learner, machines.num_devices, shape.num_heads)
    if problem is None and not choice.fits:
        problem = refusal(choice, spec.learner, place)
    step = predict_step(choice.setting, _work(spec, context), machines)
    return JobPlan(machines, choice, problem, step, context)


def _work(spec: JobSpec, context: int) -> Work:
    """Episodes are assumed to use half of what they may, and groups to share nothing."""
    longest = max(spec.episode_limits(place).max_episode_tokens for place in range(len(spec.environments)))
    length = min(context, longest) // 2
    num_episodes = spec.groups_per_step * spec.rollout.group_size
    objective = spec.objective
    return Work(
        num_tokens=num_episodes * length,
        mean_length=length,
        minibatches=objective.minibatches,
        has_proximal=objective.anchor == "proximal" and objective.minibatches > 1,
        has_reference=bool(objective.kl_coef),
    )
