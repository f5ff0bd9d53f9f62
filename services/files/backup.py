"""Saves the truth of an installation: ``python -m services.files.backup > data.tar.gz``, while everything runs, and
takes it back where there are no jobs: ``--restore < data.tar.gz``.

Rule: an installation can resume from a backup, whatever is written and removed while it is made. Files are written once
and renamed into place, and a directory is read in the order of its names: the logs of a job before its checkpoints,
whose newest one needs no older log, and before the archive, into which logs go meanwhile. Logs up to that checkpoint
which were not there at first are saved after it, so that each step of a job that comes back can be trained again. Files
that appear while a directory is read are saved too, because the files that they replace may vanish before they are
read. A file that vanishes is left out; one that grows is cut at its length when opened. Only plain files are saved and
restored. A backup says which layout it has; one of a later layout is refused.
"""

from __future__ import annotations

import argparse
import os
import sys
import tarfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from gspo_core.log import layout
from gspo_core.position import Position
from services.files.data_dir import LAYOUT, NOT_SAVED, DataDir
from services.files.durable import TEMPORARY_PREFIX
from services.process.settings import SettingsError, load_settings

# Bounds the chase after a writer that is faster than this reader.
MAX_LOOKS = 20
_LAYOUT = "GSPO.layout"


class JobsAreThere(Exception):
    """Two histories do not mix: a backup is restored only where there are no jobs."""


class LaterLayout(Exception):
    """A later release made the backup, and its files have other names."""


def save(data_dir: Path, to: IO[bytes]) -> int:
    """Returns the number of files."""
    count = 0
    with tarfile.open(fileobj=to, mode="w|gz", pax_headers={_LAYOUT: str(LAYOUT)}) as archive:
        for path in plain_files(data_dir, NOT_SAVED):
            count += _add(archive, path, path.relative_to(data_dir))
    return count


def plain_files(directory: Path, without: Collection[str] = (), *, and_linked: bool = False) -> Iterator[Path]:
    """In the order in which they are to be saved. ``and_linked``: and files that links name."""
    yield from _plain_files(directory, {directory: set(without)}, and_linked)


def _plain_files(directory: Path, seen_in: dict[Path, set[str]], and_linked: bool) -> Iterator[Path]:
    """``seen_in``: the names that were looked at, of this directory and those above, and while one is read, of its own
    directories."""
    seen = seen_in.setdefault(directory, set())
    for _ in range(MAX_LOOKS):
        names = sorted(set(_names(directory)) - seen, key=_turn)
        if not names:
            break
        seen.update(names)
        for path in (directory / name for name in names):
            if path.is_symlink() and not (and_linked and path.is_file()):
                continue
            if path.is_dir():
                yield from _plain_files(path, seen_in, and_linked)
            elif path.is_file():
                yield path
    yield from _logs_up_to_checkpoints(directory, seen_in)
    for name in seen:
        seen_in.pop(directory / name, None)


def _logs_up_to_checkpoints(directory: Path, seen_in: Mapping[Path, set[str]]) -> Iterator[Path]:
    """Logs, and a checkpoint after them, may have been written since the logs of a job were looked at.

    A later log could be of an epoch whose record was not saved, so it is left out.
    """
    checkpoints = _positions(seen_in.get(directory / layout.CHECKPOINTS, ()))
    if not checkpoints:
        return
    for name in (layout.BATCHES, layout.ARCHIVE):
        logs = directory / name
        written = _positions(set(_names(logs)) - seen_in.get(logs, set()))
        paths = (logs / layout.step_name(at) for at in written if at <= checkpoints[-1])
        yield from (path for path in paths if path.is_file() and not path.is_symlink())


def _positions(names: Iterable[str]) -> list[Position]:
    """Those that ``names`` name, in order."""
    return sorted(at for at in map(layout.parse_step_name, names) if at is not None)


def _turn(name: str) -> str:
    return layout.BATCHES + "~" if name == layout.ARCHIVE else name


def _names(directory: Path) -> list[str]:
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return [name for name in names if not name.startswith(TEMPORARY_PREFIX)]


def _add(archive: tarfile.TarFile, path: Path, name: Path) -> bool:
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return False
    with file:  # an open file stays readable after its removal
        about = os.fstat(file.fileno())
        member = tarfile.TarInfo(name.as_posix())
        member.size, member.mtime, member.mode = about.st_size, int(about.st_mtime), about.st_mode & 0o777
        archive.addfile(member, file)
    return True


def restore(data_dir: Path, source: IO[bytes]) -> None:
    """Raises ``JobsAreThere``, ``LaterLayout``, or an error of ``tarfile`` for a broken archive."""
    data_dir.mkdir(parents=True, exist_ok=True)
    jobs = DataDir(data_dir).jobs
    if not jobs.is_empty():
        raise JobsAreThere(f"{jobs.path} already holds jobs: restore a backup only where there are none")
    with tarfile.open(fileobj=source, mode="r|gz") as archive:
        made_in = archive.pax_headers.get(_LAYOUT, "1")
        if not made_in.isdecimal() or int(made_in) > LAYOUT:
            raise LaterLayout(
                f"the backup has the layout {made_in}, this release reads up to {LAYOUT}: restore it with the release "
                "that made it"
            )
        archive.extractall(data_dir, filter="data")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m services.files.backup", description="Write a backup of GSPO_DATA_DIR to standard output."
    )
    parser.add_argument("--restore", action="store_true", help="restore it, from standard input")
    given = parser.parse_args(arguments)
    try:
        data_dir = load_settings().data_dir
        if given.restore:
            restore(data_dir, sys.stdin.buffer)
        else:
            print(f"{save(data_dir, sys.stdout.buffer)} files", file=sys.stderr)
    except (JobsAreThere, LaterLayout, SettingsError, OSError, tarfile.TarError) as error:
        print(f"services.files.backup: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
