"""A plan in words that fit a screen."""

from __future__ import annotations

from collections.abc import Iterator

from gspo_core.json_value import JSON
from gspo_core.plan.job import JobPlan
from gspo_core.plan.machines import GIB
from gspo_core.plan.memory import PhaseMemory
from gspo_core.plan.setting import num_parameters


def describe(plan: JobPlan) -> list[str]:
    return list(_lines(plan))


def plan_view(plan: JobPlan) -> dict[str, JSON]:
    """The same for programs; sizes in bytes."""
    setting = plan.choice.setting
    return {
        "object": "memory.plan",
        "gpus": str(plan.machines),
        "fits": plan.refusal is None,
        "refusal": plan.refusal,
        "learner": {
            "micro_batch_tokens": setting.tokens,
            "activation_checkpointing": plan.choice.activation_checkpointing,
            "layout": plan.choice.layout,
            "context_parallel": setting.context,
            "replicas": setting.replicas,
            "offload_moments": setting.is_offloaded,
            "fused_optimizer": setting.is_fused,
        },
        "usable_bytes": plan.machines.device.usable_bytes,
        "phases": [
            {"phase": one.phase, "device_bytes": dict(one.on_device), "host_bytes": dict(one.on_host)}
            for one in plan.choice.phases
        ],
        "step_s": plan.step.total_s,
        "assumptions": list(plan.step.assumptions),
    }


def _lines(plan: JobPlan) -> Iterator[str]:
    setting, device = plan.choice.setting, plan.machines.device
    size = num_parameters(setting.shape) / 1e9
    yield f"{setting.shape.family}, {size:.2f} billion parameters, on {plan.machines}"
    checkpointing = str(plan.choice.activation_checkpointing).lower()
    yield f"micro_batch_tokens {setting.tokens}, activation_checkpointing {checkpointing}, layout {plan.choice.layout}"
    split = "none is ever split" if setting.context == 1 else f"each is shared by {setting.context} ranks"
    yield f"sequences of up to {plan.longest} tokens (limits.max_context_tokens); {split}"
    if setting.is_offloaded:
        yield "moments are kept in the host's memory (offload_moments)"
    if setting.replicas > 1:
        yield f"{setting.replicas} copies of the model, each on {setting.num_parts} ranks"
    yield ""
    yield f"GiB on each rank ({device.usable_bytes / GIB:.1f} of {device.memory_bytes / GIB:.1f} can be used)"
    for phase in plan.choice.phases:
        yield from _phase(phase)
    yield ""
    yield from _verdict(plan)


def _phase(phase: PhaseMemory) -> Iterator[str]:
    yield f"  {phase.phase:<40} {phase.device_total / GIB:8.2f}"
    for kind, size in sorted(phase.on_device.items(), key=lambda item: -item[1]):
        yield f"    {kind:<38} {size / GIB:8.2f}"
    for kind, size in phase.on_host.items():
        yield f"    {kind + ' (on the host)':<38} {size / GIB:8.2f}"


def _verdict(plan: JobPlan) -> Iterator[str]:
    if plan.refusal:
        yield plan.refusal
        return
    left = (plan.machines.device.usable_bytes - plan.choice.peak.device_total) / GIB
    yield f"it fits: {left:.1f} GiB stay free at the highest point ({plan.choice.peak.phase})"
    step = plan.step
    yield f"a step would take about {step.total_s:.1f} s without rollouts ({step.gather_s:.1f} s for gathering), if:"
    for assumption in step.assumptions:
        yield f"  - {assumption}"
