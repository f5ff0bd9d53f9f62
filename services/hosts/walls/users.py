"""The account that walled code has: ``nobody`` if the service is root, else the service's own account, alone.

Rule: it has no capability outside, and a user namespace of its own, so that the number of its processes is counted
apart from everyone else's.
"""

from __future__ import annotations

import os
from pathlib import Path

from services.hosts.walls import kernel

NOBODY = 65534
_CAP_SYS_ADMIN = 21


def is_privileged() -> bool:
    """Whether namespaces can be made without a user namespace first."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    effective = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff"))
    return os.geteuid() == 0 and bool(effective >> _CAP_SYS_ADMIN & 1)


def user_namespace(inside: int, outside: int) -> int:
    """The descriptor of one that knows a single account; for those who are privileged."""
    is_made, made = os.pipe()
    hold, held = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(held)
            os.close(is_made)
            kernel.unshare(kernel.CLONE_NEWUSER)
            os.write(made, b"x")
            os.close(made)
            os.read(hold, 1)
            status = 0
        finally:
            os._exit(status)
    try:
        os.close(made)
        os.close(hold)
        if not os.read(is_made, 1):
            raise OSError("the kernel makes no user namespace")
        for kind in ("uid_map", "gid_map"):
            Path(f"/proc/{pid}/{kind}").write_text(f"{inside} {outside} 1")
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(held)
        os.close(is_made)
        os.waitpid(pid, 0)


def enter_user_namespace(flags: int) -> None:
    """A new one with this account alone, and with it the namespaces of ``flags``; for those who are not privileged."""
    uid, gid = os.geteuid(), os.getegid()
    kernel.unshare(kernel.CLONE_NEWUSER | flags)
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def become_nobody(namespace: int) -> None:
    """For those who are privileged."""
    os.setgroups([])
    kernel.enter_namespace(namespace, kernel.CLONE_NEWUSER)
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
