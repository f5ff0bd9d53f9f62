"""``gspo tables JOB --to DIR``: a job's past as Parquet files."""

from __future__ import annotations

import argparse
from pathlib import Path

from gspo_core.cli.command import CommandError
from gspo_core.cli.terminal import say
from gspo_core.replay.command import folder_of
from gspo_core.replay.past import Past, PastError, kept_range


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write steps, episodes and metrics of a job, and its tokens if asked, as Parquet files."
    parser.add_argument("job", help="a job's id or directory")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="the directory; no file is replaced")
    parser.add_argument("--first", type=int, help="from this step on (default: the first that is kept)")
    parser.add_argument("--last", type=int, help="up to this step (default: the last that is kept)")
    parser.add_argument("--tokens", action="store_true", help="with a row for each token, which are many")
    parser.add_argument("--data-dir", help="where jobs are kept (default: $GSPO_DATA_DIR or .gspo)")


def run(arguments: argparse.Namespace) -> int:
    past = Past(folder_of(arguments.job, arguments.data_dir))
    try:
        from gspo_core.replay.table_files import write_tables

        steps = kept_range(past, arguments.first, arguments.last)
        counts = write_tables(past, steps, arguments.to, tokens=arguments.tokens)
    except ModuleNotFoundError as error:
        raise CommandError(f"Parquet needs {error.name}, which is not installed here: install gspo[parquet]") from error
    except FileExistsError as error:
        raise CommandError(f"{error.filename} is there already") from error
    except (PastError, OSError) as error:
        raise CommandError(str(error)) from error
    say(*(f"{arguments.to / name}.parquet: {count} rows" for name, count in sorted(counts.items())))
    return 0
