"""What must be gone when everything is over: processes, keys in Redis, temporary files, jobs that nobody submitted."""

from __future__ import annotations

import re
from collections.abc import Iterator

import redis

from services.hosts.walls import scratch
from services.state.functions import LUA
from services.state.server import RedisServer
from tests.chaos import departures
from tests.chaos.evidence import Evidence
from tests.chaos.lateness import Late

# What a job that is over may still be asked for; its queue is gone.
_LASTING = {
    *("job", "trainer", "versions", "events", "event_log", "event_nonces", "metrics", "metric_steps", "environments"),
    *("counters", "dead_letters", "meta"),
}
_OF_A_JOB = re.compile(r"gspo:\{([^}]+)\}:(.+)")
SERVICE = "service"
# A killed worker is listed until each of those that are listed could have given so many signs of life (`service.lua`),
# and each sign of one that lives removes so many of the dead.
SIGNS_KEPT = int(re.findall(r"SILENCE = {worker = (\d+)", (LUA / "service.lua").read_text())[0])
REMOVED_AT_ONCE = 10
# A starter sees the end of its host and removes its folder, on a busy machine too.
NOTICED_WITHIN_S = 2.0


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
        yield Late("the run has not come to its end")
        return
    for end in departures.wrong(evidence):
        told = f"{end.name}/{end.pid} {departures.described(end)}"
        yield Late(told) if departures.may_be_late(end) else told
    for pid, command in evidence.end["left_processes"].items():
        yield Late(f"process {pid} was left behind: {command}")


def jobs_without_a_trainer_said_so(evidence: Evidence) -> Iterator[str]:
    for one in evidence.happened:
        if one["kind"] == "lose all trainers":
            for job, said in one["silent"].items():
                yield Late(f"{job} had no trainer for {one['seconds']:.0f} s and said: {said}")


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
        yield from _dead_are_forgotten(client)


def _dead_are_forgotten(client: redis.Redis) -> Iterator[str]:
    prefix = f"gspo:{{{SERVICE}}}:"
    listed = client.zrange(f"{prefix}worker_signs", 0, -1)
    signs = {
        name: float(client.zscore(f"{prefix}worker_signs", name) or 0) for name in listed if isinstance(name, bytes)
    }
    now = int(client.hget(f"{prefix}signs", "worker") or 0)
    overdue = [name for name, sign in signs.items() if sign <= now - SIGNS_KEPT * len(signs)]
    if len(overdue) > REMOVED_AT_ONCE:
        yield f"{len(overdue)} of {len(signs)} workers are listed longer than the dead are"
    for name in ("workers", "lease_tokens", "lease_beats"):
        if unsigned := sorted(client.hkeys(prefix + name) - signs.keys()):
            yield f"{len(unsigned)} entries are left in {name} that nobody will forget: {unsigned[:3]}"


def no_file_is_left_half_written(evidence: Evidence) -> Iterator[str]:
    for job in evidence.jobs:
        for path in job.directory.rglob(".tmp-*"):
            yield f"{path.relative_to(evidence.data)} was left behind"
    home = evidence.work / "home"
    if _host_and_starter_were_killed(evidence):
        scratch.sweep(home)  # as the next host would: nobody else was left to
    for path in home.iterdir():
        if path.name.startswith("gspo-"):
            yield f"the scratch directory {path.name} was left behind"


def _host_and_starter_were_killed(evidence: Evidence) -> bool:
    hosts = [hit["at"] for hit in evidence.faults if hit["kind"] == "kill hosts of agents" and "target" in hit]
    starters = [hit["at"] for hit in evidence.faults if hit["kind"].startswith("kill gateway") and "target" in hit]
    return any(0 <= starter - host < NOTICED_WITHIN_S for host in hosts for starter in starters)
