"""Every key name in Redis, in one place.

Duty: name keys. The rule: all keys of one job carry the hash tag ``{job}``, so that one function may touch them
atomically on any cluster; what is not of one job carries the tag ``{service}`` and is never written together with it.
The functions receive their keys in the order of the tuples below (the Lua side is generated from them).
It reads and writes nothing.
"""

from __future__ import annotations

import re
from functools import lru_cache

PREFIX = "gspo"

# Order matters: position n here is KEYS[n] of every function of that family.
BUS_KEYS = (
    "trainer",  # hash: token, beat and name of the trainer that owns the job
    "meta",  # hash: sequence (of dispatches), completions, committed_step, charged_bytes, stored_bytes, dead_letters
    "counters",  # hash: dispatched, trained, evaluated, dropped_<why>
    "queue",  # sorted set: episodes that wait for a worker; those that came back have negative scores
    "episodes",  # hash: "group:member" -> packed state
    "groups",  # hash: "group" -> packed state
    "index",  # hash: "group:member:segment" -> "entry id/digest"
    "segments",  # stream: one entry per segment; holds exactly what is appended and not committed
    "ready",  # sorted set: complete groups in order of completion
    "held",  # sorted set, all scores 0: "token/group:member" of every leased episode
    "holders",  # hash: worker token -> packed {worker, last request, its answer}
    "dead_letters",  # stream, bounded: episodes that were given up, with the reason
    "snapshots",  # hash: "group:member" -> packed {attempt, segments, data} of worlds that can be restored
)
JOB_KEYS = (
    "job",  # hash: the job record
    "trainer",
    "versions",  # hash: version -> manifest as JSON
    "events",  # stream: the only trimmed one
    "event_log",  # hash: last_removed
    "event_nonces",  # hash: nonce -> event id, for as long as the event is retained
    "metrics",  # hash: step -> packed {name: value}
    "metric_steps",  # sorted set: steps that have metrics
    "environments",  # hash: index of the environment -> description as JSON
    # The queue ends with its job: in the same call that makes the job's state a terminal one.
    "counters",
    "groups",
    "queue",
    "episodes",
    "index",
    "segments",
    "ready",
    "held",
    "holders",
    "meta",
    "snapshots",
)
SERVICE_KEYS = (
    "jobs",  # sorted set, all scores 0: every job id (ids sort by time)
    "open_jobs",  # set: jobs that may not be terminal yet
    "idempotency",  # hash: digest of the client's key -> job id
    "idempotency_order",  # sorted set: the same digests by age, so that the oldest can be forgotten
    "rebuild",  # hash: begun, done; whether the records on disk were read into this server
    "signs",  # hash: kind -> how many signs of life were given by all of this kind
    "engines",  # hash: engine id -> record as JSON
    "engine_beats",  # hash: engine id -> how often it registered
    "engine_signs",  # sorted set: engine id -> the count of signs when it gave its last one
    "engine_bindings",  # hash: engine id -> "job/epoch/token"
    "engine_drains",  # hash: engine id -> 1 for those that are to be left alone
    "engine_states",  # hash: engine id -> what the owner of its binding says of it, as JSON
    "trainers",  # hash: trainer -> record as JSON
    "trainer_beats",  # hash: trainer -> how often it registered
    "trainer_signs",  # sorted set, like engine_signs
    "workers",  # hash: worker -> record as JSON
    "worker_beats",  # hash: worker -> how often it registered
    "worker_signs",  # sorted set, like engine_signs
    "lease_tokens",  # hash: worker -> token of its one lease
    "lease_beats",  # hash: worker -> beat counter of its one lease
    "replies",  # hash: name -> packed {request, owner, till, reply} of requests that may be sent again
    "replies_order",  # sorted set: the same names by age, so that the oldest can be forgotten
    "replies_held",  # hash: bytes
)

_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class InvalidJobId(ValueError):
    """A text that cannot be a job id; it never reaches a key name."""


def check_job_id(job: str) -> str:
    """The id itself, or InvalidJobId: braces, slashes and the like would escape from the hash tag."""
    if not _JOB_ID.fullmatch(job):
        raise InvalidJobId(f"a job id has 1 to 64 letters, digits, '_', '-' or '.', not {job!r}")
    return job


def job_key(job: str, name: str) -> str:
    """The key ``name`` (of BUS_KEYS or JOB_KEYS) of one job."""
    return f"{PREFIX}:{{{check_job_id(job)}}}:{name}"


def service_key(name: str) -> str:
    """The key ``name`` (of SERVICE_KEYS)."""
    return f"{PREFIX}:{{service}}:{name}"


@lru_cache(maxsize=256)
def bus_keys(job: str) -> tuple[bytes, ...]:
    """Ready to be sent: every append sends them all, and made anew they cost the client 17 us of CPU each time."""
    return tuple(job_key(job, name).encode() for name in BUS_KEYS)


def job_keys(job: str) -> list[str]:
    return [job_key(job, name) for name in JOB_KEYS]


def service_keys() -> list[str]:
    return [service_key(name) for name in SERVICE_KEYS]
