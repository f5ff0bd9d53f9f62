"""``gspo env init NAME``: a folder with an environment (or an agent), its tests, a job and a page, that works at once.

Rule: nothing that is there is overwritten; the folder is made whole or not at all.
"""

from __future__ import annotations

import argparse
import importlib.resources
import keyword
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from string import Template

from gspo_core.cli.command import CommandError

_NAME = re.compile(r"^[a-z][a-z0-9_]*$")
# Their names would hide the modules that the project itself imports.
_TAKEN = {"gspo_core", "httpx", "pydantic", "pytest", "test"} | sys.stdlib_module_names


def init(arguments: argparse.Namespace) -> int:
    name = arguments.name.replace("-", "_")
    folder = Path(arguments.folder or arguments.name)
    _check(arguments.name, name)
    kind = "agent" if arguments.agent else "environment"
    written = write_project(kind, name, folder)
    ref = f"{name}.py:{'run' if arguments.agent else class_name(name)}"
    print(f"made {folder}/ with {', '.join(written)}")
    print(f"next: cd {folder}; pytest; gspo env validate {ref}")
    return 0


def write_project(kind: str, name: str, folder: Path) -> list[str]:
    """The names of its files. Raises ``CommandError``."""
    if os.path.lexists(folder):
        raise CommandError(f"{folder} is there already; nothing was written")
    texts = {
        one.name.removesuffix(".txt").replace("world", name): one.read_text(encoding="utf-8")
        for one in importlib.resources.files("gspo_core.cli").joinpath("projects", kind).iterdir()
    }
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".gspo-init-") as made:
            whole = Path(made) / "project"
            whole.mkdir()
            for file, text in texts.items():
                (whole / file).write_text(Template(text).substitute(name=name, cls=class_name(name)), encoding="utf-8")
            # `replace` would take an empty folder that appeared meanwhile; `move` would go into it.
            if os.path.lexists(folder):
                raise CommandError(f"{folder} is there already; nothing was written")
            shutil.move(whole, folder)
    except OSError as error:
        raise CommandError(f"{folder} cannot be made: {error.strerror or error}") from error
    return sorted(texts)


def class_name(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def _check(given: str, name: str) -> None:
    if not _NAME.match(name) or keyword.iskeyword(name):
        raise CommandError(
            f"{given!r} cannot be the name of a module: lower-case letters, digits, _ and -, a letter first"
        )
    if name in _TAKEN or class_name(name) == "Guess":
        raise CommandError(f"{given!r} would hide a module or class of that name; take another")
