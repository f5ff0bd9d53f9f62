"""Checkpoints in a store of objects: flat names with bytes, no directories, no rename. In memory, for tests."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path

from services.files.checkpoint_storage import Stored, StoredFile


class ObjectStorage:
    """A directory is whole once the object of its name, which lists its files, is there."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._objects: dict[str, bytes] = {}
        self._changed: dict[str, int] = {}
        self._clock = itertools.count(1_000_000_000)

    def names(self) -> list[str]:
        return [name for name in self._objects if "/" not in name]

    def put(self, name: str, epoch: int, fill: Callable[[Path], None]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder, "content")
            root.mkdir()
            fill(root)
            files = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
            for file in files:
                self._store(f"{name}/{file}", (root / file).read_bytes())
        self._store(name, "\n".join(files).encode())

    def fetch(self, name: str) -> Path:
        target = self._scratch / name
        for file in self._files(name):
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            (target / file).write_bytes(self.read(f"{name}/{file}"))
        return target

    def read(self, name: str) -> bytes:
        if name not in self._objects:
            raise FileNotFoundError(2, "no such object", name)
        return self._objects[name]

    def describe(self, name: str) -> Stored:
        listed = self._files(name)
        files = [(file, f"{name}/{file}") for file in listed if f"{name}/{file}" in self._objects]
        found = (StoredFile(file, len(self._objects[key]), self._changed[key]) for file, key in files)
        return Stored(self._changed[name] / 1e9, tuple(found))

    def write_once(self, name: str, data: bytes, epoch: int) -> None:
        if name in self._objects:
            raise FileExistsError(17, "the object is there", name)
        self._store(name, data)

    def remove(self, name: str, epoch: int | None = None) -> None:
        self._objects.pop(name, None)
        for key in [key for key in self._objects if key.startswith(f"{name}/")]:
            del self._objects[key]

    def remove_unfinished(self, epoch: int) -> None:
        whole = set(self.names())
        for key in [key for key in self._objects if "/" in key and key.partition("/")[0] not in whole]:
            del self._objects[key]

    def _files(self, name: str) -> list[str]:
        return self.read(name).decode().splitlines()

    def _store(self, name: str, data: bytes) -> None:
        self._objects[name], self._changed[name] = data, next(self._clock)
