"""What is visible behind a wall: the system's programs, the interpreter, code, and what the operator adds.

Rule: a list of what is shown. Of a folder of code, names that begin with a dot stay hidden (``.env``, ``.git``), at
whatever depth, and so do the places that hold what is ours. A folder that is everyone's (a home, ``/tmp``, the root) is
never shown whole: of an environment there, only its file is.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.hosts.walls.terms import Entry, How

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = ("alternatives", "ca-certificates", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types")
_ETC_TOO = ("nsswitch.conf", "pki", "protocols", "services", "ssl", "timezone")
# With the network only.
_NAMES = ("/etc/hosts", "/etc/resolv.conf")
# A folder with more hidden names is a home folder, whatever its name.
_MOST_HIDDEN = 500
# How many folders of a tree are looked into: at each start of a host, perhaps on a file system that is slow.
_MOST_FOLDERS = 2000
# Others' code, much of it, and no place for secrets.
_OTHERS = frozenset({"__pycache__", "node_modules", "site-packages"})


@dataclass(frozen=True)
class Shown:
    """What code needs to see."""

    python: str
    code: Sequence[str] = ()
    """Folders on its search path."""
    files: Sequence[str] = ()
    """Files of code that are named by their path."""
    readable: Sequence[str] = ()
    writable: Sequence[str] = ()
    hidden: Sequence[str] = ()
    network: bool = False


def entries(shown: Shown) -> list[Entry]:
    """In the order in which they are laid over each other: what lies deeper comes later."""
    code = [folder for folder in _code_folders(shown) if not _is_everyones(folder)]
    found: dict[str, How] = {}
    for path in _existing(_system(shown.network)):
        found[path] = How.LINK if path in _SYSTEM and os.path.islink(path) else How.SYSTEM
    for path in _existing((*_interpreter(shown.python), *code, *shown.files, *shown.readable)):
        found.setdefault(path, How.READ)
    for path in (*_dotted(code), *_existing(shown.hidden)):
        found.setdefault(path, How.EMPTY)
    for path in _existing(shown.writable):
        found[path] = How.WRITE
    laid = _where_links_lead(found)
    return sorted(((how, path) for path, how in laid.items()), key=lambda entry: (entry[1].count("/"), entry[1]))


def _where_links_lead(found: Mapping[str, How]) -> dict[str, How]:
    """Nothing can be laid over a link that a folder shows, such as ``.venv`` in a project: what it leads to is shown
    where that lies, and the link leads there."""
    folders = [path for path, how in found.items() if how not in (How.EMPTY, How.LINK) and os.path.isdir(path)]
    moved = {path: real for path in found if (real := _behind_a_link(path, folders)) is not None}
    kept = {path: how for path, how in found.items() if path not in moved}
    for path, real in moved.items():
        how = found[path]
        if real not in kept or how == How.WRITE or (how != How.EMPTY and kept[real] == How.EMPTY):
            kept[real] = how
    return kept


def _behind_a_link(path: str, folders: Sequence[str]) -> str | None:
    """Where ``path`` lies, if there is a link on the way to it from one of the folders."""
    real = os.path.realpath(path)
    above = (folder for folder in folders if path.startswith(f"{folder}/"))
    behind = any(real != os.path.join(os.path.realpath(folder), os.path.relpath(path, folder)) for folder in above)
    return real if behind else None


def _system(network: bool) -> Iterator[str]:
    yield from _SYSTEM
    yield from (f"/etc/{name}" for name in (*_ETC, *_ETC_TOO))
    if network:
        yield from _NAMES


def _interpreter(python: str) -> Iterator[str]:
    """The folders that it and its standard library lie in."""
    for executable in (Path(python), Path(os.path.realpath(python))):
        prefix = executable.absolute().parent.parent
        if prefix != Path("/"):
            yield str(prefix)
    if os.path.realpath(python) == os.path.realpath(sys.executable):
        yield from (sys.prefix, sys.base_prefix)


def _code_folders(shown: Shown) -> list[str]:
    beside = [str(Path(file).absolute().parent) for file in shown.files]
    return list(dict.fromkeys((*shown.code, *beside, os.getcwd())))


def _is_everyones(folder: str) -> bool:
    """The root, a home, the folder for temporary files, or one that holds such a folder."""
    named = (Path.home(), Path(tempfile.gettempdir()), Path("/root"), Path("/home"), Path("/tmp"))  # noqa: S108
    shared = {Path("/"), *named, *(Path(os.path.realpath(one)) for one in named)}
    # By whichever name: `..` and links lead there, too.
    given = (Path(os.path.abspath(folder)), Path(os.path.realpath(folder)))
    return any(path == one or path in one.parents for path in given for one in shared)


def _dotted(folders: Iterable[str]) -> Iterator[str]:
    for folder in folders:
        yield from itertools.islice(_hidden_below(folder), _MOST_HIDDEN)


def _hidden_below(folder: str) -> Iterator[str]:
    """The nearest come first. A link shows no more than is shown where it leads."""
    ahead, num_looked = deque([folder]), 0
    while ahead and num_looked < _MOST_FOLDERS:
        num_looked += 1
        try:
            found = sorted(os.scandir(ahead.popleft()), key=lambda one: one.name)
        except OSError:
            continue  # nothing is there, or it is unreadable
        own = [one for one in found if not one.is_symlink()]
        yield from (one.path for one in own if one.name.startswith("."))
        ahead += [one.path for one in own if one.is_dir() and not one.name.startswith(".") and one.name not in _OTHERS]


def _existing(paths: Iterable[str]) -> Iterator[str]:
    for path in paths:
        absolute = os.path.abspath(path)
        if os.path.exists(absolute) and absolute != "/":
            yield absolute
