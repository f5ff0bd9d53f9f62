"""Every key name in Redis, in one place.

Duty: name keys. The rule: all keys of one job carry the hash tag ``{job}``, so that one function may touch them
atomically on any cluster; keys outside any job carry the tag ``{service}`` and are never written together with a job's.
Functions receive their keys in the order of the tuples below (the Lua side is generated from them).
It reads and writes nothing.
"""

from __future__ import annotations

import re
from functools import lru_cache

PREFIX = "gspo"

# Order matters: position n here is KEYS[n] of every function of that family. Processes of earlier releases send the
# beginnings of these lists, so a new name goes to the end.
BUS_KEYS = (
    "trainer",  # hash: token, beat, name and epoch of the trainer that owns the job
    "meta",  # hash: sequence (of dispatches), completions, committed_step, charged_bytes, stored_bytes, dead_letters,
    # posted, late_rewards, missed_rewards
    "counters",  # hash: dispatched, trained, evaluated, dropped_<why>
    "queue",  # sorted set: episodes waiting for a worker; returned ones have negative scores
    "episodes",  # hash: "group:member" -> packed state
    "groups",  # hash: "group" -> packed state
    "index",  # hash: "group:member:segment" -> "entry id/digest"
    "segments",  # stream: one entry per segment; holds exactly those appended and not committed
    "ready",  # sorted set: complete groups in order of completion
    "held",  # sorted set, all scores 0: "token/group:member" of every leased episode
    "holders",  # hash: worker token -> packed {worker, last request, its reply}
    "dead_letters",  # stream, bounded: abandoned episodes, with the reason
    "snapshots",  # hash: "group:member" -> packed {attempt, segments, data} of worlds; with "/n": a part
    "rewards",  # hash: "group:member" -> packed end of an episode that waits for its reward
    "reward_deadlines",  # sorted set: those episodes by the time (Unix ms) until which their reward may come
    "posted",  # sorted set, bounded: "group:member/attempt/digest of token" of rewards, late ones last, in order
    "offers",  # hash: "group:member" -> packed {attempt, loan, data} of episodes that agents fetch by themselves
    "offered",  # sorted set: those of them that no agent has, in order of dispatch
    "loans",  # hash: id -> packed {episode, attempt, beats, length_s, state, reward, till} of those that one has
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
    # The queue ends with its job, in the call that makes the job's state terminal.
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
    "rewards",
    "reward_deadlines",
    "posted",
    "offers",
    "offered",
    "loans",
    # These stay when the job has ended.
    "talk_keys",  # hash: id -> packed {digest, shown, turns, tokens, ms} of keys that talk without an episode
    "talk_used",  # hash: "id:turns" and so on -> what a key has used; bytes -> of all traffic;
    # calls -> that talk_calls was told of
    "traffic",  # stream: k (key), t (trace), u (user), d (segment); bounded by age and bytes, the age by whoever sweeps
    "uses",  # sorted set: requests that are making a job out of this one -> when they began (Unix s)
    "talk_calls",  # sorted set, bounded: "key/token" and "trace/index" of calls that added to the above, in order;
    # "key/token/void" of those that are to add nothing; it ends with its job
)
SERVICE_KEYS = (
    "jobs",  # sorted set, all scores 0: every job id (ids sort by time)
    "open_jobs",  # set: jobs that may not be terminal yet
    "idempotency",  # hash: digest of the client's key -> job id
    "idempotency_order",  # sorted set: the same digests by age, to forget the oldest first
    "rebuild",  # hash: begun, done; whether this server has loaded the records on disk
    "signs",  # hash: kind -> total signs of life from all processes of this kind
    "engines",  # hash: engine id -> record as JSON
    "engine_beats",  # hash: engine id -> number of registrations
    "engine_signs",  # sorted set: engine id -> the count of signs at its last one
    "engine_bindings",  # hash: engine id -> "job/epoch/token"
    "engine_drains",  # hash: engine id -> 1 if it drains
    "engine_states",  # hash: engine id -> its holder's report, as JSON
    "trainers",  # hash: trainer -> record as JSON
    "trainer_beats",  # hash: trainer -> number of registrations
    "trainer_signs",  # sorted set, like engine_signs
    "workers",  # hash: worker -> record as JSON
    "worker_beats",  # hash: worker -> number of registrations
    "worker_signs",  # sorted set, like engine_signs
    "lease_tokens",  # hash: worker -> token of its one lease
    "lease_beats",  # hash: worker -> beat counter of its one lease
    "replies",  # hash: name -> packed {request, owner, till, reply} of resendable requests
    "replies_order",  # sorted set: the same names by age, to forget the oldest first
    "replies_held",  # hash: bytes
    "secrets",  # hash: name -> random bytes that all processes of a kind share
    "engine_watch",  # hash: token and beats of the process that looks at the engines for all
    "engine_sightings",  # hash: engine id -> what that process saw last, as JSON
    "engine_news",  # stream, bounded: an entry whenever one of the above has changed
    "rates",  # hash: caller of the API -> packed {level, at} of its bucket of requests
    "installation",  # hash: id of the installation, as its data directory has it; token of this server
    "places",  # hash: place -> packed {generation, worker, token} of the worker that has it
    "placed",  # hash: worker -> its place
)

_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class InvalidJobId(ValueError):
    """Not a valid job id; it never reaches a key name."""


def check_job_id(job: str) -> str:
    """Returns the id, or raises InvalidJobId: braces, slashes and the like would escape from the hash tag."""
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
    """Encoded keys, cached: every append sends them all, and building them costs the client 17 us of CPU."""
    return tuple(job_key(job, name).encode() for name in BUS_KEYS)


def job_keys(job: str) -> list[str]:
    return [job_key(job, name) for name in JOB_KEYS]


def service_keys() -> list[str]:
    return [service_key(name) for name in SERVICE_KEYS]
