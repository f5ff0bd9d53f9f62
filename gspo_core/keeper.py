"""``python -m gspo_core.keeper MODULE ARGUMENT...``: runs a module, and leaves no process of it behind.

Rule: descendants that the module set free (daemons) become children of this process, and end with it: when the module
has ended, on SIGTERM or SIGINT, or when its parent dies. It ends the way the module did. Code that kills this process
first gets away: only a container prevents that.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import time

from gspo_core import descendants

# After this, processes that keep forking are left alone.
SWEEP_S = 2.0


def main() -> None:
    descendants.adopt_orphans()
    keeper = os.getpid()
    running = os.fork()
    if running == 0:
        os.setsid()  # a signal to its own group does not reach the keeper
        descendants.die_with(keeper)
        os.execv(sys.executable, [sys.executable, "-m", *sys.argv[1:]])  # noqa: S606
    for asked in (signal.SIGTERM, signal.SIGINT):
        signal.signal(asked, lambda *_: os.kill(running, signal.SIGKILL))
    descendants.be_told_of_parents_end()
    status = _wait_for(running)
    _sweep()
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if os.WTERMSIG(status) != signal.SIGKILL:  # its effect cannot be set
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(keeper, os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def _wait_for(running: int) -> int:
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == running:
            return status


def _sweep() -> None:
    deadline = time.monotonic() + SWEEP_S
    while descendants.children() and time.monotonic() < deadline:
        descendants.kill_strays(())
        time.sleep(0.001)
        with contextlib.suppress(ChildProcessError):  # none is left
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


if __name__ == "__main__":
    main()
