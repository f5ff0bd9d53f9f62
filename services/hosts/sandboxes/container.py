"""Sandboxes that are containers of Docker: one for each episode, without a network.

Rule: a container lives as long as the program that holds its input: when this process ends, however it does, the
container ends and is removed. Images are those that the operator names and are never pulled. Whatever a command has
started is ended by the container's first process, which no process in it can end.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import tarfile
import threading
import time
import uuid
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO

from environments.sandbox.contract import Command, Ended, Sandbox, SandboxFailed
from environments.sandbox.runner import KeptOutput

LABEL = "gspo.sandbox"
START_S, CALL_S, END_S = 60.0, 60.0, 10.0
_CHUNK = 1 << 16
_MOST_FILES = 5_000
_KILLED = 137
_BOUNDS = (
    *("--network", "none", "--pull", "never", "--security-opt", "no-new-privileges", "--cap-drop", "ALL"),
    # Without these, root inside could not install, own or become anything.
    *("--cap-add", "CHOWN", "--cap-add", "DAC_OVERRIDE", "--cap-add", "FOWNER"),
    *("--cap-add", "SETGID", "--cap-add", "SETUID", "--cap-add", "KILL"),
)
# When asked, it kills all processes but itself until none is left: to the kernel, -1 is every process but the first.
_FIRST = "echo ready; while read -r _; do while kill -9 -1 2> /dev/null; do :; done; echo ended; done"
# Docker waits for every process that holds the output (2.4 s for 0.8, measured): leftovers are killed first.
_OUTER = 'exec 2>&1 < /dev/null; /bin/bash -c "$1"; status=$?; kill -9 -1 2> /dev/null; exit $status'
# The docker program gets no other variables of ours: no keys.
_PASSED = ("PATH", "HOME", "DOCKER_HOST", "DOCKER_CONFIG", "DOCKER_CONTEXT", "DOCKER_CERT_PATH", "DOCKER_TLS_VERIFY")


@dataclass(frozen=True)
class ContainerSandboxes:
    """``images``: all that may be asked for; the first is meant where none is."""

    images: Sequence[str]
    memory_mb: int = 2048
    num_processes: int = 512
    num_cpus: float = 1.0

    def refusal(self) -> str | None:
        if not self.images:
            return "no image is named (GSPO_SANDBOX_IMAGES)"
        if shutil.which("docker") is None:
            return "there is no program docker"
        try:
            for image in self.images:
                _docker("image", "inspect", "--format", "{{.Id}}", image)
        except SandboxFailed as failed:
            return str(failed)
        return None

    def create(self, base: str = "") -> Sandbox:
        image = base or self.images[0]
        if image not in self.images:
            raise SandboxFailed(f"the operator does not offer the image {image} (GSPO_SANDBOX_IMAGES)")
        memory = f"{self.memory_mb}m"
        bounds = ("--memory", memory, "--memory-swap", memory, "--pids-limit", str(self.num_processes))
        return ContainerSandbox(image, (*_BOUNDS, *bounds, "--cpus", str(self.num_cpus)))


class ContainerSandbox:
    root = "/"

    def __init__(self, image: str, bounds: Sequence[str]) -> None:
        self._name = f"gspo-{uuid.uuid4().hex}"
        words = ("run", "--interactive", "--rm", "--name", self._name, "--label", LABEL, *bounds)
        self._first = subprocess.Popen(
            ["docker", *words, "--entrypoint", "/bin/bash", image, "-c", _FIRST],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_variables(),
            start_new_session=True,  # an interrupt at a terminal is for us; this one ends with its input
        )
        if self._heard(START_S) != b"ready\n":
            complaint = self._complaint()
            self.close()
            raise SandboxFailed(f"no container of {image} could be started: {complaint}")

    def run(self, command: Command) -> Ended:
        given = {"HOME": command.home, "TMPDIR": command.scratch, "LANG": "C.UTF-8", **command.variables}
        variables = [word for name, value in given.items() for word in ("--env", f"{name}={value}")]
        words = ["exec", *variables, "--workdir", command.directory, self._name, "/bin/bash", "-c", _OUTER, "-"]
        began = time.monotonic()
        program = _started([*words, command.text])
        kept = KeptOutput(command.most_bytes)
        reading = threading.Thread(target=_read_all, args=(program.stdout, kept), daemon=True)
        reading.start()
        try:
            timed_out = not _ended(program, command.timeout_s)
            seconds = time.monotonic() - began
            self._end_all()
            if timed_out and not _ended(program, END_S):
                raise SandboxFailed("the command could not be ended in time")
            reading.join(END_S)
        finally:
            _abandon(program)
        status = _KILLED if timed_out else program.returncode
        return Ended(status, timed_out, seconds, kept.text())

    def put(self, archive: bytes, instead_of: Sequence[str] = ()) -> None:
        if instead_of:
            _docker("exec", self._name, "rm", "-rf", "--", *instead_of)
        _docker("cp", "-", f"{self._name}:/", given=archive)

    def get(self, path: str, most_bytes: int) -> bytes | None:
        program = _started(["cp", f"{self._name}:{path}", "-"])
        assert program.stdout is not None
        timer = threading.Timer(CALL_S, program.kill)
        timer.start()
        try:
            with tarfile.open(fileobj=program.stdout, mode="r|") as archive:
                member = archive.next()
                if member is None or not member.isreg():
                    return None
                file = archive.extractfile(member)
                return None if file is None else file.read(most_bytes)
        except tarfile.TarError:  # nothing is there, so nothing came
            self._require_alive()
            return None
        finally:
            timer.cancel()
            _abandon(program)

    def snapshot(self, folders: Sequence[str], most_bytes: int) -> bytes | None:
        held = io.BytesIO()
        room = most_bytes
        with tarfile.open(fileobj=held, mode="w", format=tarfile.PAX_FORMAT) as into:
            for folder in folders:
                taken = self._copied(folder, into, room)
                if taken is None or len(into.getmembers()) > _MOST_FILES:
                    return None
                room -= taken
        return json.dumps({"folders": list(folders)}).encode() + b"\n" + zlib.compress(held.getvalue(), 1)

    def restore(self, state: bytes) -> None:
        about, _, held = state.partition(b"\n")
        try:
            folders, packed = json.loads(about)["folders"], zlib.decompress(held)
        except (ValueError, TypeError, KeyError, zlib.error):
            raise SandboxFailed("the snapshot is of another kind of sandbox") from None
        self.put(packed, folders)

    def close(self) -> None:
        if self._first.stdin is not None and not self._first.stdin.closed:
            self._first.stdin.close()
            subprocess.run(
                ["docker", "rm", "--force", "--volumes", self._name],
                env=_variables(), capture_output=True, timeout=CALL_S, check=False,
            )  # fmt: skip
        _abandon(self._first)

    def _copied(self, folder: str, into: tarfile.TarFile, room: int) -> int | None:
        """How many bytes; None where it is too much, or of an unusual kind."""
        program = _started(["cp", f"{self._name}:{folder}", "-"])
        timer = threading.Timer(CALL_S, program.kill)
        timer.start()
        taken, parent = 0, PurePosixPath(folder).parent
        try:
            with tarfile.open(fileobj=program.stdout, mode="r|") as archive:
                for member in archive:
                    taken += member.size
                    usual = member.isreg() or member.isdir() or member.issym() or member.islnk()
                    if not usual or taken > room or len(into.getmembers()) > _MOST_FILES:
                        return None
                    member.name = str(parent / member.name).lstrip("/")
                    if member.islnk():
                        member.linkname = str(parent / member.linkname).lstrip("/")
                    into.addfile(member, archive.extractfile(member) if member.isreg() else None)
            return taken
        except tarfile.TarError as error:
            self._require_alive()
            raise SandboxFailed(f"{folder} could not be copied: {error}") from None
        finally:
            timer.cancel()
            _abandon(program)

    def _end_all(self) -> None:
        self._require_alive()
        assert self._first.stdin is not None
        try:
            self._first.stdin.write(b"\n")
            self._first.stdin.flush()
        except OSError:
            raise SandboxFailed("the container has ended") from None
        if self._heard(END_S) != b"ended\n":
            raise SandboxFailed("the processes of a command could not be ended")

    def _heard(self, timeout_s: float) -> bytes:
        """The next line of its first process; less where none comes."""
        timer = threading.Timer(timeout_s, self._first.kill)
        timer.start()
        try:
            assert self._first.stdout is not None
            return self._first.stdout.readline()
        finally:
            timer.cancel()

    def _require_alive(self) -> None:
        if self._first.stdin is None or self._first.stdin.closed:
            raise SandboxFailed("the sandbox is closed")
        if self._first.poll() is not None:
            raise SandboxFailed(f"the container has ended: {self._complaint()}")

    def _complaint(self) -> str:
        _ended(self._first, END_S)
        assert self._first.stderr is not None
        return _last_line(self._first.stderr.read()) if self._first.poll() is not None else "it does not answer"


def _docker(*words: str, given: bytes | None = None) -> bytes:
    """Raises ``SandboxFailed``."""
    try:
        done = subprocess.run(
            ["docker", *words],
            input=given,
            stdin=subprocess.DEVNULL if given is None else None,
            capture_output=True,
            env=_variables(),
            timeout=CALL_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxFailed(f"docker {words[0]}: {error}") from None
    if done.returncode != 0:
        raise SandboxFailed(f"docker {words[0]}: {_last_line(done.stderr)}")
    return done.stdout


def _started(words: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["docker", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=_variables(),
        start_new_session=True,
    )


def _ended(program: subprocess.Popen[bytes], timeout_s: float) -> bool:
    try:
        program.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _abandon(program: subprocess.Popen[bytes]) -> None:
    program.kill()
    program.wait()
    for pipe in (program.stdin, program.stdout, program.stderr):
        if pipe is not None:
            pipe.close()


def _read_all(output: IO[bytes], kept: KeptOutput) -> None:
    while data := os.read(output.fileno(), _CHUNK):
        kept.add(data)


def _variables() -> dict[str, str]:
    return {name: os.environ[name] for name in _PASSED if name in os.environ}


def _last_line(said: bytes) -> str:
    return said.decode(errors="replace").strip().rpartition("\n")[2][:400]
