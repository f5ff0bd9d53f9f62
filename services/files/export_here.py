"""``python -m services.files.export_here JOB[@STEP]``: an export that is made where this is typed, as ``gspo export``
has the API make one.

For an API without torch, as in containers: where a trainer runs are torch, the job's model and the data directory. What
is written lies where the API looks, which calls it ready from then on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

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
    where = parser.parse_args(arguments).where
    try:
        name, _, step = where.partition("@")
        job = DataDir(load_settings().data_dir).jobs.job(name)
        at = _chosen(job, step)
        target = job.export(at)
        if not target.is_dir():
            print(f"exporting the checkpoint of step {at.step} ...", file=sys.stderr, flush=True)
            export_checkpoint(job, at.epoch, at.step, target)
    except (ExportFailed, SettingsError, OSError) as error:
        print(f"services.files.export_here: {error}", file=sys.stderr)
        return 1
    print(target)
    return 0


def _chosen(job: JobDir, step: str) -> Position:
    """The newest one, or the newest of that step. Raises ExportFailed."""
    kept = CheckpointStore(job).positions()
    found = [one for one in kept if not step or str(one.step) == step]
    if not found:
        steps = ", ".join(str(one.step) for one in kept) or "none"
        raise ExportFailed(f"no such checkpoint of {job.id} is kept; kept: {steps}")
    return found[-1]


if __name__ == "__main__":
    sys.exit(main())
