"""The calls of the client for keys that just talk, for what they said, and for erasing what people said."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol, TypeVar, Unpack
from urllib.parse import quote

from gspo_core.api_answers import Erased, ErasedEpisodes, NewTalkKey, TalkKey, Trace, TraceDetail
from gspo_core.client_leases import RequestParts

T = TypeVar("T")


class TrafficCalls(Protocol):
    """Part of ``gspo_core.client.Client``."""

    def _ask(self, shape: type[T], method: str, path: str, **request: Unpack[RequestParts]) -> T: ...

    def _pages(self, item: type[T], path: str, params: dict[str, str]) -> Iterator[T]: ...

    def make_talk_key(
        self,
        job_id: str,
        *,
        label: str = "",
        days: float | None = None,
        turns: int | None = None,
        tokens: int | None = None,
        seconds: float | None = None,
    ) -> NewTalkKey:
        """A key that talks to the newest weights of a running job; its ``key`` is shown this once."""
        given = {"label": label or None, "days": days, "turns": turns, "tokens": tokens, "seconds": seconds}
        params = {name: str(value) for name, value in given.items() if value is not None}
        return self._ask(NewTalkKey, "POST", _path(job_id, "talk_keys"), params=params)

    def talk_keys(self, job_id: str) -> list[TalkKey]:
        return list(self._pages(TalkKey, _path(job_id, "talk_keys"), {}))

    def revoke_talk_key(self, job_id: str, key_id: str) -> None:
        self._ask(type(None), "DELETE", _path(job_id, f"talk_keys/{quote(key_id, safe='')}"))

    def traces(self, job_id: str, *, user: str | None = None) -> Iterator[Trace]:
        """What such keys said, the newest conversation first."""
        params = {"limit": "100"} | ({} if user is None else {"user": user})
        yield from self._pages(Trace, _path(job_id, "traces"), params)

    def trace(self, job_id: str, trace_id: str, *, with_tokens: bool = False) -> TraceDetail:
        params: Mapping[str, str] = {"include": "tokens"} if with_tokens else {}
        return self._ask(TraceDetail, "GET", _path(job_id, f"traces/{quote(trace_id, safe='')}"), params=params)

    def erase_trace(self, job_id: str, trace_id: str) -> Erased:
        return self._ask(Erased, "DELETE", _path(job_id, f"traces/{quote(trace_id, safe='')}"))

    def erase_user(self, job_id: str, user: str) -> Erased:
        """All that one user said and was told with such keys."""
        return self._ask(Erased, "DELETE", _path(job_id, "traces"), params={"user": user})

    def erase_episode(self, episode_id: str) -> ErasedEpisodes:
        """One, trained or not, by `JOB/GROUP/MEMBER`."""
        return self._ask(ErasedEpisodes, "DELETE", f"/v1/episodes/{quote(episode_id, safe='/')}")

    def erase_episodes(self, job_id: str, user: str) -> ErasedEpisodes:
        """All in which a turn was asked for in the name of ``user``, trained or not."""
        return self._ask(ErasedEpisodes, "DELETE", _path(job_id, "episodes"), params={"user": user})


def _path(job_id: str, rest: str) -> str:
    return f"/v1/jobs/{quote(job_id, safe='')}/{rest}"
