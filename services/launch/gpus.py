"""The GPUs of this machine, counted without torch: importing it takes seconds, and it may be a build for the CPU."""

from __future__ import annotations

import importlib.metadata
import os
import re
from itertools import takewhile
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICES = Path("/dev")
_NAMED = re.compile(r"[0-9]+|(GPU|MIG)-.+")


def visible_gpus() -> tuple[str, ...]:
    """What ``CUDA_VISIBLE_DEVICES`` of a process may name, in order: a part of what it names for us."""
    named = os.environ.get(VISIBLE)
    if named is not None:
        # CUDA's list ends at the first entry that is none.
        return tuple(takewhile(_NAMED.fullmatch, map(str.strip, named.split(","))))
    found = [path for path in _DEVICES.glob("nvidia[0-9]*") if path.name.removeprefix("nvidia").isdecimal()]
    return tuple(map(str, range(len(found))))  # CUDA counts what is there, whatever the number of its file


def torch_uses_gpus() -> bool:
    """False for a build for the CPU, or none."""
    try:
        return not importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
