"""The images of a release: built where a Docker daemon answers; where none does, that is said, and the rest is there.

Rule: what is built is what ``docker compose build`` builds, with the tags that docker-compose.yml names. It pushes
nothing.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ASK_S = 30
BUILD = ("docker", "compose", "--profile", "*", "build")


class NotBuilt(Exception):
    """Docker is there, and could not build them."""


def what_is_missing() -> str | None:
    """Why no image can be built on this machine."""
    if shutil.which("docker") is None:
        return "there is no docker on this machine"
    if not _succeeds("docker", "info"):
        return "no Docker daemon answers (docker info)"
    return None if _succeeds("docker", "compose", "version") else "docker has no compose here (docker compose version)"


def build(root: Path) -> str:
    """A line that says what became of them. Raises NotBuilt."""
    if (problem := what_is_missing()) is not None:
        return f"no images: {problem}; where there is one, make images builds them"
    code = subprocess.run(BUILD, cwd=root, check=False).returncode
    if code:
        raise NotBuilt(f"{' '.join(BUILD)} ended with code {code}")
    return "images: built, see docker images 'gspo-*'"


def _succeeds(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=ASK_S, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
