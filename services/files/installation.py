"""Files in a data directory that say which installation it belongs to, and which Redis serves it now.

Rule: the id is written once and stays, also in a backup. The server of the directory is named again and again, so that
another one can tell whether it is gone or at work. It decides nothing.

    installation.json   served.json
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass
from uuid import uuid4

from services.files.data_dir import DataDir
from services.files.durable import make_directory, temporary_name, write_once


@dataclass(frozen=True, slots=True)
class Served:
    token: str
    """Names the Redis that serves the directory."""
    sign: str
    """New at every sign of life."""
    age_s: float
    """By this machine's clock."""


class InstallationFiles:
    def __init__(self, data_dir: DataDir) -> None:
        self._data_dir = data_dir

    def id(self) -> str | None:
        """None of a directory that never had one."""
        try:
            return str(json.loads(self._data_dir.installation.read_bytes())["id"])
        except FileNotFoundError:
            return None

    def begin(self, wanted: str) -> str:
        """Give the directory an id, unless it has one; the id that it has."""
        make_directory(self._data_dir.path)
        with contextlib.suppress(FileExistsError):
            write_once(self._data_dir.installation, [json.dumps({"id": wanted}).encode()])
        found = self.id()
        assert found is not None, "an id is never removed"
        return found

    def served(self) -> Served | None:
        path = self._data_dir.served
        try:
            record = json.loads(path.read_bytes())
            return Served(record["token"], record["sign"], time.time() - path.stat().st_mtime)
        except (FileNotFoundError, ValueError, KeyError):
            return None

    def say_served(self, token: str) -> None:
        path = self._data_dir.served
        temporary = path.with_name(temporary_name())
        temporary.write_text(json.dumps({"token": token, "sign": uuid4().hex}))
        os.replace(temporary, path)
