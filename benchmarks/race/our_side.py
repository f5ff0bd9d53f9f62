"""Our side of the race: the whole stack with the demo's job, on the cores that this process may use.

    python -m benchmarks.race.our_side MODEL SPEC OUT

It writes ``timeline.jsonl``: when the weights after each step were published, which is part of what is timed.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from examples.demo.demo import NO_KEYS, while_alive
from gspo_core.cli.watch import WatchedJob
from gspo_core.client import Client
from gspo_core.spec_file import load_job_spec
from services.files.data_dir import DataDir
from services.files.job_dir import JobDir
from services.files.weights import MANIFEST_NAME, WeightStore
from services.launch.stack import Stack, StackConfig, StackError


def main(model: Path, spec_file: Path, out: Path) -> None:
    spec = load_job_spec(spec_file)
    started = time.time()
    with Stack(StackConfig(out, model, port=0, environment=NO_KEYS)) as stack, Client(stack.api_url) as client:
        submitted = time.time()
        view = WatchedJob(client.create_job(spec)["id"], spec.steps)
        for event in while_alive(stack, client.events(view.job_id, after="0")):
            view.take(event.type, event.data)
        if view.status != "succeeded":
            raise StackError(f"the job {view.status}: {view.reason or 'see the logs'} ({stack.log_dir})")
    records = published(DataDir(out).jobs.job(view.job_id))
    for record in records:
        record |= {"not_counted_s": 0.0, "stack_started": started, "submitted": submitted}
    (out / "timeline.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def published(job: JobDir) -> list[dict[str, Any]]:
    """The first version of each step, and when its last file was complete."""
    found: dict[int, dict[str, Any]] = {}
    weights = WeightStore(job)
    for manifest in (weights.path(version) / MANIFEST_NAME for version in weights.versions()):
        step = int(json.loads(manifest.read_text())["step"])
        record = {"step": step, "at": manifest.stat().st_mtime, "weights": str(manifest.parent)}
        if step not in found or record["at"] < found[step]["at"]:
            found[step] = record
    return [found[step] for step in sorted(found)]


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
