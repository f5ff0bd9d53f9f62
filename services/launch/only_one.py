"""One launched installation at a time on a data directory: a second one would write the same Redis file.

Rule: the lock is held by a file of the operating system, so it ends with whoever held it; on a shared file system the
lock of a node that died lives on for a while, which is waited for. Where files cannot be locked, that is told, and
nothing is refused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

# NFS 4 gives up the locks of a client that is silent for 90 s or less. NFS 3 keeps those of a node that was lost.
GONE_AFTER_S = 120.0
LOOK_S = 1.0
_HELD = frozenset({errno.EWOULDBLOCK, errno.EACCES})
_CANNOT = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


class RunsAlready(RuntimeError):
    """Another installation has the data directory; the message says where it runs."""


@contextlib.contextmanager
def only_one(folder: Path, say: Callable[[str], None], *, within_s: float = GONE_AFTER_S) -> Iterator[None]:
    """Hold ``folder`` against others inside the block. Raises RunsAlready once they held it for so long."""
    path = folder / "launched.lock"
    path.touch(0o600)
    with path.open("r+") as file:
        if _locked(file, say, within_s):
            file.seek(0)
            file.truncate()
            print(f"process {os.getpid()} on {socket.gethostname()}{_batch_job()}", file=file, flush=True)
        yield


def _batch_job() -> str:
    """A batch system ends one run of a job before it begins the next."""
    return f", Slurm job {job}" if (job := os.environ.get("SLURM_JOB_ID")) else ""


def _locked(file: IO[str], say: Callable[[str], None], within_s: float) -> bool:
    """False: this file system locks nothing."""
    deadline, is_told = time.monotonic() + within_s, False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _CANNOT:
                say(f"{file.name} cannot be locked ({error.strerror}): launch nothing else on this data directory")
                return False
            if error.errno not in _HELD:
                raise
        else:
            return True
        file.seek(0)
        holder = file.read().strip()
        found = f"the data directory is in use: {holder or 'another installation'} launched on it"
        if time.monotonic() >= deadline:
            if _batch_job() and holder.endswith(_batch_job()):
                say(f"{found}; that was this job on a node that was lost: going on without its lock")
                return False
            raise RunsAlready(f"{found}. Wait for its end, or name another --data-dir")
        if not is_told:
            say(f"{found}; waiting for its end for {within_s:.0f} s")
            is_told = True
        time.sleep(LOOK_S)
