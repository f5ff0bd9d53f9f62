"""System calls that Python does not offer, as functions that raise ``OSError``.

Rule: nothing here decides anything. Linux only; numbers above 400 are the same on every architecture.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_REC = 0x4000
MS_SLAVE = 1 << 19
MNT_DETACH = 2

MOUNT_ATTR_RDONLY = 0x1
MOUNT_ATTR_NOSUID = 0x2
MOUNT_ATTR_NODEV = 0x4
MOUNT_ATTR_IDMAP = 0x00100000

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4

_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442

_AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_AT_RECURSIVE = 0x8000
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH = 4

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class _MountAttributes(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


_CAPABILITY_VERSION_3 = 0x20080522


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _call(function: Callable[..., int], *arguments: object) -> int:
    return _checked(function(*arguments), getattr(function, "__name__", "call"))


def syscall(number: int, *arguments: object) -> int:
    return _checked(_libc.syscall(ctypes.c_long(number), *arguments), f"system call {number}")


def unshare(flags: int) -> None:
    _call(_libc.unshare, ctypes.c_int(flags))


def enter_namespace(descriptor: int, kind: int) -> None:
    _call(_libc.setns, ctypes.c_int(descriptor), ctypes.c_int(kind))


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    _call(
        _libc.mount,
        source.encode(),
        os.fsencode(target),
        kind.encode(),
        ctypes.c_ulong(flags),
        options.encode() or None,
    )


def clone_tree(path: str) -> int:
    """A copy of the mounts at ``path`` and below, attached nowhere yet."""
    flags = _OPEN_TREE_CLONE | _AT_RECURSIVE | os.O_CLOEXEC
    return syscall(_OPEN_TREE, ctypes.c_int(_AT_FDCWD), os.fsencode(path), ctypes.c_uint(flags))


def set_attributes(tree: int, attributes: int, user_namespace: int = 0) -> None:
    """Sets them on all mounts of a tree; with a user namespace, also maps ids through it."""
    if user_namespace:
        attributes |= MOUNT_ATTR_IDMAP
    given = _MountAttributes(attributes, 0, 0, user_namespace)
    flags = ctypes.c_uint(_AT_EMPTY_PATH | _AT_RECURSIVE)
    size = ctypes.c_size_t(ctypes.sizeof(given))
    syscall(_MOUNT_SETATTR, ctypes.c_int(tree), b"", flags, ctypes.byref(given), size)


def attach_tree(tree: int, path: str) -> None:
    flags = ctypes.c_uint(_MOVE_MOUNT_F_EMPTY_PATH)
    syscall(_MOVE_MOUNT, ctypes.c_int(tree), b"", ctypes.c_int(_AT_FDCWD), os.fsencode(path), flags)


def make_root(path: str) -> None:
    """``path``, a mount, becomes the root; nothing of the old one is left."""
    os.chdir(path)
    _call(_libc.pivot_root, b".", b".")
    detach(".")
    os.chdir("/")


def make_read_only(path: str) -> None:
    """A mount that is this process's own, without those below it."""
    mount("none", path, "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def detach(path: str) -> None:
    _call(_libc.umount2, os.fsencode(path), ctypes.c_int(MNT_DETACH))


def control(option: int, *arguments: int) -> int:
    padded = [ctypes.c_ulong(one) for one in (*arguments, 0, 0, 0, 0)[:4]]
    return _call(_libc.prctl, ctypes.c_int(option), *padded)


def drop_capabilities() -> None:
    """All of them, for this process and whatever it starts."""
    highest = int(_first_line("/proc/sys/kernel/cap_last_cap"))
    for capability in range(highest + 1):
        control(PR_CAPBSET_DROP, capability)
    control(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    header = _CapabilityHeader(_CAPABILITY_VERSION_3, 0)
    _call(_libc.capset, ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))


def _first_line(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.readline().strip()
