"""How much memory a rank of the learner needs, by phase and kind.

One rule: each term names the tensors that it counts, as the learner makes them; nothing is a fitted factor. Tests hold
the terms against the learner's own saved tensors, and the sums against peaks of running ranks. What an allocator loses
between tensors, and what torch and its kernels keep for themselves, is not in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from gspo_core.plan.passes import highest_moment
from gspo_core.plan.setting import FLOAT, Setting, all_shapes, layer_size, root_size, size
from gspo_core.plan.shapes import ModelShape, Shape, share_of

# What the optimizer updates at once of a rank's parameters, in float32, unless a single one is larger.
UPDATED_AT_ONCE_BYTES = 512 * 2**20
# In a checkpoint: names of a tensor and its moments in the file's header; random state, counters and lineage.
NAMED_BYTES, RECORDED_BYTES = 1024, 16 * 1024
# Numbers of a row that share a scale where moments are kept in eight bits, and those that are rounded at once.
BLOCK, ROUNDED_AT_ONCE = 256, 2**22
Phase = Literal["load", "forward and backward", "update", "publish", "checkpoint"]


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes of one phase, by kind."""

    phase: Phase
    on_device: Mapping[str, int]
    on_host: Mapping[str, int] = field(default_factory=dict)

    @property
    def device_total(self) -> int:
        return sum(self.on_device.values())

    @property
    def host_total(self) -> int:
        return sum(self.on_host.values())


def plan_memory(setting: Setting) -> list[PhaseMemory]:
    """What the first rank holds in each phase; it never holds less than another."""
    held, moments = _held(setting), {"moments": _moments(setting)}
    state = held if setting.is_offloaded else {**held, **moments}
    host = moments if setting.is_offloaded else {}
    gradients = {"gradients": FLOAT * _num_trained(setting)}
    copies = {"copy of weights and moments": FLOAT * _num_trained(setting) + _moments(setting)}
    whole = {"largest tensor, whole": _largest(setting)}
    return [
        PhaseMemory("load", {**_plain(setting), **_loading(setting)}, {"rows being read": _largest_part(setting)}),
        PhaseMemory("forward and backward", {**state, **gradients, **highest_moment(setting)}, host),
        PhaseMemory("update", {**state, **gradients, **_beside_the_update(setting)}, host),
        PhaseMemory("publish", {**state, **whole}, {"copy of the weights": _copy(setting), **host}),
        PhaseMemory("checkpoint", state, {**copies, **host}),
    ]


def checkpoint_bytes(shape: ModelShape, lora_rank: int | None = None) -> int:
    """What a checkpoint of one rank takes on disk at most: trained numbers and two moments, in float32."""
    setting = Setting(shape, lora_rank=lora_rank)
    tensors = all_shapes(shape) if lora_rank is None else _addition_shapes(setting)
    return 3 * FLOAT * size(tensors) + NAMED_BYTES * len(tensors) + RECORDED_BYTES


def peak(phases: Iterable[PhaseMemory]) -> PhaseMemory:
    return max(phases, key=lambda one: one.device_total)


def _num_rows(setting: Setting, shape: Shape) -> int:
    """Numbers of a tensor that a rank holds; FSDP pads every rank's part to the largest."""
    first, end = share_of(shape[0], 0, setting.num_parts)
    return (end - first) * math.prod(shape[1:])


def _part(setting: Setting, shapes: Iterable[Shape]) -> int:
    return sum(_num_rows(setting, shape) for shape in shapes)


def _addition_shapes(setting: Setting) -> list[Shape]:
    rank = setting.lora_rank
    if rank is None:
        return []
    model = setting.shape
    matrices = (shape for number in range(model.num_layers) for shape in model.linear_layers(number))
    found: list[Shape] = [shape for rows, columns in matrices for shape in ((rank, columns), (rows, rank))]
    if setting.has_expert_additions:
        stacks = (stack for number in range(model.num_layers) for stack in model.expert_layers(number))
        found += [
            shape for experts, rows, columns in stacks for shape in ((experts, rank, columns), (experts, rows, rank))
        ]
    return found


def _num_trained(setting: Setting) -> int:
    """Trained numbers that a rank holds."""
    return _part(setting, all_shapes(setting.shape) if setting.lora_rank is None else _addition_shapes(setting))


def _trained_shapes(setting: Setting) -> list[Shape]:
    return all_shapes(setting.shape) if setting.lora_rank is None else _addition_shapes(setting)


def _updated_at_once(setting: Setting) -> int:
    largest = FLOAT * max(_num_rows(setting, shape) for shape in _trained_shapes(setting))
    return min(FLOAT * _num_trained(setting), max(UPDATED_AT_ONCE_BYTES, largest))


def _beside_the_update(setting: Setting) -> dict[str, int]:
    """What an update takes at a time: the roots that AdamW makes, then the numbers being rounded to eight bits, and the
    moments that are kept in another form between updates."""
    found = {"roots of the second moments": 0 if setting.is_fused else _updated_at_once(setting)}
    if setting.has_small_moments and _rounded_at_once(setting) > found["roots of the second moments"]:
        found = {"numbers being rounded": _rounded_at_once(setting)}
    if setting.has_small_moments or setting.is_offloaded:
        found["moments of what is updated"] = 2 * _updated_at_once(setting)
    return found


def _rounded_at_once(setting: Setting) -> int:
    """Numbers of some rows as shares of their blocks, on their way to codes, and the codes of the whole matrix."""
    return max(_rounded(setting, shape) for shape in _trained_shapes(setting) if len(shape) > 1)


def _rounded(setting: Setting, shape: Shape) -> int:
    numbers, width = _num_rows(setting, shape), math.prod(shape[1:])
    rows = min(numbers // width, max(1, ROUNDED_AT_ONCE // width))
    return 2 * FLOAT * rows * -(-width // BLOCK) * BLOCK + _moment_bytes(setting, shape)


def _plain(setting: Setting) -> dict[str, int]:
    return {"weights": setting.base_width * _part(setting, all_shapes(setting.shape))}


def _held(setting: Setting) -> dict[str, int]:
    held = _plain(setting)
    if setting.lora_rank is not None:
        held["low-rank additions"] = FLOAT * _part(setting, _addition_shapes(setting))
    elif setting.has_reference:  # additions leave the reference in place: the base without them
        held["reference"] = held["weights"]
    return held


def _moments(setting: Setting) -> int:
    if not setting.has_small_moments:
        return 2 * FLOAT * _num_trained(setting)
    return 2 * sum(_moment_bytes(setting, shape) for shape in _trained_shapes(setting))


def _moment_bytes(setting: Setting, shape: Shape) -> int:
    """A matrix takes a byte for each number and a scale for each block of a row; a vector stays in float32."""
    numbers = _num_rows(setting, shape)
    if len(shape) == 1:
        return FLOAT * numbers
    width = math.prod(shape[1:])
    return numbers + FLOAT * numbers // width * -(-width // BLOCK)


def _largest(setting: Setting) -> int:
    """A tensor is gathered as it is held; a single rank has it already."""
    return setting.gathering * setting.base_width * max(map(math.prod, all_shapes(setting.shape)))


def _largest_part(setting: Setting) -> int:
    """Files are read at most in float32."""
    return FLOAT * max(_num_rows(setting, shape) for shape in all_shapes(setting.shape))


def _loading(setting: Setting) -> dict[str, int]:
    """The forward check gathers the parameters outside the layers, then one layer after the other, in float32. Each
    buffer stays until the next one is filled."""
    if setting.num_ranks == 1:
        return {}
    root, layer = root_size(setting.shape), layer_size(setting.shape)
    return {"gathered for the forward check": FLOAT * (root + max(root, layer) + setting.gathering * layer)}


def _copy(setting: Setting) -> int:
    total = setting.width * size(all_shapes(setting.shape))
    return -(-total // setting.num_ranks)
