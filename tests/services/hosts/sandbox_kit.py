"""Every kind of sandbox, made for tests: the server and the daemon are the real ones."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from environments.sandbox.contract import Command, Ended, File, Sandbox, Sandboxes, archive
from environments.sandbox.door import DoorSandboxes
from environments.sandbox.local import LocalSandboxes
from environments.sandbox.remote import RemoteSandboxes, over_url
from gspo_core.outbound import parse_networks
from services.hosts.sandboxes.container import ContainerSandboxes
from services.hosts.sandboxes.relay import Relay

KEY = "a key that nobody guesses, of this test"
LOOPBACK = parse_networks(["127.0.0.0/8"])
LONG_S = 60.0
# ``make real-containers`` names one; there is a daemon then.
IMAGE = os.environ.get("GSPO_TEST_IMAGE", "")


class Server:
    """The real process, with sandboxes of this machine."""

    def __init__(self, folder: Path, kind: str = "local", **options: str) -> None:
        words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
        variables = {
            "PATH": os.environ["PATH"],
            "TMPDIR": str(folder),
            "GSPO_SANDBOX_KEY_SHA256": hashlib.sha256(KEY.encode()).hexdigest(),
            "GSPO_SANDBOX_IMAGES": IMAGE,
            **{name: value for name, value in os.environ.items() if name.startswith("DOCKER_")},
        }
        program = [sys.executable, "-m", "services.hosts.sandboxes", "--kind", kind, "--port", "0", *words]
        self.process = subprocess.Popen(program, env=variables, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        said = ""
        for line in self.process.stderr:
            said += line
            if '"port"' in line:
                self.port = int(json.loads(line)["port"])
                return
        raise AssertionError(said)

    def sandboxes(self, key: str = KEY) -> RemoteSandboxes:
        return over_url(f"http://127.0.0.1:{self.port}", key, LOOPBACK)

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        with self.process:
            self.process.communicate(timeout=LONG_S)
        return self.process.returncode


@contextlib.contextmanager
def served(folder: Path, kind: str = "local", **options: str) -> Iterator[Server]:
    server = Server(folder, kind, **options)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.end()


@contextlib.contextmanager
def through_door(behind: Sandboxes) -> Iterator[Sandboxes]:
    """As a host has it, in this process."""
    relay = Relay(behind)
    try:
        with socket.socket(fileno=os.dup(relay.number)) as door:
            yield DoorSandboxes(door)
    finally:
        relay.close()


@contextlib.contextmanager
def of_kind(kind: str, folder: Path) -> Iterator[Sandboxes]:
    match kind:
        case "local":
            yield LocalSandboxes(below=str(folder))
        case "remote":
            with served(folder) as server:
                yield server.sandboxes()
        case "local through a door":
            with through_door(LocalSandboxes(below=str(folder))) as sandboxes:
                yield sandboxes
        case "remote through a door":
            with served(folder) as server, through_door(server.sandboxes()) as sandboxes:
                yield sandboxes
        case "container":
            yield ContainerSandboxes([IMAGE])
        case _:
            with served(folder, "container") as server, through_door(server.sandboxes()) as sandboxes:
                yield sandboxes


KINDS = ("local", "remote", "local through a door", "remote through a door")
KINDS += ("container", "container at a server through a door") if IMAGE else ()


def begun(sandbox: Sandbox) -> Sandbox:
    """With a folder to work in and one for temporary files."""
    sandbox.put(archive([File("work"), File("tmp")]))
    return sandbox


def at(sandbox: Sandbox, name: str) -> str:
    return str(Path(sandbox.root) / name)


def ran(sandbox: Sandbox, text: str, timeout_s: float = LONG_S, most_bytes: int = 4000, **variables: str) -> Ended:
    work, scratch = at(sandbox, "work"), at(sandbox, "tmp")
    return sandbox.run(Command(text, work, work, scratch, variables, timeout_s, most_bytes))
