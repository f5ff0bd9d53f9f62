"""What must be gone when everything is over: processes, keys in Redis, temporary files, jobs that nobody submitted."""

from __future__ import annotations

import re
from collections.abc import Iterator

import redis

from services.state.server import RedisServer
from tests.chaos.evidence import Evidence

# What a job that is over may still be asked for; its queue is gone.
_LASTING = {
    *("job", "trainer", "versions", "events", "event_log", "event_nonces", "metrics", "metric_steps", "environments"),
    *("counters", "dead_letters", "meta"),
}
_OF_A_JOB = re.compile(r"gspo:\{([^}]+)\}:(.+)")
SERVICE = "service"
# Killed workers are forgotten by the next one that looks; so many may be left when the last has gone.
MAX_LEFT_BEHIND = 64


def jobs_are_those_that_were_submitted(evidence: Evidence) -> Iterator[str]:
    accepted = {one["key"]: one["accepted"] for one in evidence.submissions if "accepted" in one}
    if len(set(accepted.values())) != len(accepted):
        yield f"two keys made one job: {accepted}"
    known = {job.id for job in evidence.jobs}
    if lost := set(accepted.values()) - known:
        yield f"accepted and gone: {sorted(lost)}"
    keys = {one["key"] for one in evidence.submissions}
    if len(known) > len(keys):
        yield f"{len(keys)} submissions made {len(known)} jobs"


def nothing_crashed(evidence: Evidence) -> Iterator[str]:
    if evidence.end is None:
        yield "the run has not come to its end"
        return
    for crash in evidence.end["crashes"]:
        yield f"{crash['name']} (pid {crash['pid']}) ended by itself with status {crash['status']}"
    for name in evidence.end["obstinate"]:
        yield f"{name} did not leave when it was asked to"
    for name, status in evidence.end["statuses"].items():
        if status not in (0, -9):
            yield f"{name} left with status {status}"
    for pid, command in evidence.end["left_processes"].items():
        yield f"process {pid} was left behind: {command}"


def redis_holds_no_queue(evidence: Evidence) -> Iterator[str]:
    with RedisServer.spawn(evidence.work / "redis") as server, redis.Redis.from_url(server.url) as client:
        for key in sorted(key.decode() for key in client.scan_iter()):
            found = _OF_A_JOB.fullmatch(key)
            if found is None:
                yield f"{key} is no key of ours"
            elif found[1] != SERVICE and found[2] not in _LASTING:
                yield f"{key} is left of a job that is over"
        for job in evidence.jobs:
            usage = client.hmget(f"gspo:{{{job.id}}}:meta", "charged_bytes", "stored_bytes")
            if any(int(value or 0) for value in usage):
                yield f"{job.id} is still charged {usage} bytes"
        for name in ("workers", "lease_tokens", "lease_beats"):
            count = client.hlen(f"gspo:{{{SERVICE}}}:{name}")
            if count > MAX_LEFT_BEHIND:
                yield f"{count} entries are left in {name}"


def no_file_is_left_half_written(evidence: Evidence) -> Iterator[str]:
    for job in evidence.jobs:
        for path in job.directory.rglob(".tmp-*"):
            yield f"{path.relative_to(evidence.data)} was left behind"
    for path in (evidence.work / "home").iterdir():
        if path.name.startswith("gspo-"):
            yield f"the scratch directory {path.name} was left behind"
