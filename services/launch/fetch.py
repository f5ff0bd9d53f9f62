"""``gspo fetch``: a model or a data set of the Hugging Face hub, into the data directory or a directory of its own,
or one of a bucket or a mounted folder, into a directory of its own.

Rule: whoever types it has allowed the download, so it asks no setting. It starts no process of the service. In a
container, which has no command ``gspo``, it is ``python -m services.launch.fetch``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from gspo_core.cli.command import CommandError
from services.files.bucket import Bucket, BucketRefused
from services.files.bucket_models import fetch_from
from services.files.data_dir import DataDir, HubKind, HubName
from services.files.disk_space import NoRoom
from services.files.durable import whole_directory
from services.files.hub import NotFetched, fetch

NAME_HELP = """OWNER/NAME of the hub, or OWNER/NAME@REVISION for a branch, a tag or a commit; or the folder that
holds it: s3://BUCKET/PATH, gs://..., az://... or file:///FOLDER"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help=NAME_HELP)
    parser.add_argument("--dataset", action="store_true", help="it is a data set")
    parser.add_argument("--to", help="a new directory to copy it to; what comes from a bucket needs one")
    parser.add_argument("--data-dir", help="where it is kept (default: $GSPO_DATA_DIR or .gspo)")


def run(arguments: argparse.Namespace) -> int:
    if arguments.to and Path(arguments.to).exists():
        raise CommandError(f"{arguments.to} is there already")
    kind = HubKind.DATASET if arguments.dataset else HubKind.MODEL
    try:
        print(_from_bucket(arguments, kind) if "://" in arguments.name else _from_hub(arguments, kind))
    except (NotFetched, NoRoom, BucketRefused) as error:
        raise CommandError(str(error)) from error
    return 0


def _from_bucket(arguments: argparse.Namespace, kind: HubKind) -> Path:
    if not arguments.to:
        raise CommandError(
            "--to: what comes from a bucket has no name of its own, so say which directory is to hold it"
        )
    bucket = Bucket.at(arguments.name)
    print(f"fetching {bucket.address} ...", file=sys.stderr, flush=True)
    return fetch_from(bucket, kind, Path(arguments.to).absolute())


def _from_hub(arguments: argparse.Namespace, kind: HubKind) -> Path:
    name = HubName.parse(arguments.name)
    if name is None:
        raise CommandError(f"{arguments.name} is no name of the hub: OWNER/NAME, or OWNER/NAME@REVISION")
    root = Path(arguments.data_dir or os.environ.get("GSPO_DATA_DIR", ".gspo")).resolve()
    print(f"fetching {name} ...", file=sys.stderr, flush=True)
    found = fetch(DataDir(root).hub, kind, name)
    return _copied(found, Path(arguments.to).absolute()) if arguments.to else found


def _copied(source: Path, target: Path) -> Path:
    with whole_directory(target) as directory:
        shutil.copytree(source, directory, dirs_exist_ok=True)
    return target


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m services.launch.fetch", description=__doc__)
    add_options(parser)
    try:
        return run(parser.parse_args())
    except CommandError as error:
        print(f"services.launch.fetch: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
