"""What a sandbox is, wherever it stands: commands with deadlines, files in and out, a snapshot, an end.

Rule: paths are absolute and lie below ``root``, which is the container's own where it has one. What its machine refuses
is ``SandboxFailed``, never the failure of a command. No process of a command outlives it. When its owner closes it or
dies, nothing of a sandbox is left.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class SandboxFailed(Exception):
    """The machine could not do what was asked."""


@dataclass(frozen=True)
class Ended:
    """How a command ended, and its output."""

    status: int
    timed_out: bool
    seconds: float
    output: str


@dataclass(frozen=True)
class Command:
    """Lines for bash. ``variables`` come on top of ``PATH``, ``HOME``, ``TMPDIR`` and ``LANG``."""

    text: str
    directory: str
    home: str
    scratch: str
    variables: Mapping[str, str]
    timeout_s: float
    most_bytes: int


@dataclass(frozen=True)
class File:
    """One to be laid out; a folder has no ``data``."""

    path: str
    data: bytes | None = None
    mode: int = 0o755


class Sandbox(Protocol):
    """Belongs to one episode. Every method raises ``SandboxFailed``."""

    root: str

    def run(self, command: Command) -> Ended: ...

    def put(self, archive: bytes, instead_of: Sequence[str] = ()) -> None:
        """Unpacks a tar archive below ``root``, once the paths ``instead_of`` and all below them are gone."""
        ...

    def get(self, path: str, most_bytes: int) -> bytes | None:
        """The beginning of a file. None where no regular file is, and no link leads to it."""
        ...

    def snapshot(self, folders: Sequence[str], most_bytes: int) -> bytes | None:
        """None where they hold more, or what cannot be kept."""
        ...

    def restore(self, state: bytes) -> None:
        """In a sandbox that is new."""
        ...

    def close(self) -> None:
        """It may be called again."""
        ...


class Sandboxes(Protocol):
    """Makes sandboxes of one kind."""

    def refusal(self) -> str | None:
        """Why this machine offers none; None if it does."""
        ...

    def create(self, base: str = "") -> Sandbox:
        """``base`` names what it begins with, such as an image; empty: the kind's own. Raises ``SandboxFailed``."""
        ...


def archive(files: Iterable[File]) -> bytes:
    """For ``Sandbox.put``; folders before what lies in them."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w", format=tarfile.PAX_FORMAT) as made:
        for file in files:
            member = tarfile.TarInfo(file.path.lstrip("/"))
            member.mode, member.size = file.mode, len(file.data or b"")
            member.type = tarfile.DIRTYPE if file.data is None else tarfile.REGTYPE
            made.addfile(member, io.BytesIO(file.data or b""))
    return held.getvalue()
