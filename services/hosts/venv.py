"""The interpreter that an environment runs under: ours, or that of a virtual environment with its requirements.

Rule: an environment declares its requirements in its own file, as inline script metadata (PEP 723), and is never
imported to find them. Requirements pinned to what is installed here need no virtual environment. Installing runs code
from elsewhere: it happens only if the operator allows it, once for each set of requirements, wholly or not at all.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import hashlib
import importlib.machinery
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gspo_core.environment_contract import InvalidEnvironment

_BLOCK = re.compile(r"^# /// script\s*$\n(?P<lines>(?:^#(?: .*)?$\n)+?)^# ///\s*$", re.MULTILINE)
_PIN = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?==([^;,\s]+)$")
_DONE = "gspo-installed"
TAIL_CHARS = 600


@dataclass(frozen=True, slots=True)
class Interpreters:
    """Finds the interpreter for an environment; keeps virtual environments below ``directory``."""

    directory: Path
    may_install: bool = False

    async def for_environment(self, ref: str) -> str:
        """Raises ``InvalidEnvironment`` if there is none."""
        return await asyncio.to_thread(self.find, ref)

    def find(self, ref: str) -> str:
        requirements = requirements_of(ref)
        if all(is_installed(requirement) for requirement in requirements):
            return sys.executable
        venv = self.directory / hashlib.sha256("\n".join((sys.version, *requirements)).encode()).hexdigest()[:16]
        if not (venv / _DONE).exists():
            if not self.may_install:
                raise InvalidEnvironment(
                    f"{ref} needs {', '.join(requirements)}, which is not installed here. Set GSPO_ENV_INSTALL=true to "
                    f"let its host install it, or run: python -m services.hosts.venv {self.directory} {ref}"
                )
            _make(venv, requirements)
        return str(venv / "bin" / "python")


def requirements_of(ref: str) -> tuple[str, ...]:
    """The requirements in the file of ``ref``, in order; none if it declares none or cannot be found."""
    path = _file_of(ref.rpartition(":")[0])
    if path is None:
        return ()
    block = _BLOCK.search(path.read_text(encoding="utf-8") + "\n")
    if block is None:
        return ()
    text = "\n".join(line[2:] for line in block["lines"].splitlines())
    try:
        wanted = tomllib.loads(text).get("dependencies", [])
    except tomllib.TOMLDecodeError as error:
        raise InvalidEnvironment(f"{path}: its block `# /// script` is not TOML: {error}") from None
    if not isinstance(wanted, list) or not all(isinstance(one, str) and not one.startswith("-") for one in wanted):
        raise InvalidEnvironment(f"{path}: dependencies in its block `# /// script` must be a list of requirements")
    return tuple(wanted)


def is_installed(requirement: str) -> bool:
    """Whether it is pinned to the version that is installed here."""
    pin = _PIN.match(requirement)
    if pin is None:
        return False
    try:
        return importlib.metadata.version(pin[1]) == pin[2]
    except importlib.metadata.PackageNotFoundError:
        return False


def _file_of(module: str) -> Path | None:
    if module.endswith(".py"):
        return Path(module) if Path(module).is_file() else None
    found, search = None, sys.path
    # One part at a time: for a dotted name a folder without __init__.py wants its parents imported.
    for part in module.split("."):
        found = importlib.machinery.PathFinder.find_spec(part, search)
        if found is None:
            return None
        search = list(found.submodule_search_locations or ())
    path = Path(found.origin) if found is not None and found.origin else None
    return path if path is not None and path.suffix == ".py" else None


def _make(venv: Path, requirements: Sequence[str]) -> None:
    venv.parent.mkdir(parents=True, exist_ok=True)
    with venv.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (venv / _DONE).exists():
            return
        shutil.rmtree(venv, ignore_errors=True)
        _run(sys.executable, "-m", "venv", "--without-pip", str(venv))
        pip = (sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python"))
        _run(*pip, "install", "--quiet", "--disable-pip-version-check", "--no-input", *requirements)
        (venv / _DONE).write_text("\n".join(requirements))


def _run(*program: str) -> None:
    done = subprocess.run(program, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InvalidEnvironment(f"installing the requirements failed: {done.stderr.strip()[-TAIL_CHARS:]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m services.hosts.venv", description="Install the requirements of environments."
    )
    parser.add_argument("directory", type=Path, help="target directory: DATA_DIR/venvs of the installation")
    parser.add_argument("ref", nargs="+", help="package.module:Class or path/to/file.py:Class")
    arguments = parser.parse_args()
    for ref in arguments.ref:
        print(ref, Interpreters(arguments.directory, may_install=True).find(ref))


if __name__ == "__main__":
    main()
