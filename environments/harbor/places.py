"""Harbor's absolute paths in the sandbox of one episode: ``/app`` (or whatever WORKDIR says), ``/tests``, ``/logs`` ...

Rule: in a sandbox with a root of its own they are what they say. Elsewhere nothing may be mounted, so there is no
second ``/app``: in texts on their way in (commands, scripts, files) such a path becomes the real one, on their way out
the real one becomes such a path. What is no text, and a path that a program puts together from parts, stays as it is.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from environments.sandbox.contract import File

TESTS, SOLUTION, LOGS, HOME, TMP = "/tests", "/solution", "/logs", "/root", "/tmp"  # noqa: S108 - names in texts
_FOLDERS = {TESTS: "tests", SOLUTION: "solution", LOGS: "logs", HOME: "home", TMP: "tmp"}
WORK = "app"
_USUAL = frozenset({HOME, TMP})
# A working directory there would hide what commands need.
_SYSTEM = ("bin", "dev", "etc", "lib", "lib64", "proc", "sbin", "sys", "usr")
_TAKEN = frozenset({*_SYSTEM, "tests", "solution", "logs", "tmp"})


class Places:
    """The folders of one episode."""

    def __init__(self, root: Path, workdir: str) -> None:
        self.root = root
        self._is_own = root == Path("/")
        given = {**_FOLDERS, workdir: WORK}
        self._real = {name: name if self._is_own else str(root / folder) for name, folder in given.items()}
        names = "|".join(re.escape(name) for name in sorted(self._real, key=len, reverse=True))
        # A whole path only: neither `web/app` nor `/app.py` nor `/application` is meant.
        self._named = re.compile(rf"(?<![\w.$}}~/-])(?:{names})(?![\w-]|\.\w)")
        self._outward = sorted(self._real.items(), key=lambda pair: len(pair[1]), reverse=True)

    @property
    def new(self) -> Sequence[str]:
        """The folders that an episode begins with, beside those that an own root has."""
        return [path for name, path in self._real.items() if name != TESTS and not (self._is_own and name in _USUAL)]

    @property
    def kept(self) -> Sequence[str]:
        """The folders that are its state."""
        return [path for name, path in self._real.items() if name != TESTS]

    def inward(self, text: str) -> str:
        return self._named.sub(lambda found: self._real[found[0]], text)

    def outward(self, text: str) -> str:
        if self._is_own:
            return text
        for name, real in self._outward:
            text = re.sub(rf"{re.escape(real)}(?![\w-])", name, text)
        return text.replace(f"{self.root}/", "/").replace(str(self.root), "/")

    def real(self, path: str) -> Path:
        """Raises ``KeyError`` where it is in none of the places."""
        given = PurePosixPath(path)
        for name in sorted(self._real, key=len, reverse=True):
            if given.is_relative_to(name):
                return Path(self._real[name]) / given.relative_to(name)
        raise KeyError(path)

    def laid_out(self, source: Path, target: Path) -> File:
        """One file, to lie at the real path ``target``; a text with its paths replaced."""
        place = str(target.relative_to(self.root))
        if source.is_dir():
            return File(place)
        data = source.read_bytes()
        with contextlib.suppress(UnicodeDecodeError):
            data = self.inward(data.decode()).encode()
        return File(place, data, source.stat().st_mode & 0o777)


def is_usable(workdir: str) -> bool:
    """As a working directory."""
    parts = PurePosixPath(workdir).parts
    return len(parts) > 1 and workdir not in _FOLDERS and parts[1] not in _TAKEN
