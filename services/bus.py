"""The queue between trainer and workers: groups dispatched, episodes leased, segments appended, groups committed.

Duty: the life of a group in Redis. The rule: every write is one atomic, fenced, idempotent function, so nothing
acknowledged is lost and nothing that is sent twice counts twice. A worker has ONE lease, renewed by one beat; the
episodes that it holds are fenced by its token. It does not look into payloads and decides nothing about training.

What a reader of segments must know: ``restart`` deletes the segments of the attempt before, ``commit`` those of the
group. A reader may have read some of them already. It drops them itself: a segment of a higher attempt supersedes all
segments of the same episode with a lower one, and a committed group is settled. After a server was replaced or wiped,
read again from "0": positions of another stream mean nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from uuid import uuid4

from redis.asyncio import Redis

from gspo_core.types import EpisodeKey, Split
from services.functions import Functions
from services.keys import bus_keys, job_key, service_key, service_keys
from services.leases import BeatWatch
from services.redis_client import MAX_BLOCK_MS
from services.refusals import Conflict, Fenced, Gap

__all__ = ["Append", "Bus", "Conflict", "EpisodeLease", "Fenced", "Gap", "ReadyGroup"]

# A function blocks the server while it runs; committing hundreds of groups in one call would be felt by everyone.
GROUPS_PER_COMMIT = 8

_REASON = re.compile(r"trained|evaluated|dropped_[a-z0-9_]{1,40}")


@dataclass(frozen=True, slots=True)
class EpisodeLease:
    """An episode to run, or to resume after its ``num_segments`` segments of ``attempt``."""

    key: EpisodeKey
    attempt: int
    num_segments: int
    split: Split
    task_index: int
    environment: int
    group_size: int


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A group whose episodes have all ended, not committed yet."""

    group: int
    split: Split
    task_index: int
    environment: int
    size: int


@dataclass(frozen=True, slots=True)
class Append:
    """One segment to append; ``final`` ends its episode."""

    key: EpisodeKey
    attempt: int
    index: int
    payload: bytes
    final: bool


class Bus:
    """``lease_s``: a worker whose beat stands still for so long loses its episodes to whoever calls ``reap``."""

    def __init__(self, redis: Redis, *, lease_s: float = 30.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._functions = Functions(redis)
        self._redis = self._functions.redis
        self._watch = BeatWatch(lease_s, clock)
        # A lease whose answer never came is asked for again under the same name, so its episodes are not stranded.
        self._unanswered: dict[tuple[str, str], str] = {}
        # One at a time: the server remembers the answer to the last request only.
        self._leasing = asyncio.Lock()

    async def load_functions(self) -> None:
        """Make sure that the server has our functions; raises LibraryTooOld, LibraryTooNew."""
        await self._functions.load()

    # The trainer's side, fenced by the token of its claim.

    async def dispatch(
        self, job: str, token: str, group: int, *, size: int, split: Split, task_index: int, environment: int = 0
    ) -> bool:
        """Queue the ``size`` episodes of a group. False: the group exists already."""
        if group < 0 or size < 1:
            raise ValueError(f"a group has a number from 0 and at least one episode, not {group} and {size}")
        reply = await self._functions.call(
            "dispatch", bus_keys(job), token, group, size, str(split), task_index, environment
        )
        return bool(reply)

    async def read_segments(
        self, job: str, after: str = "0", *, count: int = 256, block_ms: int = 200
    ) -> list[tuple[str, bytes]]:
        """Up to ``count`` segments appended after the position ``after``, as (position, payload), in order.

        Waits at most ``block_ms`` for the first one (0: not at all). See the module for what may vanish later.
        """
        stream = job_key(job, "segments")
        reply = await self._redis.xread({stream: after}, count=count, block=min(block_ms, MAX_BLOCK_MS) or None)
        return [(entry_id.decode(), fields[b"d"]) for entry_id, fields in _entries(reply)]

    async def ready_groups(self, job: str) -> list[ReadyGroup]:
        """Complete groups that are not committed, in order of completion."""
        rows = await self._functions.call("ready", bus_keys(job))
        return [
            ReadyGroup(int(group), Split(split.decode()), int(task_index), int(environment), int(size))
            for group, split, task_index, environment, size in rows
        ]

    async def open_groups(self, job: str) -> list[int]:
        """Every group that was dispatched and not committed; what a recovering trainer compares its own list with."""
        return sorted(int(group) for group in await self._redis.hkeys(job_key(job, "groups")))

    async def commit(self, job: str, token: str, step: int, groups: Sequence[int], *, reason: str = "trained") -> None:
        """Settle groups: delete them with all their segments and count them under ``reason``.

        ``reason`` is trained, evaluated or dropped_<why>. Call it only when the batch log of ``step`` is durable.
        Groups that are gone are passed over, so after an error the same call may be made again. Incomplete groups may
        be committed; what their workers append later is Fenced.
        """
        if not _REASON.fullmatch(reason):
            raise ValueError(f"a group is settled as trained, evaluated or dropped_<why>, not {reason!r}")
        keys = bus_keys(job)
        for first in range(0, max(len(groups), 1), GROUPS_PER_COMMIT):
            chunk = groups[first : first + GROUPS_PER_COMMIT]
            await self._functions.call("commit", keys, token, step, reason, *chunk)

    async def counters(self, job: str) -> dict[str, int]:
        """Groups dispatched, settled by reason, and in flight; dispatched is the sum of all others at every moment."""
        flat = await self._functions.call("counters", bus_keys(job))
        counts = {"dispatched": 0, "trained": 0, "evaluated": 0}
        counts.update({name.decode(): int(count) for name, count in zip(flat[::2], flat[1::2], strict=True)})
        return counts

    # The worker's side, fenced by the token of its one lease.

    async def join(self, worker: str) -> str:
        """Begin a lease; returns its token. A lease that the same name held before is over."""
        token = uuid4().hex
        await self._functions.call("join", service_keys(), worker, token)
        return token

    async def beat(self, worker: str, token: str) -> None:
        """Renew the lease, at least every fifth of its length. Fenced: it is over; drop all episodes and join again."""
        await self._functions.call("beat", service_keys(), worker, token)

    async def leave(self, worker: str, token: str) -> None:
        """End the lease in an orderly way, after handing everything back."""
        await self._functions.call("end_lease", service_keys(), worker, token, "")

    async def lease(self, job: str, worker: str, token: str, limit: int) -> list[EpisodeLease]:
        """Up to ``limit`` episodes, now this worker's: those that came back before new ones, the oldest first.

        After an error the next call returns what the failed one leased, if it did, whatever the limit says now.
        """
        async with self._leasing:
            request = self._unanswered.setdefault((job, token), uuid4().hex)
            rows = await self._functions.call("lease", bus_keys(job), worker, token, request, max(limit, 0))
            del self._unanswered[job, token]
        return [
            EpisodeLease(
                EpisodeKey(job, int(group), int(member)),
                attempt=int(attempt),
                num_segments=int(num_segments),
                split=Split(split.decode()),
                task_index=int(task_index),
                environment=int(environment),
                group_size=int(size),
            )
            for group, member, attempt, num_segments, split, task_index, environment, size in rows
        ]

    async def append(self, job: str, token: str, appends: Sequence[Append]) -> None:
        """Append segments, of one or several episodes, in one atomic call: all of them or none.

        What is there already is passed over. Fenced: an episode is not (or no more) this worker's, in this attempt.
        Gap: the server holds less than the caller thinks. Conflict: the segment is there with another content, or its
        episode has ended. The errors name the first such segment; the rest may be sent again without it.
        """
        args: list[str | bytes | int] = []
        for item in appends:
            if item.key.job != job:
                raise ValueError(f"{item.key} is no episode of job {job}")
            args += [_member(item.key), item.attempt, item.index, int(item.final), _digest(item), item.payload]
        if args:
            await self._functions.call("append", bus_keys(job), token, *args)

    async def restart(self, key: EpisodeKey, token: str, attempt: int) -> None:
        """Start the episode again as ``attempt``, one more than before: its segments so far are deleted."""
        await self._functions.call("restart", bus_keys(key.job), token, _member(key), attempt)

    async def hand_back(self, job: str, token: str, keys: Sequence[EpisodeKey]) -> None:
        """Return episodes to the head of the queue. Those that the token does not hold (any more) are passed over."""
        if keys:
            await self._functions.call("hand_back", bus_keys(job), token, *(_member(key) for key in keys))

    async def read_episode(self, key: EpisodeKey) -> list[bytes]:
        """The appended segments of the current attempt, in order."""
        payloads: list[bytes] = await self._functions.call("read_episode", bus_keys(key.job), _member(key))
        return payloads

    async def reap(self, job: str) -> int:
        """Requeue the episodes of workers whose lease is over; returns how many.

        Whoever serves the job calls this regularly (every fifth of the lease): a beat must be watched for the whole
        lease before it counts as standing still. A worker that joined anew has given up what it held before.
        """
        flat = await self._functions.call("holders", bus_keys(job))
        holders = [(flat[n].decode(), flat[n + 1].decode()) for n in range(0, len(flat), 2)]
        count = 0
        for token, worker in holders:
            if await self._is_over(worker, token):
                count += int(await self._functions.call("requeue", bus_keys(job), token))
        return count

    async def _is_over(self, worker: str, token: str) -> bool:
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.hget(service_key("lease_tokens"), worker)
            pipeline.hget(service_key("lease_beats"), worker)
            current, beat = await pipeline.execute()
        if current is None or current.decode() != token:
            return True
        if not self._watch.stands_still(worker, (current, beat)):
            return False
        ended = await self._functions.call("end_lease", service_keys(), worker, token, beat)
        self._watch.forget(worker)
        return bool(ended)


def _member(key: EpisodeKey) -> str:
    return f"{key.group}:{key.member}"


def _digest(item: Append) -> str:
    """What makes a resend recognizable; whether a segment ends its episode is a part of it."""
    return hashlib.blake2b(item.payload, digest_size=12).hexdigest() + ("f" if item.final else "")


def _entries(reply: object) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """The entries of an XREAD of one stream; the reply is empty, or one pair of name and entries."""
    if not reply:
        return []
    assert isinstance(reply, list)
    entries: list[tuple[bytes, dict[bytes, bytes]]] = reply[0][1]
    return entries
