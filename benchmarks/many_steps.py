"""Does a job of very many steps stay easy to look at? ``python -m benchmarks.many_steps FOLDER [--steps 100000]``

A job is made with the product's own encoders and names: a batch log for each step, archived as `archive: all`
has it, its log-probs when trained, a version's record, a row of metrics, and every checkpoint (`checkpoints.keep` as
large). The episodes are made up and a checkpoint holds no tensors: nothing is trained. Then it is listed and opened at
drawn steps, with the library (what `gspo replay` and `fork` begin with) and through the routes of the API.
``results/many_steps.md`` has CPU seconds of the process that answers, and what the directory takes.

What is there already in FOLDER is measured again, not made again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import httpx
import numpy as np

from gspo_core.log import layout
from gspo_core.log.archive import pack
from gspo_core.log.batches import BatchExtra, encode_batch
from gspo_core.log.checkpoints import encode_checkpoint, encode_fork
from gspo_core.log.lineage import Lineage
from gspo_core.log.manifests import encode_row
from gspo_core.log.records import AcceptedJob, VersionRecord, encode_record
from gspo_core.log.trained import encode_trained
from gspo_core.position import Position
from gspo_core.replay.past import Past
from gspo_core.replay.question import ReplayQuestion, plan
from gspo_core.spec import JobSpec
from gspo_core.types import EpisodeKey, Group, Outcome, Segment, Split, StopReason, Trajectory
from gspo_core.versions import WeightFile, WeightsManifest
from services.api.app import create_app
from services.api.http.context import Backend
from services.files import origin
from services.files.data_dir import DataDir
from services.files.job_dir import JobDir
from services.state.client import connect
from services.state.jobs import JobStatus
from services.state.queue import Bus
from services.state.server import RedisServer
from services.state.store import Store

PAGE = Path(__file__).parent / "results" / "many_steps.md"
JOB = "job_many_steps"
EVERY, SIZE, KEEP_BATCHES = 10, 2, 200
DROPPED_EVERY = 7
"""So many steps drop a group each: numbers of groups and of steps drift apart, as they do."""
DRAWS = 20
TEXT = """# A job of {steps:,} steps

Written by `python -m benchmarks.many_steps` on {day}: CPU seconds of the process that answers (user and system, the
Redis server beside it not counted), {cpus} cores, load {load:.1f}. {draws} steps were drawn for each line, seed {seed}.
Each library line begins with nothing read before; of the API, the first request may load what later ones have. Groups
of {size} made-up episodes of 60 tokens, one a step; every checkpoint is kept ({every} steps apart).

{lines}

What the directory holds:

{disk}
"""


@dataclass
class Cost:
    """CPU seconds of one kind of look."""

    what: str
    seconds: list[float] = field(default_factory=list)

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        began = time.process_time()
        yield
        self.seconds.append(time.process_time() - began)


# Making


def make(job: JobDir, spec: JobSpec, steps: int) -> None:
    """Bytes and names are the product's; what makes files durable (flushing, renaming) is left out."""
    for place in (job.batches, job.archive, job.trained, job.version_records, job.checkpoints):
        place.mkdir(parents=True)
    text = spec.model_dump_json()
    job.accepted.write_bytes(encode_record(AcceptedJob(text, "0" * 64, "2026-01-01T00:00:00.000Z")))
    for name in layout.fork_records(1):
        (job.checkpoints / name).write_bytes(encode_fork(Position(0, 0)))
    rng, number = np.random.default_rng(0), 0
    with job.metrics.open("wb") as metrics:
        for step in range(1, steps + 1):
            number += 1 + (step % DROPPED_EVERY == 0)
            _write_step(job, _group(rng, number), Position(1, step), number, is_archived=step <= steps - KEEP_BATCHES)
            row = {"step": step, "version": step, "epoch": 1, **_metrics(rng)}
            metrics.write(json.dumps(row).encode() + b"\n")
            if step % 1000 == 0:
                print(f"{step} steps", flush=True)


def _write_step(job: JobDir, group: Group, at: Position, number: int, *, is_archived: bool) -> None:
    log = b"".join(encode_batch(at, [group], _extra(at.step, number)))
    (job.archived(at) if is_archived else job.batch(at)).write_bytes(pack(log) if is_archived else log)
    told = {one.key: one.segments[0].behavior_logprobs[one.segments[0].action_mask] for one in group}
    job.trained_at(at).write_bytes(encode_trained(told))
    files = (WeightFile("model.safetensors", 3_000_000, f"{at.step:064x}"),)
    row = encode_row(WeightsManifest(JOB, at.step, 1, at.step, files))
    job.version_record(at.step).write_bytes(encode_record(VersionRecord(at.step, at.step, row)))
    if at.step % EVERY == 0:
        place = job.checkpoints / layout.step_name(at)
        (place / layout.LEARNER).mkdir(parents=True)
        (place / layout.LEARNER_MANIFEST).write_text('{"format": 1}')
        digest = hashlib.sha256(b'{"format": 1}').hexdigest()
        lineage = Lineage(step=at.step, num_dispatched=number, low_watermark=number)
        (place / layout.CHECKPOINT_MANIFEST).write_bytes(encode_checkpoint(at, lineage, digest))


def _group(rng: np.random.Generator, number: int) -> Group:
    members = []
    for member in range(SIZE):
        ids = rng.integers(0, 400, 60).astype(np.int32)
        mask = np.arange(60) >= 40
        told = np.where(mask, -rng.exponential(0.5, 60), 0).astype(np.float32)
        outcome = Outcome(StopReason.COMPLETED, float(rng.random() < 0.5), {"exact": 1.0})
        key = EpisodeKey(JOB, number, member)
        members.append(Trajectory((Segment(key, 0, 0, 0, 0, 0, 1.0, "engine", ids, mask, told, outcome=outcome),)))
    return Group(JOB, number, Split.TRAIN, number % 1000, SIZE, tuple(members))


def _extra(step: int, number: int) -> BatchExtra:
    return {"version": step - 1, "num_dispatched": number, "dropped": {}, "staleness": {"0": 0}}


def _metrics(rng: np.random.Generator) -> dict[str, float]:
    return {name: float(rng.random()) for name in ("reward/mean", "reward/std", "gspo/loss", "gspo/clip_frac")}


# Looking


def look_with_the_library(folder: Path, steps: list[int]) -> list[Cost]:
    listing, opening = Cost("list all steps (`Past.batches`)"), Cost("open one, with its versions")
    asking, forking = Cost("say what a replay takes"), Cost("say what a fork takes")
    for step in steps:
        with listing.measured():
            assert len(Past(folder).batches) >= max(steps)
        with opening.measured():
            past = Past(folder)
            past.batch(step)
            assert len(past.published(step)) == 1
        with asking.measured():
            takes = plan(Past(folder), ReplayQuestion(step, step))
        with forking.measured():
            found = origin.plan(JobDir(folder), step)
        assert takes.replayed < EVERY
        assert found.num_replayed < EVERY
    return [listing, opening, asking, forking]


async def look_through_the_api(data: DataDir, spec: JobSpec, steps: list[int], last: int) -> list[Cost]:
    with tempfile.TemporaryDirectory() as scratch:
        server = RedisServer.spawn(Path(scratch) / "redis")
        try:
            async with connect(server.url) as redis:
                store = Store(redis, jobs_dir=data.jobs)
                await store.load_functions()
                rebuilding = Cost("a server that was emptied is given the job back (once)")
                with rebuilding.measured():
                    await store.rebuild()
                await _finish(store, last)
                backend = Backend(store, Bus(redis), data.jobs, redis)
                app = create_app(lambda: contextlib.nullcontext(backend))
                async with app.router.lifespan_context(app):
                    transport = httpx.ASGITransport(app)
                    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
                        return [rebuilding, *await _ask(http, Past(data.jobs.job(JOB).path), steps)]
        finally:
            server.close()


async def _finish(store: Store, last: int) -> None:
    claim = await store.jobs.claim("trainer")
    assert claim is not None
    await store.jobs.set_status(JOB, JobStatus.RUNNING, token=claim.token)
    await store.jobs.update_progress(JOB, claim.token, last, last)
    await store.jobs.set_status(JOB, JobStatus.SUCCEEDED, token=claim.token)


async def _ask(http: httpx.AsyncClient, past: Past, steps: list[int]) -> list[Cost]:
    base = f"/v1/jobs/{JOB}"
    groups = {step: past.batch(step).groups[0].group for step in steps}

    async def get(path: str) -> None:
        answer = await http.get(path)
        assert answer.status_code == 200, answer.text

    async def post(path: str, body: dict[str, object]) -> None:
        answer = await http.post(path, json=body)
        assert answer.status_code == 200, answer.text

    looks: dict[str, Callable[[int], Awaitable[None]]] = {
        "`GET groups` (a page, the newest)": lambda _: get(f"{base}/groups"),
        "`GET groups?step=`": lambda step: get(f"{base}/groups?step={step}"),
        "`GET /v1/groups/...` (one)": lambda step: get(f"/v1/groups/{JOB}/{groups[step]}"),
        "`GET /v1/episodes/...` with tokens": lambda step: get(f"/v1/episodes/{JOB}/{groups[step]}/1?include=tokens"),
        "`GET versions` (a page)": lambda _: get(f"{base}/versions"),
        "`GET checkpoints` (a page)": lambda _: get(f"{base}/checkpoints"),
        "`GET metrics?max_points=400`": lambda _: get(f"{base}/metrics?max_points=400"),
        "`POST replays?dry_run=true`": lambda step: post(f"{base}/replays?dry_run=true", {"first": step}),
        "`POST fork?dry_run=true`": lambda step: post(
            f"{base}/fork?dry_run=true", {"step": step, "set": {"steps": 10**6}}
        ),
    }
    costs = []
    for what, asked in looks.items():
        cost = Cost(what)
        for step in steps:
            with cost.measured():
                await asked(step)
        costs.append(cost)
    return costs


# Telling


def table(costs: list[Cost]) -> str:
    rows = ["| look | first | median | most |", "|---|---|---|---|"]
    for one in costs:
        values = (one.seconds[0], statistics.median(one.seconds), max(one.seconds))
        rows.append(f"| {one.what} | {' | '.join(f'{value:.3f}' for value in values)} |")
    return "\n".join(rows)


def disk(folder: Path, steps: int) -> str:
    rows = ["| | files | bytes | bytes a step |", "|---|---|---|---|"]
    for kind in (layout.ARCHIVE, layout.BATCHES, layout.TRAINED, layout.VERSIONS, layout.METRICS, layout.CHECKPOINTS):
        place = folder / kind
        files = [place] if place.is_file() else [one for one in place.rglob("*") if one.is_file()]
        size = sum(one.stat().st_size for one in files)
        name = kind if place.is_file() else f"{kind}/"
        rows.append(f"| `{name}` | {len(files):,} | {size:,} | {size / steps:,.0f} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, help="of the drawn steps; left out: drawn")
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--library", action="store_true", help="leave the routes of the API out")
    parser.add_argument("--page", type=Path, default=PAGE)
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    data = DataDir(given.folder.resolve())
    job, model = data.jobs.job(JOB), given.folder.resolve() / "model"
    model.mkdir(parents=True, exist_ok=True)
    checkpoints = {"keep": given.steps, "keep_batches": KEEP_BATCHES, "archive": "all"}
    fields = {"model": str(model), "environments": [{"ref": "a:B"}], "steps": given.steps, "checkpoint_every": EVERY}
    spec = JobSpec.model_validate(fields | {"groups_per_step": 1, "checkpoints": checkpoints})
    if not job.path.is_dir():
        make(job, spec, given.steps)
    steps = sorted(random.Random(seed).sample(range(1, given.steps + 1), given.draws))
    random.Random(seed).shuffle(steps)
    costs = look_with_the_library(job.path, steps)
    if not given.library:
        costs += asyncio.run(look_through_the_api(data, spec, steps, given.steps))
    text = TEXT.format(
        steps=given.steps,
        day=datetime.now(UTC).date(),
        cpus=os.cpu_count(),
        load=os.getloadavg()[0],
        draws=given.draws,
        seed=seed,
        size=SIZE,
        every=EVERY,
        lines=table(costs),
        disk=disk(job.path, given.steps),
    )
    given.page.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
