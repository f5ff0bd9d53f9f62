"""``gspo bundle JOB@STEPS``: one file with what it takes to train these steps again, anywhere."""

from __future__ import annotations

import argparse
from pathlib import Path

from gspo_core.cli.command import CommandError
from gspo_core.replay.bundle import write_bundle
from gspo_core.replay.command import folder_of, parse_where
from gspo_core.replay.past import Past, PastError


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("where", metavar="JOB@STEPS", help="a job's id or directory, and a step or FIRST-LAST")
    parser.add_argument("--to", type=Path, required=True, help="the file to write; it must not exist")
    parser.add_argument("--model", type=Path, help="where the base model lies (default: where the job says)")
    parser.add_argument("--data-dir", help="where jobs are kept (default: $GSPO_DATA_DIR or .gspo)")


def run(arguments: argparse.Namespace) -> int:
    job, first, last = parse_where(arguments.where)
    folder = folder_of(job, arguments.data_dir)
    try:
        manifest = write_bundle(Past(folder, arguments.model), folder.name, first, last, arguments.to)
    except FileExistsError as error:
        raise CommandError(f"{arguments.to} is there already") from error
    except BlockingIOError as error:
        raise CommandError(f"{arguments.to} is being written by another process") from error
    except (PastError, OSError) as error:
        raise CommandError(str(error)) from error
    size = arguments.to.stat().st_size
    print(f"{arguments.to}: {len(manifest['files'])} files, {size} bytes; the base model is named, not carried")
    return 0
