"""Keys that talk to a job's policy without an episode, and the traffic that they leave.

The rule: a key is stored as a digest and counted where it is used, so a revoked or used-up one is refused at its next
request at every gateway. Traffic outlives neither its bounds of age and size nor its job's records, and is never
trained.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from services.state.functions import Functions
from services.state.keys import job_key, job_keys, service_key

PREFIX = "tk_"
MOST_AT_ONCE = 1000
"""Segments that one call drops."""
ErasedBy = Literal["t", "u", "k"]
"""A trace, a user, a key."""


@dataclass(frozen=True, slots=True)
class TalkKeyRecord:
    """A key as it is shown, with its use."""

    id: str
    label: str
    created_at: str
    expires_at: float | None
    """Unix seconds."""
    max_turns: int | None
    max_tokens: int | None
    max_seconds: float | None
    num_turns: int = 0
    num_tokens: int = 0
    seconds: float = 0.0

    @property
    def used_up(self) -> str:
        """As ``Full`` names it; empty where a turn may be had."""
        given = ("turns", self.num_turns, self.max_turns), ("tokens", self.num_tokens, self.max_tokens)
        limits = (*given, ("ms", self.seconds, self.max_seconds))
        return next((name for name, used, most in limits if most is not None and used >= most), "")


@dataclass(frozen=True, slots=True)
class TrafficRetention:
    """How much of a job's traffic is kept."""

    bytes: int
    days: float

    @property
    def ms(self) -> int:
        return int(self.days * 86_400_000)


@dataclass(frozen=True, slots=True)
class Entry:
    """One recorded segment."""

    id: str
    key: str
    trace: int
    user: str
    payload: bytes

    @property
    def at_ms(self) -> int:
        return int(self.id.partition("-")[0])


@dataclass(frozen=True, slots=True)
class Presented:
    """What the text of a key says; whether it is one is for Redis to say."""

    job: str
    id: str
    digest: str

    @classmethod
    def read(cls, text: str) -> Presented | None:
        job, _, rest = text.removeprefix(PREFIX).rpartition(".")
        job, _, key = job.rpartition(".")
        return cls(job, key, _digest(rest)) if text.startswith(PREFIX) and job and key and rest else None


class Talks:
    def __init__(self, functions: Functions) -> None:
        self._functions = functions

    async def make(self, job: str, given: TalkKeyRecord) -> str:
        """The key itself, which is not kept. Raises Missing."""
        secret = secrets.token_urlsafe(32)
        shown = {name: getattr(given, name) for name in ("label", "created_at", "expires_at")}
        most_ms = None if given.max_seconds is None else int(given.max_seconds * 1000)
        limits = ["" if limit is None else limit for limit in (given.max_turns, given.max_tokens, most_ms)]
        await self._functions.call(
            "make_talk_key", job_keys(job), given.id, _digest(secret), json.dumps(shown), *limits
        )
        return f"{PREFIX}{job}.{given.id}.{secret}"

    async def all(self, job: str) -> list[TalkKeyRecord]:
        return sorted(
            map(_read, await self._functions.call("talk_keys", job_keys(job))), key=lambda one: one.created_at
        )

    async def revoke(self, job: str, id: str) -> bool:
        return bool(await self._functions.call("revoke_talk_key", job_keys(job), id))

    async def use(self, presented: Presented, *, num_turns: int = 0, token: str = "") -> TalkKeyRecord:
        """``token``: of this call, to give its turns back. Raises Fenced for a key that is none, and Full, which names
        what it has used up."""
        given = presented.id, presented.digest, num_turns, token or secrets.token_hex(8)
        return _read(await self._functions.call("use_talk_key", job_keys(presented.job), *given))

    async def give_back(self, presented: Presented, num_turns: int, token: str) -> None:
        """The turns of the ``use`` that had this token were not needed, also where it is still to come."""
        keys = job_keys(presented.job)
        await self._functions.call("give_back_talk_turns", keys, presented.id, num_turns, token)

    async def record(
        self,
        job: str,
        key: str,
        trace: int,
        user: str,
        payloads: Sequence[bytes],
        *,
        tokens: int,
        s: float,
        keep: TrafficRetention,
        index: int | None = None,
    ) -> None:
        """``index``: in the trace, of the first segment; told again, nothing is recorded again. Raises Fenced once the
        key is revoked."""
        bounds, place = (keep.bytes, keep.ms), trace if index is None else f"{trace}/{index}"
        await self._functions.call(
            "record_traffic", job_keys(job), key, place, user, tokens, int(s * 1000), *bounds, *payloads
        )

    async def drop_old(self, job: str, keep: TrafficRetention) -> int:
        """How many segments are gone, of a bounded number at once."""
        bounds = keep.bytes, keep.ms
        return int(await self._functions.call("drop_old_traffic", job_keys(job), *bounds, MOST_AT_ONCE))

    async def jobs(self) -> list[str]:
        """All that there are."""
        return [job.decode() for job in await self._functions.redis.zrange(service_key("jobs"), 0, -1)]

    async def traffic(self, job: str, after: str = "-", *, count: int = 1000) -> list[Entry]:
        """In order; ``after`` is the id of an entry."""
        begin = "-" if after == "-" else f"({after}"
        entries = await self._functions.redis.xrange(job_key(job, "traffic"), begin, "+", count=count)
        return [
            Entry(id.decode(), fields[b"k"].decode(), int(fields[b"t"]), fields[b"u"].decode(), fields[b"d"])
            for id, fields in entries
        ]

    async def erase(self, job: str, by: ErasedBy, name: str) -> int:
        """How many segments are gone."""
        return int(await self._functions.call("erase_traffic", job_keys(job), by, name))


def _read(row: Sequence[bytes]) -> TalkKeyRecord:
    id, _, shown, *numbers = (value.decode() for value in row)
    max_turns, max_tokens, most_ms, turns, tokens, ms = numbers
    return TalkKeyRecord(
        id=id,
        **json.loads(shown),
        max_turns=int(max_turns) if max_turns else None,
        max_tokens=int(max_tokens) if max_tokens else None,
        max_seconds=int(most_ms) / 1000 if most_ms else None,
        num_turns=int(turns),
        num_tokens=int(tokens),
        seconds=int(ms) / 1000,
    )


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()
