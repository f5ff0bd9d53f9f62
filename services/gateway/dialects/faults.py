"""Errors of a request before they are written in a dialect: a status, names for programs, words for people.

Rule: whether to send a request again is said outright (``x-should-retry``), since clients would otherwise repeat a
conflict and an ended episode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.gateway.dialects.turns import Refusal, RefusalKind

# Two tries of a client that was not set up for it then outlast a restart.
RETRY_AFTER_S = 5


@dataclass(frozen=True, slots=True)
class Fault:
    status: int
    code: str
    message: str
    param: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


_STATUSES: Mapping[RefusalKind, tuple[int, str]] = {
    RefusalKind.INVALID: (400, "invalid_request"),
    RefusalKind.UNKNOWN_KEY: (401, "invalid_api_key"),
    RefusalKind.OVER_BUDGET: (400, "rollout_stopped"),
    RefusalKind.ENDED: (409, "episode_ended"),
    RefusalKind.TOO_LONG: (400, "context_length_exceeded"),
    RefusalKind.TOO_MANY: (429, "too_many_requests"),
    RefusalKind.AWAY: (503, "unavailable"),
}


def fault_of(refusal: Refusal) -> Fault:
    status, code = _STATUSES[refusal.kind]
    headers = {"x-should-retry": "true" if refusal.may_retry else "false"}
    if refusal.may_retry:
        headers["retry-after"] = str(RETRY_AFTER_S)
    return Fault(status, code, refusal.message, refusal.param, headers)


def final(status: int, code: str, message: str) -> Fault:
    """An error of the request itself, which sending it again does not mend."""
    return Fault(status, code, message, headers={"x-should-retry": "false"})
