"""A disk of its own for the job's files, which is full on order: a file system in memory whose size is lowered to what
is in it. Mounting takes the rights of root; without them no disk becomes full and the run says so.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

TRIES = 50


class Disk:
    def __init__(self, place: Path, size_mb: int) -> None:
        self.place = place
        self._size_mb = size_mb
        place.mkdir(parents=True, exist_ok=True)
        options = f"size={size_mb}m"
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True, check=False
        )
        self.is_mounted = mounted.returncode == 0

    def fill(self) -> bool:
        """Nothing more fits; False: the writers were faster each time."""
        for _ in range(TRIES):
            status = os.statvfs(self.place)
            used_kb = (status.f_blocks - status.f_bfree) * status.f_frsize // 1024
            # It cannot be made smaller than it is, and somebody is writing.
            with contextlib.suppress(subprocess.CalledProcessError):
                self._remount(f"size={max(4, used_kb)}k")
                return True
        return False

    def empty(self) -> None:
        self._remount(f"size={self._size_mb}m")

    def _remount(self, option: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{option}", str(self.place)], check=True, capture_output=True)

    def free_share(self) -> float:
        usage = shutil.disk_usage(self.place)
        return usage.free / usage.total

    def close(self, keep_at: Path | None = None) -> None:
        """What was on it is copied to ``keep_at``."""
        if not self.is_mounted:
            return
        if keep_at is not None:
            shutil.copytree(self.place, keep_at, dirs_exist_ok=True)
        subprocess.run(["umount", "--lazy", str(self.place)], check=True)
        self.is_mounted = False
