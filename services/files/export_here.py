"""``python -m services.files.export_here JOB[@STEP]``: an export that is made where this is typed, as ``gspo export``
has the API make one.

For an API without torch, as in containers: where a trainer runs are torch, the job's model and the data directory. What
is written lies where the API looks, which calls it ready from then on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from gspo_core.position import Position
from services.files.checkpoints import CheckpointStore
from services.files.data_dir import DataDir
from services.files.export import ExportFailed, export_checkpoint
from services.files.job_dir import JobDir
from services.process.settings import SettingsError, load_settings


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m services.files.export_here", description="Write a checkpoint as a model directory; print where."
    )
    parser.add_argument("where", metavar="JOB[@STEP]", help="a job, and a step with a checkpoint (default: its newest)")
    try:
        print(_exported(load_settings(is_typed=True).data_dir, parser.parse_args(arguments).where))
    except (ExportFailed, SettingsError, OSError) as error:
        print(f"services.files.export_here: {error}", file=sys.stderr)
        return 1
    return 0


def _exported(data_dir: Path, where: str) -> Path:
    name, is_given, step = where.partition("@")
    if is_given and not step.isdecimal():
        raise ExportFailed(f"{where}: write JOB or JOB@STEP")
    job = DataDir(data_dir).jobs.accepted().get(name)
    if job is None:
        raise ExportFailed(f"there is no job {name} in {data_dir}")
    at = _chosen(job, int(step) if is_given else None)
    target = job.export(at)
    if not target.is_dir():
        print(f"exporting the checkpoint of step {at.step} ...", file=sys.stderr, flush=True)
        try:
            export_checkpoint(job, at.epoch, at.step, target)
        except ExportFailed:
            if not target.is_dir():  # else somebody was faster
                raise
    return target


def _chosen(job: JobDir, step: int | None) -> Position:
    """As the API chooses: the newest one, or of that step, that the job did not leave when it went back."""
    store = CheckpointStore(job)
    kept = store.positions()
    history = store.of_the_history(kept)
    found = [one for one in kept if step in (None, one.step)]
    if not found:
        steps = ", ".join(str(one.step) for one in kept) or "none"
        raise ExportFailed(f"no such checkpoint of {job.id} is kept; kept: {steps}")
    return max(found, key=lambda at: (at in history, at))


if __name__ == "__main__":
    sys.exit(main())
