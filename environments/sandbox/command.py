"""Starts one command behind a ``FileSystemView`` and waits for its end or its deadline.

Rule: a command sees of the files what its view shows, inherits no variable, and nothing that it started is left when
``run`` returns. What the machine refuses is ``SandboxFailed``, never the command's own failure. It bounds neither
memory nor the network: hosts and their walls do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import gspo_core
from environments.sandbox.contract import Ended, SandboxFailed
from environments.sandbox.runner import CommandOrder, Report, joined
from gspo_core import landlock

# Both: a wheel keeps the two packages in different folders.
PATHS = [str(Path(one).resolve().parents[back]) for one, back in ((__file__, 2), (gspo_core.__file__, 1))]
_ENTER = "import sys; sys.path.extend(sys.argv[1:]); from environments.sandbox.runner import main; main()"
# Beyond the deadline that the runner keeps itself: for its own start and for killing what is left.
GRACE_S = 10.0
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/proc", "/sys")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")


@dataclass(frozen=True)
class FileSystemView:
    """The files that a command reaches, beside the system's programs and the interpreter."""

    writable: Sequence[str]
    readable: Sequence[str] = ()


def refusal() -> str | None:
    """Why this machine runs no commands."""
    if sys.platform != "linux":
        return "it needs Linux"
    return None if landlock.version() else "the kernel has no Landlock, so commands could read whatever its user may"


def shown_to_all() -> Sequence[str]:
    """What every command reads: the system, and the interpreter of this process."""
    return *_SYSTEM, *dict.fromkeys((sys.prefix, sys.base_prefix))


def variables(home: str, scratch: str, more: Mapping[str, str]) -> dict[str, str]:
    """A command's environment, whole."""
    own = dict.fromkeys(f"{prefix}/bin" for prefix in (sys.prefix, sys.base_prefix))
    path = os.pathsep.join(dict.fromkeys((*_PATH, *own)))
    return {"PATH": path, "HOME": home, "TMPDIR": scratch, "LANG": "C.UTF-8", **more}


def run(
    program: Sequence[str],
    view: FileSystemView,
    *,
    directory: str,
    environment: Mapping[str, str],
    timeout_s: float,
    most_bytes: int,
) -> Ended:
    """Raises ``SandboxFailed``."""
    order: CommandOrder = {
        "program": list(program),
        "directory": directory,
        "variables": dict(environment),
        "readable": [*shown_to_all(), *view.readable],
        "writable": [*_DEVICES, *view.writable],
        "timeout_s": timeout_s,
        "most_bytes": most_bytes,
    }
    report = _run(order)
    if report["refusal"]:
        raise SandboxFailed(f"the command could not be started: {report['refusal']}")
    output = joined(report["head"], report["tail"], report["left_out_bytes"])
    return Ended(report["status"], report["timed_out"], report["seconds"], output)


def _run(order: CommandOrder) -> Report:
    words = [sys.executable, "-I", "-S", "-c", _ENTER, *PATHS]
    try:
        runner = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={}, cwd="/"
        )
    except OSError as error:
        raise SandboxFailed(f"no process could be started: {error}") from None
    with runner:
        try:
            said, complaint = runner.communicate(json.dumps(order).encode(), timeout=order["timeout_s"] + GRACE_S)
        except subprocess.TimeoutExpired:
            raise SandboxFailed("the command could not be ended in time") from None
        finally:
            runner.kill()
    if runner.returncode != 0:
        last = complaint.decode(errors="replace").strip().rpartition("\n")[2]
        raise SandboxFailed(f"the program around the command ended with status {runner.returncode}: {last}")
    report: Report = json.loads(said)
    return report
