"""The queue between trainer and workers: groups dispatched, episodes leased, segments appended, groups committed.

Duty: the life of a group in Redis. The rule: every write is one atomic, fenced, idempotent function, so acknowledged
data is never lost and a resend never counts twice. A worker has ONE lease, renewed by one beat; its token fences the
episodes it holds. It does not look into payloads and decides nothing about training.

Memory: ``dispatch`` reserves the bytes an episode may need and refuses beyond a budget; an append is never refused for
bytes, so every admitted episode can finish. Episodes whose leases repeatedly end badly without further progress are
given up (a dead letter with the reason); their group becomes ready without them.

Readers of segments beware: ``restart`` deletes the segments of the previous attempt, ``commit`` those of the group, and
a reader may already have read some. The reader must drop them: a segment of a higher attempt supersedes all
lower-attempt segments of the same episode, and a committed group is settled. A stream position that no longer exists
(the server was wiped) counts as "0" if it lies ahead of the new stream.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from uuid import uuid4

from gspo_core.types import EpisodeKey, Split
from services.state.client import MAX_BLOCK_MS, RedisClient, RedisFault
from services.state.functions import Functions
from services.state.keys import bus_keys, job_key, service_key, service_keys
from services.state.leases import BeatWatch
from services.state.queue_records import (
    Append,
    AwaitedReward,
    DeadLetter,
    EpisodeView,
    ErasedWord,
    GroupEnd,
    GroupView,
    Joined,
    Kept,
    LeasedEpisode,
    PostedReward,
    QueueUsage,
    ReadyGroup,
    RewardWord,
    Snapshot,
    Stage,
    Waiting,
    digest_of,
    digest_of_bytes,
    member_name,
    read_awaited,
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
    "EpisodeView",
    "Fenced",
    "Full",
    "Gap",
    "GroupView",
    "Kept",
    "LeasedEpisode",
    "QueueUsage",
    "ReadyGroup",
    "Snapshot",
    "Stage",
]

# A function blocks the server while it runs; committing hundreds of groups in one call would stall every client.
GROUPS_PER_COMMIT = 8
GROUPS_PER_LOOK = 64
EXPIRED_PER_CALL = 64
ITEMS_REMEMBERED_PER_CALL = 2048
ITEMS_OF_A_REWARD = 3
MAX_REASON_CHARS = 500
MAX_NOTE_CHARS = 500
_OVER = (b"gone", b"dead", b"done", b"waiting")

_REASON = re.compile(r"trained|evaluated|dropped_[a-z0-9_]{1,40}")


class Bus:
    """``lease_s``: a worker whose beat stands still this long loses its episodes to the next caller of ``reap``."""

    def __init__(
        self, redis: RedisClient, *, lease_s: float = 30.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._functions = Functions(redis)
        self._redis = self._functions.redis
        self._watch = BeatWatch(lease_s, clock)
        # A lease whose reply was lost is requested again under the same name, so its episodes are not stranded.
        self._unanswered: dict[tuple[str, str], str] = {}
        # One at a time: the server remembers only the reply to the last request.
        self._leasing = asyncio.Lock()

    async def load_functions(self) -> None:
        """Make sure the server has our functions; raises LibraryTooOld, LibraryTooNew."""
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
        reads: int = 0,
    ) -> bool:
        """Queue the ``size`` episodes of a group. False: the group already exists.

        Reserves ``bytes_per_episode`` for each until it ends. Full: the job would then exceed ``budget_bytes``.
        ``reads``: the newest schema of segments that the caller reads.
        """
        if group < 0 or size < 1 or bytes_per_episode < 0:
            raise ValueError(
                f"a group needs a number >= 0, at least one episode and bytes >= 0, not {group}, {size} and "
                f"{bytes_per_episode}"
            )
        budget = "" if budget_bytes is None else budget_bytes
        reply = await self._functions.call(
            "dispatch",
            bus_keys(job),
            *(token, group, size, str(split), task_index, environment, bytes_per_episode, budget, reads),
        )
        return bool(reply)

    async def read_segments(
        self, job: str, after: str = "0", *, count: int = 256, block_ms: int = 200
    ) -> list[tuple[str, bytes]]:
        """Up to ``count`` segments appended after the position ``after``, as (position, payload), in order.

        Waits at most ``block_ms`` for the first one (0: no wait). On segments that vanish later, see the module.
        """
        stream = job_key(job, "segments")
        reply = await self._redis.xread({stream: after}, count=count, block=min(block_ms, MAX_BLOCK_MS) or None)
        if not reply and await self._is_of_another_stream(stream, after):
            reply = await self._redis.xread({stream: "0"}, count=count)
        return [(entry_id.decode(), fields.get(b"d", b"")) for entry_id, fields in _entries(reply)]

    async def newest_segment(self, job: str) -> str:
        """The position behind the newest segment that was ever appended; it moves with each."""
        try:
            info = await self._redis.xinfo_stream(job_key(job, "segments"))
        except RedisFault:
            return ""  # nothing appended yet
        return str(info["last-generated-id"].decode())

    async def _is_of_another_stream(self, stream: str, position: str) -> bool:
        """Whether the server was wiped and its clock lags: its stream will not reach that position for a long time."""
        try:
            info = await self._redis.xinfo_stream(stream)
        except RedisFault:
            return False  # nothing appended yet
        return _numbers(info["last-generated-id"].decode()) < _numbers(position)

    async def ready_groups(self, job: str) -> list[ReadyGroup]:
        """Complete, uncommitted groups in order of completion."""
        rows = await self._functions.call("ready", bus_keys(job), "erased")
        return [read_ready(row) for row in rows]

    async def open_groups(self, job: str) -> list[int]:
        """All dispatched, uncommitted groups, for a recovering trainer to compare with its own list."""
        return sorted(int(group) for group in await self._redis.hkeys(job_key(job, "groups")))

    async def commit(
        self, job: str, token: str, step: int, groups: Sequence[int], *, reason: GroupEnd = "trained"
    ) -> None:
        """Settle groups: delete them with all their segments and count them under ``reason``.

        ``reason`` is trained, evaluated or dropped_<why>. Call it only when the batch log of ``step`` is durable.
        Missing groups are skipped, so the call may be repeated after an error. Incomplete groups may be committed;
        later appends by their workers are Fenced.
        """
        if not _REASON.fullmatch(reason):
            raise ValueError(f"a group is settled as trained, evaluated or dropped_<why>, not {reason!r}")
        keys = bus_keys(job)
        for first in range(0, max(len(groups), 1), GROUPS_PER_COMMIT):
            chunk = groups[first : first + GROUPS_PER_COMMIT]
            await self._functions.call("commit", keys, token, step, reason, *chunk)

    async def cancel(self, job: str, token: str, group: int) -> int:
        """End every unfinished episode of a group without an outcome; returns how many there were.

        The group is then ready. Later appends to these episodes are Fenced.
        """
        return int(await self._functions.call("cancel", bus_keys(job), token, group))

    async def seal(self, job: str, token: str, groups: Mapping[int, Sequence[int]]) -> bool:
        """Before members of groups go into a batch log: from now on until their commit none of them is erased here.

        False: one of them was erased; nothing is sealed.
        """
        written: list[int | str] = []
        for group, members in groups.items():
            written += [group, ",".join(map(str, members))]
        return bool(await self._functions.call("seal", bus_keys(job), token, *written))

    async def erase(self, key: EpisodeKey) -> ErasedWord:
        """Delete all that was read and said in an episode, whatever its stage; it has then ended without an outcome.

        Its group goes on without it. A worker that plays it is told ``EpisodeErased``. Workers may not call
        this.
        """
        word: bytes = await self._functions.call("erase_episode", bus_keys(key.job), member_name(key))
        return ErasedWord(word.decode())

    async def empty_queue(self, job: str, token: str) -> int:
        """Remove every group after a ``Damaged``; returns the number of open ones, all to be dispatched again."""
        return int(await self._functions.call("empty_queue", bus_keys(job), token))

    async def counters(self, job: str) -> dict[str, int]:
        """Groups dispatched, settled by reason, and in flight; dispatched always equals the sum of the others."""
        flat = await self._functions.call("counters", bus_keys(job))
        counts = {"dispatched": 0, "trained": 0, "evaluated": 0}
        counts.update({name.decode(): int(count) for name, count in zip(flat[::2], flat[1::2], strict=True)})
        return counts

    # Read-only views, for any process.

    async def usage(self, job: str) -> QueueUsage:
        """The job's bytes in Redis, at one instant."""
        values = await self._functions.call("usage", bus_keys(job))
        return QueueUsage(*(int(value or 0) for value in values))

    async def groups(self, job: str, *, after: int = -1, limit: int = 100) -> list[GroupView]:
        """Up to ``limit`` uncommitted groups with their episodes, by number; ``after`` is exclusive.

        Each group is read atomically, the list is not.
        """
        numbers = [number for number in await self.open_groups(job) if number > after][:limit]
        views: list[GroupView] = []
        for first in range(0, len(numbers), GROUPS_PER_LOOK):
            rows = await self._functions.call("inspect", bus_keys(job), *numbers[first : first + GROUPS_PER_LOOK])
            views += [read_group(job, row) for row in rows]
        return views

    async def dead_letters(self, job: str, after: str = "0", *, count: int = 100) -> list[DeadLetter]:
        """The newest thousand abandoned episodes, oldest first; ``after`` is a letter's id."""
        entries = await self._redis.xrange(job_key(job, "dead_letters"), f"({after}", "+", count=count)
        return [read_dead_letter(job, entry_id, fields) for entry_id, fields in entries]

    # The worker's side, fenced by the token of its one lease.

    async def join(self, worker: str) -> str:
        """Begin a lease; returns its token. Ends any earlier lease under the same name."""
        token = uuid4().hex
        await self._functions.call("join", service_keys(), worker, token)
        return token

    async def join_in_place(self, worker: str, place: str, generation: int = 0) -> Joined:
        """Like ``join``, in the place of a worker that is dead: its lease ends too, and ``reap`` finds its episodes.

        Of a ``place`` at most one process lives: the caller sees to that. ``generation``: in which this process had the
        place before; 0 if it had not. Where another process took it later, this one joins without it.
        """
        token = uuid4().hex
        reply = await self._functions.call("join", service_keys(), worker, token, place, generation)
        return Joined(token, int(reply))

    async def beat(self, worker: str, token: str) -> None:
        """Renew the lease, at least every fifth of its length. Fenced: it is over; drop all episodes and join again."""
        await self._functions.call("beat", service_keys(), worker, token)

    async def leave(self, worker: str, token: str) -> None:
        """End the lease in an orderly way, after handing everything back."""
        await self._functions.call("end_lease", service_keys(), worker, token, "")

    async def lease(self, job: str, worker: str, token: str, limit: int) -> list[LeasedEpisode]:
        """Lease up to ``limit`` episodes: returned ones before new ones, oldest first.

        After an error the next call returns the episodes the failed call leased, if any, whatever its own limit.
        """
        async with self._leasing:
            request = self._unanswered.setdefault((job, token), uuid4().hex)
            rows = await self._functions.call("lease", bus_keys(job), worker, token, request, max(limit, 0), "epoch")
            del self._unanswered[job, token]
        return [read_lease(job, row) for row in rows]

    async def take(self, job: str, worker: str, token: str, keys: Sequence[EpisodeKey]) -> list[LeasedEpisode]:
        """Lease exactly these episodes, as far as they wait for a worker or already belong to this one.

        For callers that agree elsewhere on which worker plays which episode; other workers call ``lease``.
        """
        if not keys:
            return []
        names = [member_name(key) for key in keys]
        rows = await self._functions.call("take", bus_keys(job), worker, token, "epoch", *names)
        return [read_lease(job, row) for row in rows]

    async def append(self, job: str, token: str, appends: Sequence[Append | Kept]) -> None:
        """Append segments of one or several episodes in one atomic call: all of them or none.

        Segments already present are skipped, and so is a snapshot that the episode has moved past. Fenced: an episode
        is not (or no longer) this worker's in this attempt. Gap: the server holds less than the caller thinks.
        Conflict: the segment exists with other content, or its episode has ended. The errors name the first such
        segment; the rest may be sent again without it.
        """
        args: list[str | bytes | int] = []
        for item in appends:
            if item.key.job != job:
                raise ValueError(f"{item.key} is not an episode of job {job}")
            if isinstance(item, Kept):
                at = item.snapshot
                kind, digest = ("part", digest_of_bytes(at.data)) if item.is_part else ("world", "")
                args += [member_name(item.key), at.attempt, at.num_segments, kind, "", digest, at.data, ""]
                continue
            version = "" if item.version is None else item.version
            args += [
                member_name(item.key),
                item.attempt,
                item.index,
                int(item.final),
                version,
                digest_of(item),
                item.payload,
            ]
            args.append(item.note[:MAX_NOTE_CHARS])
        if args:
            await self._functions.call("append", bus_keys(job), token, *args)

    async def restart(self, key: EpisodeKey, token: str, attempt: int, kept: Sequence[Append] = ()) -> None:
        """Restart the episode as ``attempt``, one more than before; deletes its segments so far.

        ``kept`` are the new attempt's initial segments, from the first one up to the snapshot, which survives with
        them; Gap if there is no snapshot at that point.
        """
        args: list[str | bytes | int] = [kept[-1].note[:MAX_NOTE_CHARS] if kept else ""]
        for index, item in enumerate(kept):
            if (item.key, item.attempt, item.index, item.final) != (key, attempt, index, False):
                raise ValueError(f"attempt {attempt} of {key} does not begin with segment {item.index} of {item.key}")
            args += ["" if item.version is None else item.version, digest_of(item), item.payload]
        await self._functions.call("restart", bus_keys(key.job), token, member_name(key), attempt, *args)

    async def hand_back(self, job: str, token: str, keys: Sequence[EpisodeKey]) -> None:
        """Return episodes to the head of the queue. Skips those that the token does not (or no longer) hold."""
        if keys:
            await self._functions.call("hand_back", bus_keys(job), token, *(member_name(key) for key in keys))

    async def interrupt(self, job: str, token: str, keys: Sequence[EpisodeKey]) -> None:
        """Return episodes that have had their share; they queue behind all waiting episodes."""
        if keys:
            await self._functions.call("interrupt", bus_keys(job), token, *(member_name(key) for key in keys))

    async def num_queued(self, job: str) -> int:
        """Number of episodes waiting for a worker."""
        return int(await self._redis.zcard(job_key(job, "queue")))

    async def num_offered(self, job: str) -> int:
        """Number of episodes that wait for an agent to fetch them."""
        return int(await self._redis.zcard(job_key(job, "offered")))

    async def save_snapshot(self, key: EpisodeKey, token: str, snapshot: Snapshot) -> None:
        """Keep an episode's world until it ends or restarts. Raises the same errors as ``append``."""
        await self._functions.call(
            "save_snapshot",
            bus_keys(key.job),
            *(token, member_name(key), snapshot.attempt, snapshot.num_segments, snapshot.data),
        )

    async def read_snapshot(self, key: EpisodeKey) -> Snapshot | None:
        """The newest snapshot, with all that was added to it."""
        held = await self._functions.call("read_snapshot", bus_keys(key.job), member_name(key), "parts")
        return None if held is None else Snapshot(int(held[0]), int(held[1]), held[2], tuple(held[3:]))

    async def fail(self, key: EpisodeKey, token: str, reason: str) -> None:
        """Return an episode that could not be played; unlike a hand-back, this counts as a failure.

        After three such leases in a row that got no further than an earlier one, the episode is given up. The first
        three deaths of its workers are not charged; then the episode is a suspect, and ``lease`` gives no worker two
        suspects. Skips an episode that the token does not (or no longer) hold.
        """
        await self._functions.call("fail", bus_keys(key.job), token, member_name(key), reason[:MAX_REASON_CHARS])

    async def read_episode(self, key: EpisodeKey) -> list[bytes]:
        """The appended segments of the current attempt, in order."""
        payloads: list[bytes] = await self._functions.call("read_episode", bus_keys(key.job), member_name(key))
        return payloads

    async def holder(self, key: EpisodeKey) -> str:
        """The worker that holds the episode; empty for none. Its lease may be over."""
        worker: bytes = await self._functions.call("holder_of", bus_keys(key.job), member_name(key))
        return worker.decode()

    async def was_erased(self, key: EpisodeKey) -> bool:
        """Known until the episode's group is settled."""
        return bool(await self._functions.call("holder_of", bus_keys(key.job), member_name(key), "erased"))

    async def is_over(self, key: EpisodeKey) -> bool:
        """It will not be played any more: it has ended, or its group or its job is settled."""
        return await self._functions.call("holder_of", bus_keys(key.job), member_name(key), "stage") in _OVER

    async def remember_rewards(self, key: EpisodeKey, token: str, attempt: int, said: Mapping[str, str]) -> None:
        """Before an episode ends: the tokens of the rewards that it took, each with what it said, as ``look_at_reward``
        has it. Raises the same errors as ``append``."""
        items = [text for pair in said.items() for text in pair]
        for first in range(0, len(items), ITEMS_REMEMBERED_PER_CALL):
            some = items[first : first + ITEMS_REMEMBERED_PER_CALL]
            await self._functions.call("remember_rewards", bus_keys(key.job), token, member_name(key), attempt, *some)

    # Rewards that come after their episode has ended. The process that receives one takes it: the key that it came with
    # is proof, so no lease is needed. Times are Unix seconds of the caller's clock.

    async def await_reward(self, token: str, end: Append, kept: bytes, deadline: float) -> None:
        """End an episode but for its reward. ``end`` is its last segment, used if none comes until ``deadline``.

        Raises the same errors as ``append``.
        """
        segment = (member_name(end.key), end.attempt, end.index, end.payload, digest_of(end))
        rest = (kept, _ms(deadline), end.note[:MAX_NOTE_CHARS])
        await self._functions.call("await_reward", bus_keys(end.key.job), token, *segment, *rest)

    async def look_at_reward(
        self, key: EpisodeKey, attempt: int, token: str, now: float, *, said: str = "", epoch: int | None = None
    ) -> RewardWord | AwaitedReward:
        """What a reward with this token would be for. ``said``: which one it is, in words that are the same whenever it
        is sent; ``epoch``: in which that attempt was dispatched."""
        since = "" if epoch is None else epoch
        row = await self._functions.call(
            "look_at_reward", bus_keys(key.job), member_name(key), attempt, token, _ms(now), since, said
        )
        return read_awaited(row)

    async def post_reward(
        self, end: Append, reward: PostedReward, *, said: str = "", seen: int, now: float
    ) -> RewardWord:
        """Pay a turn of an episode that waits. ``end`` is its last segment with that, if no more comes.

        ``seen``: how many such rewards the caller has seen.
        """
        items = (reward.turn, float(reward.value).hex())
        return await self._post(end, reward.token, now, seen, "turn", *items, said)

    async def settle_reward(self, end: Append, token: str, *, said: str = "", seen: int, now: float) -> RewardWord:
        """End the wait: ``end`` is the last segment, with the reward."""
        return await self._post(end, token, now, seen, "end", "", "", said)

    async def _post(self, end: Append, token: str, now: float, seen: int, *rest: str | int) -> RewardWord:
        place = (member_name(end.key), end.attempt, token, _ms(now), seen * ITEMS_OF_A_REWARD)
        segment = (end.payload, digest_of(end))
        word: bytes = await self._functions.call("post_reward", bus_keys(end.key.job), *place, *segment, *rest)
        return RewardWord(word.decode())

    async def expire_rewards(self, job: str, token: str, *, now: float) -> int:
        """End without a reward the episodes that waited too long; returns how many. For the job's trainer."""
        count = 0
        while True:
            some = await self._functions.call("expire_rewards", bus_keys(job), token, _ms(now), EXPIRED_PER_CALL)
            count += int(some)
            if int(some) < EXPIRED_PER_CALL:
                return count

    async def waiting(self, job: str) -> Waiting:
        episodes, late, missed, *groups = await self._functions.call("waiting", bus_keys(job))
        return Waiting(int(episodes), int(late), int(missed), tuple(sorted(int(group) for group in groups)))

    async def reap(self, job: str) -> int:
        """Take back the episodes of workers whose lease is over; returns how many.

        Processes that serve the job call this every fifth of the lease: a beat must be watched for the whole lease
        before it counts as standing still. A worker that joined again has given up its earlier episodes.
        """
        flat = await self._functions.call("holders", bus_keys(job))
        holders = [(flat[n].decode(), flat[n + 1].decode()) for n in range(0, len(flat), 2)]
        count = 0
        for token, worker in holders:
            if await self._is_over(worker, token):
                reason = f"the lease of worker {worker} expired: it died, or its heartbeats did not arrive"
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


def _ms(seconds: float) -> int:
    return round(1000 * seconds)


def _numbers(position: str) -> tuple[int, int]:
    milliseconds, _, number = position.partition("-")
    return int(milliseconds), int(number or 0)


def _entries(reply: object) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """The entries of an XREAD of one stream; the reply is empty, or one pair of name and entries."""
    if not reply:
        return []
    assert isinstance(reply, list)
    entries: list[tuple[bytes, dict[bytes, bytes]]] = reply[0][1]
    return entries
