"""What ``gspo doctor`` finds out about the machine itself: GPUs, their driver, engines beside us, ports, the kernel.

Rule: it reads files and asks programs for their version; it imports neither torch nor an engine, starts no server, and
says of what it cannot know that it is unknown.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from gspo_core.cli.finding import Finding, Verdict
from services.hosts.walls import control_groups
from services.hosts.walls.tiers import WALLS, Tier
from services.launch import engine_versions
from services.launch.engine_command import find_sglang, find_vllm
from services.launch.engine_versions import NoVersion, Unanswered
from services.launch.gpus import torch_uses_gpus, visible_gpus
from services.process.lifecycle import ADVICE, is_root

DRIVER = Path("/proc/driver/nvidia/version")
NAMESPACES = Path("/proc/sys/user/max_user_namespaces")
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # looked at, not written to
API_PORT = 8000
# A worker holds a connection for each episode and engine.
MIN_OPEN_FILES = 4096
# What NCCL and SGLang's own processes pass between each other.
MIN_SHARED_BYTES = 1 << 30
_LANDLOCK_CREATE_RULESET, _LANDLOCK_VERSION = 444, 1


def gpus() -> Finding:
    found, driver = visible_gpus(), driver_version()
    if not found:
        text = "none visible: small models only, on the CPU"
        return Finding(Verdict.NOTE, "gpu", f"{text} (driver {driver} is loaded)" if driver else text)
    number = f"{len(found)} visible ({', '.join(found)})"
    if driver is None:
        return Finding(Verdict.PROBLEM, "gpu", f"{number}, but the NVIDIA driver is not loaded: install it, or reboot")
    if not torch_uses_gpus():
        version = _version("torch") or "not installed"
        return Finding(
            Verdict.PROBLEM,
            "gpu",
            f"{number}, driver {driver}, but torch ({version}) cannot use them: install the build with CUDA",
        )
    return Finding(Verdict.OK, "gpu", f"{number}, driver {driver}")


def driver_version() -> str | None:
    """None if no NVIDIA driver is loaded."""
    try:
        found = re.search(r"\s(\d+(?:\.\d+)+)\s", DRIVER.read_text())
    except OSError:
        return None
    return found[1] if found else "of unknown version"


def sglang() -> Finding:
    return _engine_of("sglang", find_sglang(), engine_versions.sglang_version, engine_versions.sglang_problem)


def vllm() -> Finding:
    return _engine_of("vllm", find_vllm(), engine_versions.vllm_version)


def _engine_of(
    name: str,
    python: str | None,
    version_of: Callable[[str], str],
    problem: Callable[[str], str] = lambda version: "",
) -> Finding:
    """What a Python says about an engine that it is to have. Nothing of the engine is imported.

    ``problem``: why a version is of no use here, or nothing.
    """
    if python is None:
        text = f"not found: gspo up samples with the embedded engine; --{name}-python names a Python that has it"
        return Finding(Verdict.NOTE, name, text)
    try:
        version = version_of(python)
    except (NoVersion, Unanswered) as error:
        return Finding(Verdict.PROBLEM, name, f"{python} is there, but {error}")
    if told := problem(version):
        return Finding(Verdict.PROBLEM, name, f"{version} in {python} {told}")
    return Finding(Verdict.OK, name, f"{version} in {python}: gspo up --{name}")


def ports() -> Finding:
    named = os.environ.get("GSPO_API_PORT") or str(API_PORT)
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", int(named)))
    except OSError as error:
        text = f"{named} is not free ({error.strerror}): if that is not this stack, gspo up --port 0"
        return Finding(Verdict.NOTE, "ports", text)
    except (ValueError, OverflowError):
        return Finding(Verdict.PROBLEM, "ports", f"GSPO_API_PORT={named} is no port")
    return Finding(Verdict.OK, "ports", f"{named} is free for the API; all others are chosen at the start")


def account() -> Finding:
    """Services run as whoever starts them, and stay it."""
    if is_root():
        return Finding(Verdict.NOTE, "account", f"root, and services would be, too: {ADVICE}")
    return Finding(Verdict.OK, "account", f"user {os.geteuid()}" if hasattr(os, "geteuid") else "not root")


def wall() -> Finding:
    """It is built once, around a program that does nothing."""
    refusal, tier = WALLS[Tier.WALL].refusal(), os.environ.get("GSPO_ENV_TIER", "").lower()
    if refusal is None:
        least = " (GSPO_ENV_TIER=process: environments may run without it)" if tier == "process" else ""
        text = f"around environments and agents{least}; {_groups()}"
        return Finding(Verdict.NOTE if least else Verdict.OK, "wall", text)
    if tier in ("wall", "container", "remote"):
        return Finding(Verdict.PROBLEM, "wall", f"GSPO_ENV_TIER={tier}, so no environment will start here: {refusal}")
    uploads = "too" if tier == "process" else "not at all"
    text = f"none: environments run as processes of your account, uploaded ones {uploads}: {refusal}"
    return Finding(Verdict.NOTE, "wall", text)


def _groups() -> str:
    bounded, missing = control_groups.offer()
    refused = f"no control group for {missing}" if bounded else f"no control groups: {missing}"
    return "; ".join(
        part for part in (f"control groups for {bounded}" if bounded else "", refused if missing else "") if part
    )


def kernel() -> Finding:
    if sys.platform != "linux":
        return Finding(Verdict.NOTE, "kernel", f"{platform.system()}: children may outlive a killed parent; use Linux")
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    shared = shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.exists() else 0
    landlock = landlock_version()
    parts = [
        f"Linux {platform.release()}",
        f"Landlock {landlock}" if landlock else "no Landlock",
        "user namespaces" if _has_namespaces() else "no user namespaces",
        f"{open_files} open files",
        f"{shared / 1024**3:.1f} GiB of shared memory",
    ]
    weak = []
    if 0 <= open_files < MIN_OPEN_FILES:
        weak.append(f"raise the open files to {MIN_OPEN_FILES} (ulimit -n)")
    if shared < MIN_SHARED_BYTES:
        weak.append("engines with several GPUs need 1 GiB of shared memory (--shm-size)")
    return Finding(Verdict.NOTE if weak else Verdict.OK, "kernel", "; ".join([", ".join(parts), *weak]))


def landlock_version() -> int:
    """0 where the kernel has none, or does not say."""
    libc = ctypes.CDLL(None, use_errno=True)
    return max(0, int(libc.syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), _LANDLOCK_VERSION)))


def _has_namespaces() -> bool:
    try:
        return int(NAMESPACES.read_text()) > 0
    except (OSError, ValueError):
        return False


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
