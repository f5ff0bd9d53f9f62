"""What both sides of the race are told. Rule: one job specification decides; each side's settings are derived from it.

What TRL has no word for is either refused here or named in ``NOT_THE_SAME``, so that nothing differs in silence.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from environments.calculator import Calculator
from examples.demo.demonstrations import COURSE
from gspo_core.env import PlainEnvironment, load_environment
from gspo_core.env.prompt import first_messages
from gspo_core.job_spec import JobSpec
from gspo_core.objective_config import ObjectiveConfig

NOT_THE_SAME = (
    "TRL samples, then updates, then samples again; here both go on at once, so tokens are up to `max_staleness` "
    "steps old and one episode can hold tokens of several versions.",
    "TRL ends an episode at a call that cannot be read (it takes it for an answer); here the policy is told so and "
    "tries again.",
    "TRL lowers the learning rate at each of the four updates of a step, in the same line from the same start to 0; "
    "here the updates of a step share one.",
    "TRL adds 1e-4 to the standard deviation of a group's rewards; here 1e-6 is added.",
    "Here sequences are also gated by how far sampler and trainer differ; TRL without vLLM has no such difference.",
)


class CannotRace(Exception):
    """The job asks for something that TRL cannot be told; the race would not be one."""


@dataclass(frozen=True)
class RaceSetting:
    """The part of a job specification that acts on both sides."""

    seed: int
    steps: int
    groups_per_step: int
    group_size: int
    minibatches: int
    clip_low: float
    clip_high: float
    lr: float
    schedule: str
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float
    temperature: float
    max_turns: int
    max_turn_tokens: int
    max_context_tokens: int

    @classmethod
    def of(cls, spec: JobSpec) -> Self:
        _check(spec)
        objective, optimizer, limits = spec.objective, spec.optimizer, spec.episode_limits(0)
        return cls(
            seed=spec.seed,
            steps=spec.steps,
            groups_per_step=spec.groups_per_step,
            group_size=spec.rollout.group_size,
            minibatches=objective.minibatches,
            clip_low=objective.clip_low,
            clip_high=objective.clip_high,
            lr=optimizer.lr,
            schedule=optimizer.schedule,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            max_grad_norm=optimizer.max_grad_norm or 0.0,  # where 0 is TRL's word for never
            temperature=spec.sampling.temperature,
            max_turns=limits.max_turns,
            max_turn_tokens=spec.sampling.max_new_tokens,
            max_context_tokens=limits.max_context_tokens,
        )

    @property
    def minibatch_size(self) -> int:
        return self.groups_per_step * self.group_size // self.minibatches


def _check(spec: JobSpec) -> None:
    if [one.ref for one in spec.environments] != [COURSE.environment]:
        raise CannotRace(f"environments: only {COURSE.environment} has a side for TRL")
    told = {"clip_low", "clip_high", "minibatches"}
    found, plain = spec.objective.model_dump(), ObjectiveConfig.model_validate({"name": "gspo"}).model_dump()
    if differing := sorted(key for key in found if key not in told and found[key] != plain[key]):
        raise CannotRace(f"objective: {', '.join(differing)} cannot be told to TRL")
    optimizer = spec.optimizer
    if optimizer.warmup_steps or optimizer.decay_steps or optimizer.min_lr_ratio or optimizer.schedule == "cosine":
        raise CannotRace("optimizer: only the schedules constant and linear, to the end of the job, are raced")
    if spec.groups_per_step * spec.rollout.group_size % spec.objective.minibatches:
        raise CannotRace("objective.minibatches: does not divide the episodes of a step")


def trl_arguments(setting: RaceSetting) -> dict[str, Any]:
    """For ``GRPOConfig``: one step of ours is ``minibatches`` steps of TRL on one batch of episodes."""
    return {
        "importance_sampling_level": "sequence",
        "loss_type": "grpo",
        "beta": 0.0,
        "scale_rewards": "group",
        "epsilon": setting.clip_low,
        "epsilon_high": setting.clip_high,
        "num_generations": setting.group_size,
        "per_device_train_batch_size": setting.minibatch_size,
        "steps_per_generation": setting.minibatches,
        "gradient_accumulation_steps": 1,
        "num_iterations": 1,
        "max_steps": setting.steps * setting.minibatches,
        "learning_rate": setting.lr,
        "lr_scheduler_type": setting.schedule,
        "warmup_steps": 0,
        "adam_beta1": setting.betas[0],
        "adam_beta2": setting.betas[1],
        "adam_epsilon": setting.eps,
        "weight_decay": setting.weight_decay,
        "max_grad_norm": setting.max_grad_norm,
        "temperature": setting.temperature,
        # Of a whole episode in TRL, the tool's words included; a turn is bounded apart, as here.
        "max_completion_length": setting.max_context_tokens,
        "generation_kwargs": {"max_new_tokens": setting.max_turn_tokens},
        "max_tool_calling_iterations": setting.max_turns - 1,
        "seed": setting.seed,
        **TRL_ON_A_CPU,
    }


TRL_ON_A_CPU: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,  # on by default; off is faster
    "pad_to_multiple_of": None,
    "use_vllm": False,
    "dataloader_num_workers": 0,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}
"""Where TRL leaves a choice that changes nothing of what is learned, the fastest one."""


def trl_rows() -> list[dict[str, Any]]:
    """The training tasks as TRL reads them: the very messages that a policy reads here."""
    environment = load_environment(COURSE.environment)
    assert isinstance(environment, PlainEnvironment)
    prompt = environment.system_prompt
    return [
        {"prompt": first_messages(task, Calculator().reset(**task), prompt), "expression": task["expression"]}
        for task in Calculator.tasks
    ]


def write_orders(path: Path, setting: RaceSetting) -> None:
    """What TRL's side is handed, for it has no pydantic models of ours."""
    orders = {"setting": asdict(setting), "arguments": trl_arguments(setting), "rows": trl_rows()}
    path.write_text(json.dumps(orders))
