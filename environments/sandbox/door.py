"""Where an environment gets its sandboxes: of this machine, or through the door that its host was given.

Rule: a host with a door runs no command of a policy itself. A door leads to one server and needs neither a network nor
a key; each sandbox has a connection through it, and ends with that connection, however the process ends.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import threading
from collections.abc import Iterator, Sequence

from environments.sandbox.contract import Sandbox, Sandboxes
from environments.sandbox.local import LocalSandboxes
from environments.sandbox.remote import RemoteSandboxes
from gspo_core.env import InvalidEnvironment

_door: socket.socket | None = None


def open_to(descriptor: int) -> None:
    """For a host, before it loads an environment."""
    global _door
    os.set_inheritable(descriptor, False)  # what an environment starts has no business with it
    _door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=descriptor)


def is_open() -> bool:
    """Whether this host's sandboxes stand elsewhere."""
    return _door is not None


def sandboxes(readable: Sequence[str] = ()) -> Sandboxes:
    """``readable`` are folders that commands read beside the system. Raises ``InvalidEnvironment``."""
    if _door is None:
        return LocalSandboxes(readable)
    if readable:
        raise InvalidEnvironment("readable names folders of this machine; its sandboxes stand elsewhere")
    return DoorSandboxes(_door)


class DoorSandboxes:
    def __init__(self, door: socket.socket) -> None:
        self._door = door

    def refusal(self) -> str | None:
        return None

    def create(self, base: str = "") -> Sandbox:
        return RemoteSandboxes(_Connection(self._door), num_tries=1).create(base)


class _Connection(http.client.HTTPConnection):
    """Belongs to one sandbox; each request waits until the answer before it has been read."""

    def __init__(self, door: socket.socket) -> None:
        super().__init__("sandboxes")
        self._turn = threading.Lock()
        self.sock, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(door, [b"open"], [theirs.fileno()])

    @contextlib.contextmanager
    def __call__(self, within_s: float) -> Iterator[http.client.HTTPConnection]:
        with self._turn:
            if self.sock is not None:
                self.sock.settimeout(within_s)
            yield self

    def connect(self) -> None:
        raise ConnectionError("the door to the sandboxes is closed")

    def __del__(self) -> None:
        self.close()
