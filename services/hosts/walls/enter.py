"""The program that builds a wall and then becomes what runs behind it; started by ``tiers``, never by hand.

Rule: it runs isolated (``python -I -S``), before any code of an environment and with nothing but the standard library
and this package. It stays outside as a small process that ends as the one inside ended; whichever of the two is killed,
the other goes too, and with it everything inside.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import signal
import socket
import struct
import sys
from pathlib import Path

from gspo_core import descendants, landlock
from services.hosts.walls import filesystem, kernel, syscalls, users
from services.hosts.walls.terms import WallPlan

# Where the machine is short of memory, what runs behind walls ends before any service does.
_OUT_OF_MEMORY_SCORE = "500"
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1
_NAMESPACES = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS


def main() -> None:
    plan: WallPlan = json.loads(sys.argv[2])
    descendants.die_with(plan["parent"])
    if not landlock.version():
        raise OSError("the kernel has no Landlock")
    flags = _NAMESPACES | (0 if plan["network"] else kernel.CLONE_NEWNET)
    idmap = own = 0
    if users.is_privileged():
        idmap, own = users.user_namespace(0, users.NOBODY), users.user_namespace(users.NOBODY, users.NOBODY)
        kernel.unshare(flags)
    else:
        users.enter_user_namespace(flags)
    inside = os.fork()
    if inside == 0:
        try:
            _become(plan, idmap, own)
        except OSError as error:
            sys.stderr.write(f"no wall: {error}\n")
        finally:
            os._exit(1)
    _end_like(inside)


def _become(plan: WallPlan, idmap: int, own: int) -> None:
    kernel.control(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    for path in plan["joins"]:
        Path(path).write_text("0", encoding="ascii")
    with contextlib.suppress(OSError):  # a container may show /proc for reading only
        Path("/proc/self/oom_score_adj").write_text(_OUT_OF_MEMORY_SCORE, encoding="ascii")
    account = users.NOBODY if own else os.geteuid()
    filesystem.build(
        plan["staging"], plan["entries"], own_bytes=plan["own_bytes"], account=account, user_namespace=idmap
    )
    os.chdir(plan["directory"] if os.path.isdir(plan["directory"]) else "/")
    if not plan["network"]:
        _bring_up_loopback()
    socket.sethostname("walled")
    os.umask(0o077)
    if own:
        users.become_nobody(own)
    kernel.drop_capabilities()
    kernel.control(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.control(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of account undid it
    resource.setrlimit(resource.RLIMIT_NPROC, (plan["num_processes"], plan["num_processes"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _close_all_but(plan["descriptors"])
    syscalls.refuse_dangerous_calls()
    program = plan["program"]
    os.execve(program[0], program, plan["variables"])  # noqa: S606


def _bring_up_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        request = bytearray(struct.pack("<16sh22x", b"lo", 0))
        fcntl.ioctl(one, _SIOCGIFFLAGS, request)
        (flags,) = struct.unpack_from("<h", request, 16)
        struct.pack_into("<h", request, 16, flags | _IFF_UP)
        fcntl.ioctl(one, _SIOCSIFFLAGS, bytes(request))


def _close_all_but(descriptors: list[int]) -> None:
    for one in descriptors:
        os.set_inheritable(one, True)
    begin = 3
    for one in sorted(descriptors):
        os.closerange(begin, one)
        begin = one + 1
    os.closerange(begin, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _end_like(inside: int) -> None:
    """Ends this process like the one inside, so that its parent learns how that ended."""
    os.closerange(0, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    _, status = os.waitpid(inside, 0)
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))
