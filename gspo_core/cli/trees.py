"""Where an installation from wheels keeps packages whose names are too common for site-packages.

``services``, ``environments`` and ``examples`` would collide silently in site-packages. Wheels hold them in folders
named ``tree``, which only this command searches, and the processes that it starts. A checkout has no such folder.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import gspo_core
from gspo_core.cli.command import CommandError

TREE = "tree"
SERVICE = "gspo_service"
_PACKAGE = Path(gspo_core.__file__).parent


def search_trees() -> None:
    """Before everything else that is installed. Raises CommandError."""
    trees = _trees()
    sys.path[:0] = trees
    if trees:
        given = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = os.pathsep.join([*trees, given] if given else trees)


def _trees() -> list[str]:
    own = _PACKAGE / TREE
    if not own.is_dir():  # a checkout, whatever else is installed
        return []
    spec = find_spec(SERVICE)
    if spec is None or spec.origin is None:
        return [str(own)]
    version = import_module(SERVICE).__version__
    if version != gspo_core.__version__:
        raise CommandError(
            f"gspo {gspo_core.__version__} and gspo-service {version} are installed; install both of one version"
        )
    return [str(Path(spec.origin).parent / TREE)]
