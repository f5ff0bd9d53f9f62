"""A folder as one package to upload: the same content gives the same bytes, on every machine and at every hour.

Rule: names in order, no times, no owners, nothing compressed (compressors differ). What is hidden or made by Python
itself stays out; a link would lead elsewhere and is refused. It reads and sends nothing else.
"""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

# What the service takes.
MAX_BYTES = 10 << 20
MAX_FILES = 2000
_EPOCH = (1980, 1, 1, 0, 0, 0)
_MADE = "__pycache__"


class FolderRefused(ValueError):
    """This folder cannot be packed, and why."""


def pack_folder(folder: Path) -> bytes:
    """A zip archive. Raises FolderRefused, OSError."""
    if not folder.is_dir():
        raise FolderRefused(f"{folder} is not a folder")
    names = _names(folder)
    if not names:
        raise FolderRefused(f"{folder} holds no file")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        for name in names:
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.create_system, entry.external_attr = 3, 0o100644 << 16
            archive.writestr(entry, (folder / name).read_bytes())
            if packed.tell() > MAX_BYTES:
                raise FolderRefused(f"{folder} is larger than the {MAX_BYTES >> 20} MiB that can be uploaded")
    return packed.getvalue()


def _names(folder: Path) -> list[str]:
    found: list[str] = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name != _MADE]
        for name in (*folders, *files):
            if (Path(place) / name).is_symlink():
                raise FolderRefused(f"{Path(place) / name} is a symbolic link; put the file itself there")
        wanted = (name for name in files if not name.startswith(".") and not name.endswith(".pyc"))
        found += [(Path(place) / name).relative_to(folder).as_posix() for name in wanted]
        if len(found) > MAX_FILES:
            raise FolderRefused(f"{folder} holds more than {MAX_FILES} files")
    return sorted(found)
