"""``gspo snapshot``: the data directory into a bucket while everything runs, and back, whole or single jobs.

Manifests start it as ``python -m services.launch.snapshot``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from pathlib import Path

from gspo_core.cli.command import CommandError
from services.files import snapshots
from services.files.backup import JobsAreThere, LaterLayout
from services.files.bucket import Bucket, BucketRefused
from services.files.continuous_snapshots import ContinuousSnapshots, OtherFollower, OtherInstallation, Round
from services.process.health import Health
from services.process.lifecycle import run_until_signalled
from services.process.settings import SettingsError, load_settings
from services.process.telemetry import configure_logging

EVERY_S = 60.0
# A round that is under way when it is told to stop; a second signal gives it up.
GRACE_S = 3600.0


def add_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True, dest="action")
    save = actions.add_parser("save", help="save what is new; a job that runs is saved so that it can go on")
    listing = actions.add_parser("list", help="the snapshots in a bucket")
    restore = actions.add_parser("restore", help="bring a snapshot back where there are no jobs, or single jobs of it")
    pruning = actions.add_parser("prune", help="remove old snapshots, and what only they needed")
    for action in (save, listing, restore, pruning):
        action.add_argument("bucket", help="s3://BUCKET/PATH, gs://..., az://... or file:///FOLDER")
    for action in (save, restore):
        action.add_argument("--data-dir", help="the data directory (default: $GSPO_DATA_DIR or .gspo)")
    save.add_argument("--follow", action="store_true", help="go on saving what is new, until told to stop")
    save.add_argument(
        "--every", type=float, metavar="SECONDS", help=f"with --follow: wait between rounds (default: {EVERY_S:.0f})"
    )
    save.add_argument(
        "--keep", type=int, help="with --follow: once an hour, remove all but so many snapshots (default: keep all)"
    )
    restore.add_argument("--snapshot", help="its name (default: the newest)")
    restore.add_argument("--job", action="append", help="only this job; may be given several times")
    restore.add_argument(
        "--models", action="store_true", help="write models that lay outside the data directory where they were"
    )
    pruning.add_argument("--keep", type=int, required=True, help="how many snapshots stay")


def run(arguments: argparse.Namespace) -> int:
    try:
        bucket = Bucket.at(arguments.bucket)
        return {"save": _save, "list": _list, "restore": _restore, "prune": _prune}[arguments.action](bucket, arguments)
    except (
        BucketRefused,
        JobsAreThere,
        LaterLayout,
        snapshots.RestoreConflict,
        snapshots.SnapshotDamaged,
        snapshots.GivenUp,
        OtherFollower,
        OtherInstallation,
        SettingsError,
        OSError,
    ) as error:
        raise CommandError(str(error)) from error


def _save(bucket: Bucket, arguments: argparse.Namespace) -> int:
    data_dir = _data_dir(arguments)
    if not data_dir.is_dir():
        raise CommandError(f"{data_dir} is no data directory")
    if arguments.follow:
        return _follow(ContinuousSnapshots(data_dir, bucket, arguments.keep), arguments)
    if arguments.every is not None or arguments.keep is not None:
        raise CommandError("--every and --keep belong to --follow")
    tally = snapshots.Tally()
    print(_said(snapshots.save(data_dir, bucket, tally), tally))
    return 0


def _follow(saving: ContinuousSnapshots, arguments: argparse.Namespace) -> int:
    every_s = EVERY_S if arguments.every is None else arguments.every
    if every_s < 0 or (arguments.keep is not None and arguments.keep < 1):
        raise CommandError("--every: at least 0; --keep: at least 1")
    settings = load_settings(is_typed=True)
    configure_logging("snapshot", level=settings.log_level, log_format=settings.log_format)
    return run_until_signalled(lambda stop: _rounds(saving, every_s, stop, settings.health_file), grace_s=GRACE_S)


async def _rounds(saving: ContinuousSnapshots, every_s: float, stop: asyncio.Event, health_file: Path | None) -> None:
    """The first one has to succeed; afterwards a store that is away is waited for."""
    has_saved = False
    async with Health(health_file, stop) as health:
        while not stop.is_set():
            try:
                if (done := await asyncio.to_thread(saving.round)) is not None:
                    print(_said_of(done), flush=True)
                has_saved = health.is_ready = True
            except asyncio.CancelledError:
                saving.give_up()
                raise
            except (BucketRefused, OSError) as error:
                if not has_saved:
                    raise
                health.is_ready = False
                print(f"{error}; again in {every_s:g} s", file=sys.stderr, flush=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    await stop.wait()


def _said_of(done: Round) -> str:
    return f"{_said(done.snapshot, done.tally)}; {done.took_s:.1f} s"


def _said(made: snapshots.InstallationSnapshot, tally: snapshots.Tally) -> str:
    new = f"new: {tally.num_files} files, {_size(tally.num_bytes)}"
    return f"{made.name}: {len(made.jobs)} job(s), {_size(made.size_bytes)}; {new}"


def _list(bucket: Bucket, arguments: argparse.Namespace) -> int:
    for name in snapshots.names(bucket):
        one = snapshots.read(bucket, name)
        jobs = " ".join(one.jobs) or "no job"
        print(f"{name}  {one.made_at}  release {one.release}  {_size(one.size_bytes)}  {jobs}")
    return 0


def _restore(bucket: Bucket, arguments: argparse.Namespace) -> int:
    found = snapshots.names(bucket)
    if not found:
        raise CommandError(f"{bucket.address} holds no snapshot")
    if arguments.snapshot and arguments.snapshot not in found:
        raise CommandError(f"{bucket.address} holds no snapshot {arguments.snapshot}; the newest is {found[-1]}")
    snapshot = snapshots.read(bucket, arguments.snapshot or found[-1])
    tally = snapshots.Tally()
    snapshots.restore(_data_dir(arguments), bucket, snapshot, tally, arguments.job, with_models=arguments.models)
    print(f"{snapshot.name} is back: {tally.num_files} files, {_size(tally.num_bytes)}")
    for directory, files in snapshot.models.items():
        if not all((Path(directory) / name).is_file() for name in files):
            print(f"Jobs need the model {directory}, which is not there: --models brings it, or put it there.")
    if arguments.job:
        print("An API or a trainer that starts from now on takes the job up; restart one that runs.")
    return 0


def _prune(bucket: Bucket, arguments: argparse.Namespace) -> int:
    if arguments.keep < 1:
        raise CommandError("--keep: at least 1")
    tally = snapshots.prune(bucket, arguments.keep)
    print(f"removed {tally.num_files} objects, {_size(tally.num_bytes)}")
    return 0


def _data_dir(arguments: argparse.Namespace) -> Path:
    return Path(arguments.data_dir or os.environ.get("GSPO_DATA_DIR", ".gspo")).resolve()


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m services.launch.snapshot", description=__doc__)
    add_options(parser)
    try:
        return run(parser.parse_args())
    except CommandError as error:
        print(f"services.launch.snapshot: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
