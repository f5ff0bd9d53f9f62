"""The queue between trainer and workers: groups dispatched, episodes leased, segments appended, groups committed.

Duty: the life of a group in Redis. The rule: every write is one atomic, fenced, idempotent function, so nothing
acknowledged is lost and nothing that is sent twice counts twice. A worker has ONE lease, renewed by one beat; the
episodes that it holds are fenced by its token. It does not look into payloads and decides nothing about training.

Memory: ``dispatch`` reserves the bytes that an episode may need and refuses beyond a budget; an append is never refused
for bytes, so what was admitted always gets to its end. Episodes whose leases end badly again and again without getting
any further are given up (a dead letter with the reason); their group becomes ready without them.

What a reader of segments must know: ``restart`` deletes the segments of the attempt before, ``commit`` those of the
group. A reader may have read some of them already. It drops them itself: a segment of a higher attempt supersedes all
segments of the same episode with a lower one, and a committed group is settled. A position of a stream that is gone
(the server was wiped) is taken for "0" where it lies ahead of the new one.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from uuid import uuid4

from zlib_ng.zlib_ng import crc32

from gspo_core.types import EpisodeKey, Split
from services.state.away import RedisFault
from services.state.client import MAX_BLOCK_MS, RedisClient
from services.state.functions import Functions
from services.state.keys import bus_keys, job_key, service_key, service_keys
from services.state.leases import BeatWatch
from services.state.queue_records import (
    Append,
    DeadLetter,
    EpisodeLease,
    EpisodeView,
    GroupView,
    QueueUsage,
    ReadyGroup,
    Snapshot,
    Stage,
    read_dead_letter,
    read_group,
    read_lease,
    read_ready,
)
from services.state.refusals import Conflict, Fenced, Full, Gap

__all__ = [
    "Append",
    "Bus",
    "Conflict",
    "DeadLetter",
    "EpisodeLease",
    "EpisodeView",
    "Fenced",
    "Full",
    "Gap",
    "GroupView",
    "QueueUsage",
    "ReadyGroup",
    "Snapshot",
    "Stage",
]

# A function blocks the server while it runs; committing hundreds of groups in one call would be felt by everyone.
GROUPS_PER_COMMIT = 8
GROUPS_PER_LOOK = 64
MAX_REASON_CHARS = 500
MAX_NOTE_CHARS = 500

_REASON = re.compile(r"trained|evaluated|dropped_[a-z0-9_]{1,40}")


class Bus:
    """``lease_s``: a worker whose beat stands still for so long loses its episodes to whoever calls ``reap``."""

    def __init__(
        self, redis: RedisClient, *, lease_s: float = 30.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
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
        self,
        job: str,
        token: str,
        group: int,
        *,
        size: int,
        split: Split,
        task_index: int,
        environment: int = 0,
        bytes_per_episode: int = 0,
        budget_bytes: int | None = None,
    ) -> bool:
        """Queue the ``size`` episodes of a group. False: the group exists already.

        ``bytes_per_episode`` are reserved for each until it ends. Full: the job would then exceed ``budget_bytes``.
        """
        if group < 0 or size < 1 or bytes_per_episode < 0:
            raise ValueError(
                f"a group has a number from 0, at least one episode and no negative bytes, not {group}, {size} and "
                f"{bytes_per_episode}"
            )
        budget = "" if budget_bytes is None else budget_bytes
        reply = await self._functions.call(
            "dispatch",
            bus_keys(job),
            *(token, group, size, str(split), task_index, environment, bytes_per_episode, budget),
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
        if not reply and await self._is_of_another_stream(stream, after):
            reply = await self._redis.xread({stream: "0"}, count=count)
        return [(entry_id.decode(), fields.get(b"d", b"")) for entry_id, fields in _entries(reply)]

    async def _is_of_another_stream(self, stream: str, position: str) -> bool:
        """Whether the server was wiped since, and its clock is behind: it will not reach that position for long."""
        try:
            info = await self._redis.xinfo_stream(stream)
        except RedisFault:
            return False  # nothing was appended yet
        return _numbers(info["last-generated-id"].decode()) < _numbers(position)

    async def ready_groups(self, job: str) -> list[ReadyGroup]:
        """Complete groups that are not committed, in order of completion."""
        rows = await self._functions.call("ready", bus_keys(job))
        return [read_ready(row) for row in rows]

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

    async def cancel(self, job: str, token: str, group: int) -> int:
        """End every episode of a group that has not ended, without an outcome; returns how many those were.

        The group is ready then. What workers still append to these episodes is Fenced.
        """
        return int(await self._functions.call("cancel", bus_keys(job), token, group))

    async def empty_queue(self, job: str, token: str) -> int:
        """Remove every group, after a ``Damaged``; returns how many were open, all of them to be dispatched again."""
        return int(await self._functions.call("empty_queue", bus_keys(job), token))

    async def counters(self, job: str) -> dict[str, int]:
        """Groups dispatched, settled by reason, and in flight; dispatched is the sum of all others at every moment."""
        flat = await self._functions.call("counters", bus_keys(job))
        counts = {"dispatched": 0, "trained": 0, "evaluated": 0}
        counts.update({name.decode(): int(count) for name, count in zip(flat[::2], flat[1::2], strict=True)})
        return counts

    # To look at, from anywhere.

    async def usage(self, job: str) -> QueueUsage:
        """The job's bytes in Redis, at one instant."""
        values = await self._functions.call("usage", bus_keys(job))
        return QueueUsage(*(int(value or 0) for value in values))

    async def groups(self, job: str, *, after: int = -1, limit: int = 100) -> list[GroupView]:
        """Up to ``limit`` groups that are not committed, with their episodes, by number; ``after`` is exclusive.

        Each group is seen at one instant, several are not.
        """
        numbers = [number for number in await self.open_groups(job) if number > after][:limit]
        views: list[GroupView] = []
        for first in range(0, len(numbers), GROUPS_PER_LOOK):
            rows = await self._functions.call("inspect", bus_keys(job), *numbers[first : first + GROUPS_PER_LOOK])
            views += [read_group(job, row) for row in rows]
        return views

    async def dead_letters(self, job: str, after: str = "0", *, count: int = 100) -> list[DeadLetter]:
        """The newest thousand episodes that were given up, the oldest first; ``after`` is the id of a letter."""
        entries = await self._redis.xrange(job_key(job, "dead_letters"), f"({after}", "+", count=count)
        return [read_dead_letter(job, entry_id, fields) for entry_id, fields in entries]

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
        return [read_lease(job, row) for row in rows]

    async def take(self, job: str, worker: str, token: str, keys: Sequence[EpisodeKey]) -> list[EpisodeLease]:
        """These very episodes, as far as they wait for a worker or are this one's already: now they are this one's.

        For who plays what was agreed on elsewhere; a worker that takes what comes calls ``lease``.
        """
        if not keys:
            return []
        rows = await self._functions.call("take", bus_keys(job), worker, token, *(_member(key) for key in keys))
        return [read_lease(job, row) for row in rows]

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
            version = "" if item.version is None else item.version
            args += [_member(item.key), item.attempt, item.index, int(item.final), version, _digest(item), item.payload]
            args.append(item.note[:MAX_NOTE_CHARS])
        if args:
            await self._functions.call("append", bus_keys(job), token, *args)

    async def restart(self, key: EpisodeKey, token: str, attempt: int, kept: Sequence[Append] = ()) -> None:
        """Start the episode again as ``attempt``, one more than before: its segments so far are deleted.

        ``kept`` are those that the new attempt begins with, from the first one to the place of the snapshot, which
        stays with them; Gap where none stands there.
        """
        args: list[str | bytes | int] = [kept[-1].note[:MAX_NOTE_CHARS] if kept else ""]
        for index, item in enumerate(kept):
            if (item.key, item.attempt, item.index, item.final) != (key, attempt, index, False):
                raise ValueError(f"attempt {attempt} of {key} does not begin with segment {item.index} of {item.key}")
            args += ["" if item.version is None else item.version, _digest(item), item.payload]
        await self._functions.call("restart", bus_keys(key.job), token, _member(key), attempt, *args)

    async def hand_back(self, job: str, token: str, keys: Sequence[EpisodeKey]) -> None:
        """Return episodes to the head of the queue. Those that the token does not hold (any more) are passed over."""
        if keys:
            await self._functions.call("hand_back", bus_keys(job), token, *(_member(key) for key in keys))

    async def interrupt(self, job: str, token: str, keys: Sequence[EpisodeKey]) -> None:
        """Return episodes that have had their share: they wait behind everything that waits now."""
        if keys:
            await self._functions.call("interrupt", bus_keys(job), token, *(_member(key) for key in keys))

    async def num_queued(self, job: str) -> int:
        """Episodes that wait for a worker."""
        return int(await self._redis.zcard(job_key(job, "queue")))

    async def save_snapshot(self, key: EpisodeKey, token: str, snapshot: Snapshot) -> None:
        """Keep an episode's world beside its segments until that ends or starts again. Raises as ``append`` does."""
        await self._functions.call(
            "save_snapshot",
            bus_keys(key.job),
            *(token, _member(key), snapshot.attempt, snapshot.num_segments, snapshot.data),
        )

    async def read_snapshot(self, key: EpisodeKey) -> Snapshot | None:
        """The newest one that was kept."""
        held = await self._functions.call("read_snapshot", bus_keys(key.job), _member(key))
        return None if held is None else Snapshot(int(held[0]), int(held[1]), held[2])

    async def fail(self, key: EpisodeKey, token: str, reason: str) -> None:
        """Give an episode back that could not be played: unlike a hand-back this counts.

        After three leases in a row that ended so and came no further than an earlier one, the episode is given up. The
        death of a worker counts only after three that were nobody's fault; then the episode is a suspect, and ``lease``
        gives no worker two of them. What the token does not hold (any more) is passed over.
        """
        await self._functions.call("fail", bus_keys(key.job), token, _member(key), reason[:MAX_REASON_CHARS])

    async def read_episode(self, key: EpisodeKey) -> list[bytes]:
        """The appended segments of the current attempt, in order."""
        payloads: list[bytes] = await self._functions.call("read_episode", bus_keys(key.job), _member(key))
        return payloads

    async def reap(self, job: str) -> int:
        """Take the episodes of workers whose lease is over away from them; returns how many.

        Whoever serves the job calls this regularly (every fifth of the lease): a beat must be watched for the whole
        lease before it counts as standing still. A worker that joined anew has given up what it held before.
        """
        flat = await self._functions.call("holders", bus_keys(job))
        holders = [(flat[n].decode(), flat[n + 1].decode()) for n in range(0, len(flat), 2)]
        count = 0
        for token, worker in holders:
            if await self._is_over(worker, token):
                reason = f"the lease of worker {worker} ended: it died, or its beats did not arrive"
                count += int(await self._functions.call("requeue", bus_keys(job), token, reason))
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


def _numbers(position: str) -> tuple[int, int]:
    milliseconds, _, number = position.partition("-")
    return int(milliseconds), int(number or 0)


def _member(key: EpisodeKey) -> str:
    return f"{key.group}:{key.member}"


def _digest(item: Append) -> str:
    """What makes a resend recognizable; whether a segment ends its episode is a part of it.

    It finds a defect, no forger: who may append may append anything. A cryptographic digest took a fifth of the time
    of an append of 16 KiB.
    """
    return f"{crc32(item.payload):08x}{len(item.payload):x}" + ("f" if item.final else "")


def _entries(reply: object) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """The entries of an XREAD of one stream; the reply is empty, or one pair of name and entries."""
    if not reply:
        return []
    assert isinstance(reply, list)
    entries: list[tuple[bytes, dict[bytes, bytes]]] = reply[0][1]
    return entries
