"""A seccomp filter that refuses the system calls with which code reaches out of its wall or deep into the kernel.

Rule: a list of what is refused, not of what is allowed, because environments bring any program. Refused calls fail as
if not permitted. Sockets are of the usual families only, new namespaces are never made, and a process of another
architecture than ours is killed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from dataclasses import dataclass

from services.hosts.walls import kernel

_LOAD_WORD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_X32 = 0x40000000
_MODE_FILTER = 2
_NAMESPACES = 0x7E020080
"""All CLONE_NEW* flags, time included."""
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, 16)
"""16: netlink, with which programs learn their addresses."""

# By name: on x86_64, elsewhere (the generic table). None: the architecture has no such call.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    # mounts, roots and namespaces
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    # keys
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # much kernel for little use
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "fanotify_init": (300, 262),
    "vmsplice": (278, 75),
    "lookup_dcookie": (212, 18),
    # the machine
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "vhangup": (153, 58),
}
# Allowed for the calling process only (0 in the argument that names one), not for others of the same account.
_OWN_ONLY: dict[str, tuple[int, int, tuple[tuple[int, int], ...]]] = {
    "prlimit64": (302, 261, ((0, 0),)),
    "sched_setparam": (142, 118, ((0, 0),)),
    "sched_setscheduler": (144, 119, ((0, 0),)),
    "sched_setaffinity": (203, 122, ((0, 0),)),
    "sched_setattr": (314, 274, ((0, 0),)),
    "migrate_pages": (256, 238, ((0, 0),)),
    "move_pages": (279, 239, ((0, 0),)),
    # of a process (0, 1), not of all of an account or a group
    "setpriority": (141, 140, ((0, 0), (1, 0))),
    "ioprio_set": (251, 30, ((0, 1), (1, 0))),
}
"""By name: the numbers as above, and the arguments that must have these values."""
_MISSING = {"clone3": (435, 435)}
"""Its flags lie in memory, where a filter cannot look: the C library goes back to ``clone``."""


@dataclass(frozen=True)
class _Machine:
    column: int
    architecture: int
    clone: int
    socket: int
    socketpair: int


_MACHINES = {
    "x86_64": _Machine(0, 0xC000003E, 56, 41, 53),
    "aarch64": _Machine(1, 0xC00000B7, 220, 198, 199),
}


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def refuse_dangerous_calls() -> None:
    """For this process and all that it starts, for ever; after ``PR_SET_NO_NEW_PRIVS``. Raises ``OSError``."""
    name = os.uname().machine
    if name not in _MACHINES:
        raise OSError(errno.ENOSYS, f"no list of system calls for {name}")
    code = b"".join(_filter(_MACHINES[name]))
    memory = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.addressof(memory))
    kernel.control(kernel.PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(program))


def _filter(machine: _Machine) -> list[bytes]:
    refused, missing = _FAIL | errno.EPERM, _FAIL | errno.ENOSYS
    code = [
        _instruction(_LOAD_WORD, _ARCHITECTURE),
        _instruction(_JUMP_EQUAL, machine.architecture, 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD_WORD, _NUMBER),
        _instruction(_JUMP_AT_LEAST, _X32, 0, 1),
        _instruction(_RETURN, missing),
    ]
    answers = [(one, refused) for one in _REFUSED.values()] + [(one, missing) for one in _MISSING.values()]
    for numbers, answer in answers:
        if (number := numbers[machine.column]) is not None:
            code += [_instruction(_JUMP_EQUAL, number, 0, 1), _instruction(_RETURN, answer)]
    for *numbers_of_call, wanted in _OWN_ONLY.values():
        code += [_instruction(_JUMP_EQUAL, numbers_of_call[machine.column], 0, 3 * len(wanted) + 1)]
        for argument, value in wanted:
            code += [_instruction(_LOAD_WORD, _FIRST_ARGUMENT + 8 * argument)]
            code += [_instruction(_JUMP_EQUAL, value, 1, 0), _instruction(_RETURN, refused)]
        code += [_instruction(_RETURN, _ALLOW)]
    code += [
        _instruction(_JUMP_EQUAL, machine.clone, 0, 4),
        _instruction(_LOAD_WORD, _FIRST_ARGUMENT),
        _instruction(_JUMP_ANY, _NAMESPACES, 0, 1),
        _instruction(_RETURN, refused),
        _instruction(_RETURN, _ALLOW),
    ]
    families = [_instruction(_JUMP_EQUAL, family, 0, 1) + _instruction(_RETURN, _ALLOW) for family in _FAMILIES]
    code += [
        _instruction(_JUMP_EQUAL, machine.socket, 2, 0),
        _instruction(_JUMP_EQUAL, machine.socketpair, 1, 0),
        _instruction(_RETURN, _ALLOW),
        _instruction(_LOAD_WORD, _FIRST_ARGUMENT),
        *families,
        _instruction(_RETURN, _FAIL | errno.EAFNOSUPPORT),
    ]
    return code


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)
