"""The service's part of ``gspo doctor``: whether this machine can run the processes. Changes nothing.

Rule: a check imports what it examines only when it runs, so a missing package is a finding, not an error.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
from pathlib import Path

from gspo_core.cli.finding import Finding, Verdict

# A demo writes a few hundred megabytes; with less space than this a run would soon stop.
MIN_FREE_BYTES = 2 * 1024**3


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores < 2:
        return Finding(Verdict.NOTE, "cores", "1; engine and trainer will share it")
    return Finding(Verdict.OK, "cores", str(cores))


def _packages(subject: str, names: tuple[str, ...], extra: str) -> Finding:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        return Finding(
            Verdict.PROBLEM, subject, f"{', '.join(missing)} not installed: pip install -e '.[{extra}]' (or make setup)"
        )
    return Finding(Verdict.OK, subject, ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names))


def _services() -> Finding:
    return _packages("services", ("fastapi", "uvicorn", "redis", "tokenizers"), "service")


def _training() -> Finding:
    return _packages("training", ("torch", "transformers", "safetensors"), "train")


def _device() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding(Verdict.NOTE, "device", "unknown without torch")
    import torch

    if torch.cuda.is_available():
        return Finding(Verdict.OK, "device", f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}")
    return Finding(Verdict.NOTE, "device", "no GPU: small models only, on the CPU")


def _redis() -> Finding:
    try:
        from services.state.server import RedisServer, RedisUnsuitable, find_binary
    except ModuleNotFoundError as error:
        return Finding(Verdict.NOTE, "redis", f"not checked: {error.name} is not installed")
    given = os.environ.get("GSPO_REDIS_URL")
    try:
        if not given:
            binary = find_binary()
            return Finding(Verdict.OK, "redis", f"{binary.path} {'.'.join(map(str, binary.version))}")
        weaknesses = RedisServer.given(given).weaknesses
    except RedisUnsuitable as error:
        return Finding(Verdict.PROBLEM, "redis", str(error))
    return Finding(Verdict.NOTE if weaknesses else Verdict.OK, "redis", "; ".join((given, *weaknesses)))


def _disk() -> Finding:
    data_dir = Path(os.environ.get("GSPO_DATA_DIR", ".gspo")).resolve()
    existing = next(folder for folder in (data_dir, *data_dir.parents) if folder.exists())
    if not os.access(existing, os.W_OK):
        return Finding(Verdict.PROBLEM, "data", f"{existing} is not writable: choose another GSPO_DATA_DIR")
    free = shutil.disk_usage(existing).free
    text = f"{free / 1024**3:.1f} GiB free for {data_dir}"
    return Finding(Verdict.OK if free >= MIN_FREE_BYTES else Verdict.PROBLEM, "data", text)


CHECKS = (_cores, _services, _training, _device, _redis, _disk)
