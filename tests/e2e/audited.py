"""Every step of a job trained again from its own logs, as its user asks for it: ``gspo audit JOB --replay``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DEADLINE_S = 600.0
BIT_FOR_BIT = "every version bit for bit"


def audited(data_dir: Path, job: str) -> str:
    """What the command says; it must end well."""
    command = [str(Path(sys.executable).with_name("gspo")), "audit", job, "--data-dir", str(data_dir), "--replay"]
    done = subprocess.run(command, cwd=data_dir.parent, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
