"""The GPUs of this machine, counted without torch: importing it takes seconds, and it may be a build for the CPU."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICES = Path("/dev")


def visible_gpus() -> tuple[str, ...]:
    """What ``CUDA_VISIBLE_DEVICES`` of a process may name, in order: a part of what it names for us."""
    named = os.environ.get(VISIBLE)
    if named is not None:
        return tuple(part.strip() for part in named.split(",") if part.strip() not in ("", "-1"))
    numbers = [path.name.removeprefix("nvidia") for path in _DEVICES.glob("nvidia[0-9]*")]
    return tuple(sorted((one for one in numbers if one.isdecimal()), key=int))


def torch_uses_gpus() -> bool:
    """False for a build for the CPU, or none."""
    try:
        return not importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
