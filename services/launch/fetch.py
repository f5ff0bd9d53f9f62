"""``gspo fetch``: a model or a data set of the Hugging Face hub, into the data directory or a directory of its own.

Rule: whoever types it has allowed the download, so it asks no setting. It starts no process of the service.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from gspo_core.cli.command import CommandError
from services.files.data_dir import DataDir, HubKind, HubName
from services.files.disk_space import NoRoom
from services.files.durable import whole_directory
from services.files.hub import NotFetched, fetch


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="OWNER/NAME, or OWNER/NAME@REVISION for a branch, a tag or a commit")
    parser.add_argument("--dataset", action="store_true", help="it is a data set")
    parser.add_argument("--to", help="a new directory to copy it to")
    parser.add_argument("--data-dir", help="where it is kept (default: $GSPO_DATA_DIR or .gspo)")


def run(arguments: argparse.Namespace) -> int:
    name = HubName.parse(arguments.name)
    if name is None:
        raise CommandError(f"{arguments.name} is no name of the hub: OWNER/NAME, or OWNER/NAME@REVISION")
    root = Path(arguments.data_dir or os.environ.get("GSPO_DATA_DIR", ".gspo")).resolve()
    if arguments.to and Path(arguments.to).exists():
        raise CommandError(f"{arguments.to} is there already")
    print(f"fetching {name} ...", file=sys.stderr, flush=True)
    try:
        found = fetch(DataDir(root).hub, HubKind.DATASET if arguments.dataset else HubKind.MODEL, name)
        if arguments.to:
            found = _copied(found, Path(arguments.to).absolute())
    except (NotFetched, NoRoom) as error:
        raise CommandError(str(error)) from error
    print(found)
    return 0


def _copied(source: Path, target: Path) -> Path:
    with whole_directory(target) as directory:
        shutil.copytree(source, directory, dirs_exist_ok=True)
    return target
