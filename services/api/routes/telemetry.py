"""The state of the installation for Prometheus. Open to everyone, so it reveals no content of jobs.

Rule: no label of ours is called ``job`` or ``instance``: Prometheus writes its own there, and would rename ours. Series
of the installation, not of this process, are the same from every API: take their maximum before adding up.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.responses import PlainTextResponse, Response

from services.api.http.context import ApiContext, ContextOf
from services.api.http.presence import ROLES
from services.api.http.routers import open_router
from services.api.http.stored_specs import is_of_agents
from services.state.client import Away, AwayReason
from services.state.fleet_records import WorkerRecord
from services.state.jobs import JobRecord, JobStatus

Family = GaugeMetricFamily | CounterMetricFamily
router = open_router("operations")

# Scrapes come every few seconds: finished jobs are counted, without asking for details.
MAX_JOBS = 10_000
MAX_JOBS_IN_DETAIL = 50
SCRAPE_TIMEOUT_S = 8.0
# From the newest step; named like a job's metrics.
SHOWN = {
    "staleness/mean": "Mean age in steps of the tokens of the newest step",
    "staleness/max": "Greatest age in steps of a token of the newest step",
    "throughput/tokens_per_s": "Tokens trained per second in the newest step",
    "gspo/clip_frac": "Share of tokens whose ratio was clipped in the newest step",
}


@router.get(
    "/metrics",
    response_class=PlainTextResponse,
    responses={200: {"content": {"text/plain": {}}, "description": "The exposition format of Prometheus"}},
)
async def exposition(context: ContextOf) -> Response:
    """Counts of jobs, processes, groups by fate and requests; what rollout workers did and where their time went; the
    progress of the fifty newest open jobs."""
    try:
        async with asyncio.timeout(SCRAPE_TIMEOUT_S):
            families = await _families(context)
    except TimeoutError:
        raise Away(AwayReason.UNREACHABLE) from None
    registry = CollectorRegistry()
    registry.register(_Gathered(families))
    text = generate_latest(registry) + generate_latest(context.traffic.registry)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


class _Gathered(Collector):
    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Family]:
        yield from self._families


async def _families(context: ApiContext) -> list[Family]:
    jobs = await context.store.jobs.page(MAX_JOBS, order="desc")
    by_status = Counter(job.status for job in jobs)
    members = await context.presence.members()
    alive = Counter((one.role, one.is_alive) for one in members)
    statuses = GaugeMetricFamily("gspo_jobs", "Jobs by status", labels=["status"])
    for status in JobStatus:
        statuses.add_metric([str(status)], by_status[status])
    processes = GaugeMetricFamily("gspo_processes", "Registered processes", labels=["role", "alive"])
    for role, is_alive in [(role, is_alive) for role in ROLES for is_alive in (True, False)]:
        processes.add_metric([role, str(is_alive).lower()], alive[role, is_alive])
    open_jobs = [job for job in jobs if not job.status.is_terminal][:MAX_JOBS_IN_DETAIL]
    rollout = [one.record for one in members if one.is_alive and isinstance(one.record, WorkerRecord)]
    return [statuses, processes, _players(jobs), *_of_workers(rollout), *await _of_jobs(context, open_jobs)]


def _players(jobs: Sequence[JobRecord]) -> GaugeMetricFamily:
    under_way = Counter(is_of_agents(job) for job in jobs if job.status in (JobStatus.STARTING, JobStatus.RUNNING))
    found = GaugeMetricFamily("gspo_jobs_under_way", "Jobs that start or run, by who plays them", labels=["player"])
    for player, count in (("rollout", under_way[False]), ("gateway", under_way[True])):
        found.add_metric([player], count)
    return found


def _of_workers(workers: Sequence[WorkerRecord]) -> list[Family]:
    """Counters of rollout workers and gateways since their start, and where the seconds of their episodes went."""
    waiting = GaugeMetricFamily("gspo_gateway_open_requests", "Requests of agents under way", labels=["worker"])
    held = GaugeMetricFamily("gspo_rollout_episodes", "Episodes that a worker holds", labels=["worker"])
    counts = CounterMetricFamily("gspo_rollout", "What rollout workers have done, by kind", labels=["worker", "kind"])
    seconds = CounterMetricFamily(
        "gspo_rollout_seconds", "Time spent in episodes, over all of them, by activity", labels=["worker", "where"]
    )
    for record in workers:
        # Ids contain host names.
        worker = hashlib.blake2b(record.id.encode(), digest_size=4).hexdigest()
        held.add_metric([worker], record.num_episodes)
        if record.kind == "gateway":
            waiting.add_metric([worker], record.open_requests)
        for name, value in record.counters.items():
            where = name.removeprefix("time/")
            if where != name:
                seconds.add_metric([worker, where.removesuffix("_s")], value)
            else:
                counts.add_metric([worker, name], value)
    return [held, waiting, counts, seconds]


async def _of_jobs(context: ApiContext, jobs: list[JobRecord]) -> list[GaugeMetricFamily]:
    steps = GaugeMetricFamily("gspo_job_step", "Steps taken", labels=["job_id"])
    groups = GaugeMetricFamily("gspo_job_groups", "Groups ever dispatched, by outcome", labels=["job_id", "fate"])
    size = GaugeMetricFamily("gspo_job_queue_bytes", "Payloads held in Redis", labels=["job_id"])
    deficit = GaugeMetricFamily(
        "gspo_ready_groups_deficit", "Groups that a running job's next step still lacks", labels=["job_id"]
    )
    short = GaugeMetricFamily(
        "gspo_engine_seconds_short",
        "Seconds by which more engines could shorten a running job's newest step",
        labels=["job_id"],
    )
    newest = {
        name: GaugeMetricFamily(f"gspo_job_{name.replace('/', '_')}", text, labels=["job_id"])
        for name, text in SHOWN.items()
    }
    for job in jobs:
        steps.add_metric([job.id], job.step)
        for fate, count in (await context.bus.counters(job.id)).items():
            groups.add_metric([job.id, fate], count)
        size.add_metric([job.id], (await context.bus.usage(job.id)).stored_bytes)
        if job.status is JobStatus.RUNNING:
            wanted = int(job.spec_data.get("groups_per_step", 1))
            deficit.add_metric([job.id], max(0, wanted - len(await context.bus.ready_groups(job.id))))
        rows = await context.store.metrics.read(job.id, job.step)
        if job.status is JobStatus.RUNNING and rows and (seconds := _engine_seconds_short(rows[-1])) is not None:
            short.add_metric([job.id], seconds)
        for name, family in newest.items():
            if rows and name in rows[-1]:
                family.add_metric([job.id], rows[-1][name])
    return [steps, groups, size, deficit, short, *newest.values()]


def _engine_seconds_short(row: Mapping[str, float]) -> float | None:
    """How long the trainer waited for groups, as far as episodes spent their time in engines. None if not told."""
    engine_s, *others_s = (row.get(f"time/episode_{part}_s", 0.0) for part in ("engine", "env", "queue"))
    if "time/wait_s" not in row or not (total_s := engine_s + sum(others_s)):
        return None
    return row["time/wait_s"] * engine_s / total_s
