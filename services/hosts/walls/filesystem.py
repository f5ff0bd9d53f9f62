"""The file system inside a wall: the parts of ours that a plan shows, and a bounded one of its own.

Rule: what the plan does not show is not there. Nothing of ours can be written but what the plan says; ``/tmp``,
``/dev/shm`` and the sessions' folders share one bounded space in memory, which goes with the last process.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from services.hosts.walls import kernel
from services.hosts.walls.terms import SESSIONS, Entry, How

_OWN = "/own"
_NOTHING = "/.nothing"
_DEVICES = ("null", "zero", "full", "random", "urandom")
_MOST_FILES = 1 << 17
_OWN_FLAGS = kernel.MS_NOSUID | kernel.MS_NODEV
# A process that is root outside could change the kernel there even without capabilities, and any process could change
# how the kernel treats others of its account, such as which it ends first.
_FIXED = ("/proc",)
_READ_ONLY = kernel.MOUNT_ATTR_RDONLY | kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NODEV
_WRITABLE = kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NODEV


def build(staging: str, entries: Sequence[Entry], *, own_bytes: int, account: int, user_namespace: int) -> None:
    """Makes it at ``staging`` and then the root of this process, which has a mount namespace of its own.

    ``user_namespace`` makes root's files those of the account inside; 0 leaves them as they are.
    """
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_SLAVE)
    trees = {path: _taken(path, how, user_namespace) for how, path in entries if how not in (How.EMPTY, How.LINK)}
    links = {path: os.readlink(path) for how, path in entries if how == How.LINK}
    devices = {name: kernel.clone_tree(f"/dev/{name}") for name in _DEVICES}
    kernel.mount("none", staging, "tmpfs", _OWN_FLAGS, "size=4m,nr_inodes=65536,mode=755")
    os.close(os.open(staging + _NOTHING, os.O_CREAT | os.O_EXCL, 0o444))
    _make_own(staging, own_bytes, account)
    _make_devices(staging, devices)
    for how, path in entries:
        if how == How.EMPTY:
            _hide(staging + path, staging + _NOTHING)
        elif how == How.LINK:
            os.symlink(links[path], staging + path)
        else:
            _show(staging + path, trees[path])
    os.mkdir(f"{staging}/proc")
    kernel.mount("proc", f"{staging}/proc", "proc", _OWN_FLAGS | kernel.MS_NOEXEC)
    kernel.make_root(staging)
    for path in _FIXED:
        with contextlib.suppress(FileNotFoundError):
            _attach_again(path)
    kernel.make_read_only("/")


def seen_by(folder: str) -> list[str]:
    """What a process of sessions sees behind the wall: everything, but of the sessions' folders only its own."""
    return [f"/{name}" for name in os.listdir("/") if f"/{name}" != SESSIONS] + [folder]


def _taken(path: str, how: How, user_namespace: int) -> int:
    """A detached copy of what is at ``path``; 0 if nothing is."""
    try:
        tree = kernel.clone_tree(path)
    except (FileNotFoundError, NotADirectoryError):
        return 0
    attributes = _WRITABLE if how == How.WRITE else _READ_ONLY
    if user_namespace and how != How.SYSTEM:
        try:
            kernel.set_attributes(tree, attributes, user_namespace)
        except OSError:  # a file system that cannot: then others' rights decide
            kernel.set_attributes(tree, attributes)
    else:
        kernel.set_attributes(tree, attributes)
    return tree


def _show(target: str, tree: int) -> None:
    if tree:
        _make_target(target, is_dir=Path(f"/proc/self/fd/{tree}").is_dir())
        kernel.attach_tree(tree, target)
        os.close(tree)


def _hide(target: str, nothing: str) -> None:
    if os.path.isdir(target):
        kernel.mount("none", target, "tmpfs", _OWN_FLAGS, "size=1m,nr_inodes=1024,mode=755")
    elif os.path.exists(target):
        kernel.attach_tree(kernel.clone_tree(nothing), target)


def _make_target(target: str, *, is_dir: bool) -> None:
    if os.path.lexists(target):
        return
    os.makedirs(target if is_dir else os.path.dirname(target), mode=0o755, exist_ok=True)
    if not is_dir:
        os.close(os.open(target, os.O_CREAT | os.O_EXCL, 0o644))


def _make_own(staging: str, own_bytes: int, account: int) -> None:
    own = staging + _OWN
    os.makedirs(own)
    kernel.mount("none", own, "tmpfs", _OWN_FLAGS, f"size={own_bytes},nr_inodes={_MOST_FILES},mode=755")
    for name in ("/tmp", "/dev/shm", SESSIONS):  # noqa: S108 - of its own
        inside = f"{own}/{name[1:].replace('/', '-')}"
        os.mkdir(inside)
        os.chmod(inside, 0o700 if name == SESSIONS else 0o1777)
        if os.geteuid() != account:
            os.chown(inside, account, account)
        os.makedirs(staging + name, exist_ok=True)
        kernel.attach_tree(kernel.clone_tree(inside), staging + name)
    kernel.detach(own)
    os.rmdir(own)


def _make_devices(staging: str, devices: Mapping[str, int]) -> None:
    for name, tree in devices.items():
        target = f"{staging}/dev/{name}"
        _make_target(target, is_dir=False)
        kernel.attach_tree(tree, target)
        os.close(tree)
    for name, path in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{path}", f"{staging}/dev/{name}")


def _attach_again(path: str) -> None:
    tree = kernel.clone_tree(path)
    kernel.set_attributes(tree, kernel.MOUNT_ATTR_RDONLY)
    kernel.attach_tree(tree, path)
    os.close(tree)
