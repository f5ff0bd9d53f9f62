"""The calls of the client by which agents fetch their episodes, keep them and end them.

One rule: a call may be repeated; a lease whose answer was lost is answered again under the same key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypedDict, TypeVar, Unpack
from urllib.parse import quote

from gspo_core.api_answers import EpisodeLease, Lease
from gspo_core.json_value import JSON

T = TypeVar("T")
# While it waits, the API looks for an episode; the answer is longer on its way than that of other calls.
WAIT_S = 20.0


class RequestParts(TypedDict, total=False):
    """What a call hands to the HTTP library."""

    params: Mapping[str, str]
    json: Mapping[str, JSON]
    content: bytes
    headers: dict[str, str]
    timeout: float


class LeaseCalls(Protocol):
    """Part of ``gspo_core.client.Client``."""

    def _ask(self, shape: type[T], method: str, path: str, **request: Unpack[RequestParts]) -> T: ...

    def lease_episode(self, job_id: str, *, lease_s: float = 300, wait_s: float = WAIT_S) -> EpisodeLease | None:
        """An episode of a job whose agents pull, to be played; None if none waits for so long. ApiError with the code
        ``job_over`` says that none will come."""
        params = {"lease_s": str(lease_s), "wait_s": str(wait_s)}
        path = f"/v1/jobs/{quote(job_id, safe='')}/episodes:lease"
        lease: EpisodeLease | None = self._ask(EpisodeLease, "POST", path, params=params, timeout=wait_s + 30)
        return lease

    def extend_lease(self, lease: Lease, *, lease_s: float = 300) -> Lease:
        """A sign of life; requests for turns are such signs too."""
        return self._lease_call(lease, "extend", {"lease_s": str(lease_s)})

    def finish_lease(self, lease: Lease, reward: float | None = None) -> Lease:
        """The episode was played to its end."""
        return self._lease_call(lease, "finish", {} if reward is None else {"reward": str(reward)})

    def release_lease(self, lease: Lease) -> Lease:
        """Give the episode to another agent, which begins it again."""
        return self._lease_call(lease, "release", {})

    def _lease_call(self, lease: Lease, what: str, params: Mapping[str, str]) -> Lease:
        path = f"/v1/jobs/{quote(lease['job_id'], safe='')}/leases/{lease['id']}/{what}"
        return self._ask(Lease, "POST", path, params=params)
