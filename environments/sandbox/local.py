"""Sandboxes on this machine: a folder for each, and commands that reach the folders in it and the system's programs.

Rule: nothing can be mounted here, so ``root`` is wherever the folder lies. Commands write into the folders that were
put into it and make none beside them. It bounds neither memory nor the network: hosts and their walls do.
"""

from __future__ import annotations

import io
import json
import os
import stat
import tarfile
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from environments.sandbox import folder
from environments.sandbox.command import FileSystemView, refusal, run, variables
from environments.sandbox.contract import Command, Ended, Sandbox, SandboxFailed

_BASH = "/bin/bash"
_OPEN = 0o755


@dataclass(frozen=True)
class LocalSandboxes:
    """``readable`` are shown to every command beside the system."""

    readable: Sequence[str] = ()
    below: str | None = None
    """Where the folders lie; None: among the temporary files."""

    def refusal(self) -> str | None:
        return refusal()

    def create(self, base: str = "") -> Sandbox:
        if base:
            raise SandboxFailed(f"a sandbox of this machine begins empty: it has no {base}")
        return LocalSandbox(Path(tempfile.mkdtemp(prefix="gspo-sandbox-", dir=self.below)).resolve(), self.readable)


class LocalSandbox:
    def __init__(self, path: Path, readable: Sequence[str] = ()) -> None:
        self._path = path
        self._readable = readable
        self.root = str(path)

    def run(self, command: Command) -> Ended:
        folders = self._opened()
        return run(
            [_BASH, "-c", command.text],
            FileSystemView([str(one) for one in folders], self._readable),
            directory=str(self._own(command.directory)),
            environment=variables(command.home, command.scratch, command.variables),
            timeout_s=command.timeout_s,
            most_bytes=command.most_bytes,
        )

    def put(self, archive: bytes, instead_of: Sequence[str] = ()) -> None:
        self._opened()
        try:
            for path in map(self._own, instead_of):
                _clear(path)
            with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
                packed.extractall(self._path, filter=folder.as_it_was)  # noqa: S202 - it checks each member
        except (OSError, tarfile.TarError) as error:
            raise SandboxFailed(f"files could not be laid out: {error}") from None

    def get(self, path: str, most_bytes: int) -> bytes | None:
        parts = self._own(path).relative_to(self._path).parts
        self._opened()
        folder_at = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for part in parts[:-1]:  # no link is followed, wherever in the path it is
                inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder_at)
                os.close(folder_at)
                folder_at = inner
            file = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder_at)
            with os.fdopen(file, "rb") as opened:
                return opened.read(most_bytes) if stat.S_ISREG(os.fstat(opened.fileno()).st_mode) else None
        except OSError:
            return None
        finally:
            os.close(folder_at)

    def snapshot(self, folders: Sequence[str], most_bytes: int) -> bytes | None:
        names = [str(self._own(one).relative_to(self._path)) for one in folders]
        held = folder.packed(self._path, names, most_bytes)
        return None if held is None else json.dumps({"root": self.root}).encode() + b"\n" + held

    def restore(self, state: bytes) -> None:
        about, _, held = state.partition(b"\n")
        try:
            folder.unpack(held, self._path, json.loads(about)["root"])
        except (OSError, ValueError, TypeError, KeyError, tarfile.TarError, zlib.error) as error:
            raise SandboxFailed(f"the snapshot could not be set up: {error}") from None

    def close(self) -> None:
        if self._path.exists():
            folder.remove(self._path)

    def _own(self, path: str) -> Path:
        given = Path(os.path.normpath(path))
        if not given.is_relative_to(self._path) or given == self._path:
            raise SandboxFailed(f"{path} does not lie in the sandbox")
        return given

    def _opened(self) -> list[Path]:
        """Its folders, whatever a command has done to their modes."""
        if not self._path.is_dir():
            raise SandboxFailed("the sandbox is closed")
        self._path.chmod(_OPEN)
        folders = [one for one in self._path.iterdir() if one.is_dir() and not one.is_symlink()]
        for one in folders:
            one.chmod(_OPEN)
        return folders


def _clear(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        folder.remove(path)
    else:
        path.unlink(missing_ok=True)
