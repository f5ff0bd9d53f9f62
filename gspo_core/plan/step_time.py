"""How long a step of the learner would take, and on what assumptions.

One rule: every assumption is a named number that is printed with the result. It knows nothing of rollouts: an
asynchronous job waits for whichever of the two is slower.
"""

from __future__ import annotations

from dataclasses import dataclass

from gspo_core.plan.machines import Machines
from gspo_core.plan.setting import Setting, num_parameters

# Share of the peak rate that dense layers of this learner are assumed to reach: eager layers, no fused norms.
UTILISATION = 0.35
# Share of the link's rate that collective calls are assumed to reach; none of it is assumed to overlap.
LINK_SHARE = 0.6
# Between machines, for each device: 400 Gbit/s.
BETWEEN_MACHINES = 50e9


@dataclass(frozen=True)
class Work:
    """What a step trains on."""

    num_tokens: int
    """In all sequences of a step, as laid out."""
    mean_length: int
    minibatches: int
    has_proximal: bool
    has_reference: bool


@dataclass(frozen=True)
class StepTime:
    compute_s: float
    gather_s: float
    """Weights, gradients, and heads for tokens."""
    assumptions: tuple[str, ...]

    @property
    def total_s(self) -> float:
        return self.compute_s + self.gather_s


def predict_step(setting: Setting, work: Work, machines: Machines) -> StepTime:
    """Seconds of one step without rollouts and publishing."""
    model = setting.shape
    attention = 4 * model.num_layers * model.queries * work.mean_length / 2
    forward = work.num_tokens * (2 * model.num_active() + attention)
    passes = 3.0 + (1.0 if setting.is_checkpointed else 0.0)
    if work.has_proximal:
        passes += (work.minibatches - 1) / work.minibatches
    passes += 1.0 if work.has_reference else 0.0
    rate = machines.device.flops * UTILISATION * setting.num_ranks
    assumptions = (
        f"{UTILISATION:.0%} of {machines.device.flops / 1e12:.0f} TFLOP/s a device",
        f"sequences of {work.mean_length} tokens, {work.num_tokens} tokens a step",
        f"collective calls at {LINK_SHARE:.0%} of {_link(machines, setting.num_parts) / 1e9:.0f} GB/s, not overlapped",
        "nothing of this was measured on a GPU",
    )
    moved_s = _gather_s(setting, work, machines) + _between_copies_s(setting, work)
    return StepTime(forward * passes / rate, moved_s + _exchange_s(setting, work, machines, passes), assumptions)


def _link(machines: Machines, num_ranks: int) -> float:
    """Between so many neighbours."""
    return BETWEEN_MACHINES if num_ranks > machines.per_machine else machines.device.bytes_per_s


def _between_copies_s(setting: Setting, work: Work) -> float:
    """Copies of the model add up their gradients once an update, in float32, twice over a ring."""
    if setting.replicas == 1 or setting.lora_rank:
        return 0.0
    share = 2 * (setting.replicas - 1) / setting.replicas
    return (
        work.minibatches
        * 4
        * num_parameters(setting.shape)
        / setting.num_parts
        * share
        / (BETWEEN_MACHINES * LINK_SHARE)
    )


def _exchange_s(setting: Setting, work: Work, machines: Machines, passes: float) -> float:
    """Ranks that share a micro-batch exchange queries, keys and values, and the result of attention, in each layer."""
    if setting.context == 1:
        return 0.0
    model = setting.shape
    numbers = 2 * model.queries + 2 * model.keys * setting.key_copies
    moved = work.num_tokens / setting.num_ranks * model.num_layers * numbers * setting.width * (passes - 1)
    share = (setting.context - 1) / setting.context
    return moved * share / (_link(machines, setting.context) * LINK_SHARE)


def _gather_s(setting: Setting, work: Work, machines: Machines) -> float:
    """Weights are gathered for the forward and the backward pass, gradients summed in float32, each micro-batch."""
    if setting.num_ranks == 1:
        return 0.0
    numbers = num_parameters(setting.shape)
    num_micro = max(work.minibatches, -(-work.num_tokens // (setting.own_tokens * setting.num_ranks)))
    moved = num_micro * numbers * (2 * setting.width + (0 if setting.lora_rank else 4))
    if work.has_proximal:
        moved += num_micro * numbers * setting.width * (work.minibatches - 1) // work.minibatches
    parts = setting.num_parts
    return moved * (parts - 1) / parts / (_link(machines, parts) * LINK_SHARE)
