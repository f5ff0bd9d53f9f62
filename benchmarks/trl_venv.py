"""TRL in a virtual environment of its own, which sees the packages of this one: the same torch and transformers."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

TRL = "trl==1.16.0"
_BESIDE_IT = (
    *("datasets==5.2.0", "pyarrow==26.0.1", "pandas==3.1.1"),
    *("dill==0.4.1", "multiprocess==0.70.19", "xxhash==4.1.0"),
)


class NoTRL(Exception):
    """TRL's environment cannot be made; the message says what to do."""


def make_trl_environment(directory: Path) -> Path:
    """Its interpreter. What is there already is used; what is missing is installed."""
    python = directory / "bin" / "python"
    if not python.exists():
        venv.create(directory, with_pip=True)
    packages = directory / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (packages / "host.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    if _has(python, TRL):
        return python
    done = subprocess.run([str(python), "-m", "pip", "install", "--quiet", TRL, *_BESIDE_IT])
    if done.returncode or not _has(python, TRL):
        raise NoTRL(
            f"pip could not install {TRL} into {directory} (see above). It needs a package index; where there is none, "
            f"install {TRL} and {', '.join(_BESIDE_IT)} there by hand and run this again."
        )
    return python


def _has(python: Path, requirement: str) -> bool:
    name, _, version = requirement.partition("==")
    script = f"import importlib.metadata as m; raise SystemExit(m.version({name!r}) != {version!r})"
    return subprocess.run([str(python), "-c", script], stderr=subprocess.DEVNULL).returncode == 0
