"""A Landlock domain for a process and all that it starts: what it reaches of the file system, and whom it signals.

Rule: a confined process signals, traces and inspects nothing but itself and what it started, reaches no abstract socket
of others, and of files those that it was given. An older kernel gives what it has: everything but signals and abstract
sockets from version 1 on. It never loosens a domain that a process is in already.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Sequence

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""System calls: the same numbers on every architecture."""
_PR_SET_NO_NEW_PRIVS = 38
_VERSION_FLAG = 1
_RULE_PATH_BENEATH = 1
_BIND_TCP = 1
_SCOPES = 0b11
"""Abstract sockets, signals."""
_NET_SINCE, _SCOPES_SINCE = 4, 6
# Rights of each version; those that a version adds are unknown to earlier ones.
_RIGHTS_OF_VERSION = ((1, 13), (2, 14), (3, 15), (5, 16))
_RIGHTS_OF_FILES = 0b1 | 0b10 | 0b100 | 1 << 14 | 1 << 15
_RIGHTS_TO_READ = 0b1 | 0b100 | 0b1000
"""To execute and read files, and to list folders."""

_libc = ctypes.CDLL(None, use_errno=True)


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def version() -> int:
    """The kernel's version of Landlock; 0 if it has none."""
    try:
        return _syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION_FLAG))
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP):
            return 0
        raise


def confine(paths: Sequence[str], *, may_listen: bool, read_only: Sequence[str] = ()) -> None:
    """This process and all that it starts reach ``paths`` and what lies below them only; ``read_only`` to read."""
    known = version()
    if not known:
        return
    rights = (1 << next(bits for since, bits in reversed(_RIGHTS_OF_VERSION) if known >= since)) - 1
    net = _BIND_TCP if known >= _NET_SINCE and not may_listen else 0
    given = _Ruleset(rights, net, _SCOPES if known >= _SCOPES_SINCE else 0)
    size = 24 if known >= _SCOPES_SINCE else 16 if known >= _NET_SINCE else 8
    ruleset = _syscall(_CREATE_RULESET, ctypes.byref(given), ctypes.c_size_t(size), ctypes.c_uint32(0))
    try:
        for path, allowed in (*((one, rights) for one in paths), *((one, _RIGHTS_TO_READ) for one in read_only)):
            with contextlib.suppress(FileNotFoundError):
                _allow(ruleset, path, allowed)
        _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0))), "prctl")
        _syscall(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        allowed = rights if os.path.isdir(path) else rights & _RIGHTS_OF_FILES
        rule = _PathBeneath(allowed, parent)
        kind = ctypes.c_int(_RULE_PATH_BENEATH)
        _syscall(_ADD_RULE, ctypes.c_int(ruleset), kind, ctypes.byref(rule), ctypes.c_uint32(0))
    finally:
        os.close(parent)


def _syscall(number: int, *arguments: object) -> int:
    return _checked(_libc.syscall(ctypes.c_long(number), *arguments), f"system call {number}")


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
