"""What is known of the machines that jobs run on: memory and peak rates of their devices, by name.

The numbers are the makers' (dense bfloat16, memory as sold). Nothing here was measured by this project.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

GIB = 2**30
# What drivers, torch, kernels' workspaces and the gaps of the allocator take before and beside the learner's tensors.
RESERVED_SHARE, RESERVED_BYTES = 0.06, 2 * GIB


@dataclass(frozen=True)
class Device:
    name: str
    memory_bytes: int
    flops: float
    """Per second, in dense bfloat16 products."""
    bytes_per_s: float
    """Between devices of one machine, one way."""

    @property
    def usable_bytes(self) -> int:
        return usable(self.memory_bytes)


def usable(memory_bytes: int) -> int:
    """What the learner's tensors may take of a device's memory."""
    return int(memory_bytes * (1 - RESERVED_SHARE)) - RESERVED_BYTES


DEVICES = {
    one.name.lower(): one
    for one in (
        Device("A100-40", 40 * GIB, 312e12, 300e9),
        Device("A100", 80 * GIB, 312e12, 300e9),
        Device("H100", 80 * GIB, 989e12, 450e9),
        Device("H200", 141 * 10**9, 989e12, 450e9),
        Device("B200", 180 * 10**9, 2250e12, 900e9),
        Device("L40S", 48 * GIB, 362e12, 32e9),
        Device("RTX4090", 24 * GIB, 165e12, 32e9),
    )
}


@dataclass(frozen=True)
class Machines:
    """The devices of all ranks together."""

    num_devices: int
    device: Device
    per_machine: int = 8

    def __str__(self) -> str:
        return f"{self.num_devices}x{self.device.name}"


def parse_machines(text: str) -> Machines:
    """Such as `8xH100`; `H100` is one. `8x96GiB` is a device that is not known by name. Raises ValueError."""
    found = re.fullmatch(r"(?:(\d+)x)?([A-Za-z0-9.-]+)", text.strip())
    if not found or found[1] == "0":
        raise ValueError(f"{text!r} is no number of GPUs, such as 8xH100")
    number, name = int(found[1] or 1), found[2]
    size = re.fullmatch(r"(\d+)(GiB|GB)", name)
    if size:
        unit = GIB if size[2] == "GiB" else 10**9
        like = DEVICES["h100"]
        return Machines(number, Device(name, int(size[1]) * unit, like.flops, like.bytes_per_s))
    if name.lower() not in DEVICES:
        known = ", ".join(one.name for one in DEVICES.values())
        raise ValueError(
            f"{name} is none of the GPUs that are known ({known}); give its memory instead, such as 8x96GiB"
        )
    return Machines(number, DEVICES[name.lower()])
