"""Child processes that never outlive their parent, not even one that is killed with SIGKILL.

Linux offers this for a direct child (``PR_SET_PDEATHSIG``); elsewhere a child is only stopped by an orderly end.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> Callable[[], None] | None:
    """For ``Popen(preexec_fn=...)``. The kernel watches the thread that starts the child: let it live as long."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    parent = os.getpid()

    def ask_for_the_signal() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)

    return ask_for_the_signal
