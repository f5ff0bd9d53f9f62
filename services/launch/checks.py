"""The service's part of ``gspo doctor``: whether this machine can run the processes. Changes nothing.

Rule: a check imports what it examines only when it runs, so a missing package is a finding, not an error.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import os
import shutil
from pathlib import Path

from gspo_core.cli.finding import Finding, Verdict
from services.launch import machine_checks
from services.launch.retired import retired_names

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


def redis() -> Finding:
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
    except (RedisUnsuitable, ValueError) as error:
        return Finding(Verdict.PROBLEM, "redis", str(error))
    return Finding(Verdict.NOTE if weaknesses else Verdict.OK, "redis", "; ".join((given, *weaknesses)))


def disk() -> Finding:
    data_dir = Path(os.environ.get("GSPO_DATA_DIR", ".gspo")).resolve()
    existing = next(folder for folder in (data_dir, *data_dir.parents) if folder.exists())
    if not existing.is_dir():
        return Finding(Verdict.PROBLEM, "data", f"{existing} is a file: choose another GSPO_DATA_DIR")
    if not os.access(existing, os.W_OK):
        return Finding(Verdict.PROBLEM, "data", f"{existing} is not writable: choose another GSPO_DATA_DIR")
    free = shutil.disk_usage(existing).free
    text = f"{free / 1024**3:.1f} GiB free for {data_dir}"
    return Finding(Verdict.OK if free >= MIN_FREE_BYTES else Verdict.PROBLEM, "data", text)


def variables() -> Finding:
    """Whether what is set is read, and can be."""
    try:
        from services.process.settings import SettingsError, load_settings, unread_names
    except ModuleNotFoundError as error:
        return Finding(Verdict.NOTE, "settings", f"not checked: {error.name} is not installed")
    try:
        set_here = load_settings(is_typed=True).model_fields_set
    except SettingsError as error:
        return Finding(Verdict.PROBLEM, "settings", str(error))
    told = [f"{name} is read by nothing here" for name in unread_names(os.environ)]
    if os.environ.get("GSPO_API_KEY"):
        told.append("GSPO_API_KEY is for clients; gspo up refuses it")
    told += [f"{name} is no longer read: {instead}" for name, instead in retired_names(os.environ).items()]
    if told:
        return Finding(Verdict.NOTE, "settings", "; ".join(told))
    return Finding(Verdict.OK, "settings", ", ".join(sorted(f"GSPO_{name.upper()}" for name in set_here)) or "none set")


def _engines() -> Finding:
    try:
        from services.process.settings import SettingsError, load_settings
    except ModuleNotFoundError as error:
        return Finding(Verdict.NOTE, "engines", f"not checked: {error.name} is not installed")
    try:
        settings = load_settings(is_typed=True)
    except SettingsError:
        return Finding(Verdict.NOTE, "engines", "not checked: the settings cannot be read")
    if not settings.engine_urls:
        return Finding(Verdict.NOTE, "engines", "GSPO_ENGINE_URLS names none; gspo up starts one of its own")
    from services.engines.acquaintance import Acquaintance, acquaint

    found = asyncio.run(acquaint(settings.engine_urls, settings.engine_keys))
    texts = "; ".join(one.text for one in found)
    if any(one.acquaintance is Acquaintance.REFUSED for one in found):
        return Finding(Verdict.PROBLEM, "engines", texts)
    is_fine = all(one.acquaintance is Acquaintance.FINE for one in found)
    return Finding(Verdict.OK if is_fine else Verdict.NOTE, "engines", texts)


CHECKS = (
    *(_cores, machine_checks.gpus, machine_checks.kernel, machine_checks.account),
    *(machine_checks.wall, machine_checks.ports),
    *(variables, _services, _training),
    *(machine_checks.sglang, machine_checks.vllm, redis, disk, _engines),
)
