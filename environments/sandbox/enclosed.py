"""A program that lives on between calls, such as an interpreter's worker, in a domain of its own.

Rule: it inherits no variable, has no capabilities, writes no file, reads the system's libraries and itself only, and
neither signals nor traces who started it. Its user ends it and bounds its time; here nothing is watched.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from environments.sandbox.command import PATHS
from environments.sandbox.runner import drop_capabilities
from gspo_core import landlock

_LIBRARIES = ("/usr", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache")
_ENTER = (
    "import sys; n = int(sys.argv[1]); sys.path.extend(sys.argv[2 : 2 + n]); "
    "from environments.sandbox.enclosed import become; become(sys.argv[2 + n :])"
)


def enclosed(program: Path) -> Path:
    """What to start in its place, while this process lives: a script in its memory, as folders for temporary files may
    allow no programs. Without Linux, the program itself."""
    if sys.platform != "linux":
        return program
    words = [sys.executable, "-I", "-S", "-c", _ENTER, str(len(PATHS)), *PATHS, str(program)]
    script = os.memfd_create("enclosed")
    os.write(script, f'#!/bin/sh\nexec {shlex.join(["/usr/bin/env", "-i", *words])} "$@"\n'.encode())
    return Path(f"/proc/{os.getpid()}/fd/{script}")


def become(words: list[str]) -> None:
    """Raises ``OSError``. Without Landlock, capabilities and variables alone are withheld."""
    drop_capabilities()
    landlock.confine([], may_listen=False, read_only=[*_LIBRARIES, words[0]])
    os.execve(words[0], words, {})  # noqa: S606
