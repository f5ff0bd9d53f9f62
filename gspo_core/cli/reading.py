"""``gspo logs``, ``metrics`` and ``export``: what a job has left behind, for people and for programs."""

from __future__ import annotations

import csv
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from gspo_core.api_answers import Checkpoint, CheckpointFile
from gspo_core.cli.command import CommandError
from gspo_core.cli.connection import connected
from gspo_core.cli.terminal import plain, say
from gspo_core.client import Client
from gspo_core.client_checkpoints import OLDER_SERVICE
from gspo_core.client_fetching import ExportIncomplete

POLL_S = 0.5
TOLD_EVERY_S = 5.0
SHOWN = ("reward/mean", "gspo/loss", "staleness/mean", "time/step_s", "throughput/tokens_per_s")
"""Where no names are asked for."""


def logs(url: str, job_id: str, *, as_json: bool) -> int:
    """All that is kept of what happened, once; ``gspo watch`` goes on."""
    from gspo_core.cli.watch import WatchedJob, describe

    with connected(url) as client:
        job = client.job(job_id)
        view = WatchedJob(job_id, job["steps"])
        for event in client.past_events(job_id):
            if as_json:
                print(json.dumps({"id": event["id"], "type": event["type"], **event["data"]}))
                continue
            view.take(event["type"], event["data"])
            if text := describe(view, event["type"]):
                say(f"{event['created_at'][:19].replace('T', ' ')}  {text}")
    return 0


def metrics(url: str, job_id: str, *, names: str | None, last: int | None, form: str) -> int:
    """``form``: ``table``, ``csv`` or ``json``."""
    with connected(url) as client:
        first = max(0, client.job(job_id)["step"] - last + 1) if last is not None else 0
        rows = client.metrics(job_id, first, names=names)
    if not rows:
        print("no step has ended yet", file=sys.stderr)
        return 0
    if form == "json":
        for row in rows:
            print(json.dumps(row))
        return 0
    known = sorted({name for row in rows for name in row} - {"step"})
    asked = [name.strip() for name in names.split(",")] if names else known if form == "csv" else SHOWN
    columns = ["step", *(name for name in asked if name in known)]
    if form == "csv":
        writer = csv.DictWriter(sys.stdout, columns, extrasaction="ignore", restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, "step": int(row["step"])} for row in rows)
        return 0
    say(*_aligned(columns, rows))
    return 0


def _aligned(columns: Sequence[str], rows: Sequence[dict[str, float]]) -> list[str]:
    texts = [[f"{row[name]:.6g}" if name in row else "-" for name in columns] for row in rows]
    widths = [max(len(name), *(len(line[place]) for line in texts)) for place, name in enumerate(columns)]
    lines = [list(columns), *texts]
    return ["  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in lines]


def export(url: str, job_id: str, step: int | None, to: Path | None, *, epoch: int | None = None) -> int:
    """The weights of a checkpoint as a plain model directory; prints where it lies, for the service that wrote it, or
    here where it is fetched. ``epoch``: of the step, where the newest with such a step is not meant."""
    if to is not None and os.path.lexists(to):
        raise CommandError(f"{to} is there already: name a directory that is not")
    with connected(url) as client:
        kept = list(client.checkpoints(job_id))
        if not kept:
            raise CommandError(f"no checkpoint of {job_id} is kept yet")
        found = next((one for one in kept if step in (None, one["step"]) and epoch in (None, one["epoch"])), None)
        if found is None and epoch is not None:
            raise CommandError(f"no checkpoint {job_id}/{epoch}/{step} is kept: there are {_listed(kept, 'id')}")
        if found is None:
            raise CommandError(f"no checkpoint of step {step} is kept: there are those of {_listed(kept, 'step')}")
        if to is not None and "files" not in client.checkpoint(found["id"])["export"]:
            raise CommandError(f"{OLDER_SERVICE}; without --to it is written, and the command says where")
        print(f"exporting the checkpoint of step {found['step']} ...", file=sys.stderr, flush=True)
        client.export_checkpoint(found["id"])
        path = _exported(client, found["id"])
        if to is not None:
            return _fetched(client, found["id"], to)
    print("it lies below the service's data directory:", file=sys.stderr, flush=True)
    print(path)
    return 0


def _listed(kept: Sequence[Checkpoint], what: Literal["id", "step"]) -> str:
    return ", ".join(str(one[what]) for one in kept)


def _fetched(client: Client, checkpoint: str, to: Path) -> int:
    told_at = time.monotonic()

    def told(file: CheckpointFile, done: int) -> None:
        nonlocal told_at
        is_whole = done == file["size_bytes"]
        if is_whole or time.monotonic() - told_at > TOLD_EVERY_S:
            told_at = time.monotonic()
            share = "" if is_whole else f", {done / file['size_bytes']:.0%}"
            print(plain(f"{file['path']}: {done / 2**20:,.1f} MiB{share}"), file=sys.stderr, flush=True)

    try:
        client.fetch_export(checkpoint, to, told)
    except ExportIncomplete as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        raise CommandError(f"{error.filename or to}: {error.strerror or error}") from error
    print(to)
    return 0


def _exported(client: Client, checkpoint: str) -> str:
    """Its path, below the service's data directory. What it waits for is told as it changes."""
    told = None
    while (said := client.checkpoint(checkpoint)["export"])["status"] == "exporting":
        if said["message"] not in (None, told):
            told = said["message"]
            print(f"{told} ...", file=sys.stderr, flush=True)
        time.sleep(POLL_S)
    if said["status"] != "ready":
        why = said["message"] or "whoever was at it ended before it could say why; ask for it again"
        raise CommandError(f"the export failed: {why}")
    return str(said["path"])
