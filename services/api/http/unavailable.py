"""The text of a 503 whose cause lies below the API: a code, the problem, and who can solve it.

The rule: every reason for which Redis can be away has an answer, and no answer shows keys or addresses. The HTTP answer
is made in ``services.api.http.errors``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from services.files.disk_space import lacks_room
from services.state.client import Away, AwayReason, CredentialsRefused


class Unavailable(NamedTuple):
    code: str
    message: str


def unavailable(error: Exception) -> Unavailable | None:
    """The answer to an error that says "not now"; None for any other error."""
    if isinstance(error, Away):
        return _AWAY[error.reason]
    if isinstance(error, CredentialsRefused):
        return _CREDENTIALS_REFUSED
    if isinstance(error, OSError) and lacks_room(error):
        return _DISK_FULL
    return None


_AWAY: Mapping[AwayReason, Unavailable] = {
    AwayReason.UNREACHABLE: Unavailable("redis_unavailable", "Redis does not answer; nothing was lost, try again"),
    AwayReason.NO_CONNECTION: Unavailable("redis_unavailable", "all connections to Redis are in use; try again"),
    AwayReason.LOADING: Unavailable("redis_unavailable", "Redis is starting and loading its data; try again"),
    AwayReason.TRYAGAIN: Unavailable("redis_unavailable", "Redis is moving data between nodes; try again"),
    AwayReason.UNBLOCKED: Unavailable("redis_unavailable", "Redis changed its role during this request; try again"),
    AwayReason.NO_FUNCTIONS: Unavailable(
        "redis_unavailable",
        "Redis lacks our functions; the API or a trainer whose user may load them has to reach it, then try again",
    ),
    AwayReason.CLUSTERDOWN: Unavailable(
        "redis_unavailable",
        "the Redis cluster is down; try again; if that does not help, its operator must bring its nodes back",
    ),
    AwayReason.MASTERDOWN: Unavailable(
        "redis_unavailable",
        "this Redis is a replica that has lost its primary; try again; if that does not help, its operator must "
        "bring the primary back",
    ),
    AwayReason.BUSY: Unavailable(
        "redis_busy",
        "Redis is running a script that does not end; try again; if that does not help, its operator must end it "
        "(FUNCTION KILL or SCRIPT KILL)",
    ),
    AwayReason.OOM: Unavailable(
        "redis_full",
        "Redis is out of memory; try again later: running jobs free some, or its operator must raise maxmemory",
    ),
    AwayReason.MISCONF: Unavailable(
        "redis_full",
        "Redis cannot write to its disk and refuses new data; its operator must free space there, then try again",
    ),
    AwayReason.READONLY: Unavailable(
        "redis_read_only",
        "this Redis is a replica and takes no writes; try again after a failover, or its operator must point "
        "GSPO_REDIS_URL at the primary",
    ),
    AwayReason.NOREPLICAS: Unavailable(
        "redis_no_replicas",
        "too few replicas of Redis are connected for it to take writes (min-replicas-to-write); its operator must "
        "bring them back, then try again",
    ),
}
_CREDENTIALS_REFUSED = Unavailable(
    "redis_credentials_refused",
    "Redis rejects this service's user or password; its operator must correct GSPO_REDIS_URL",
)
_DISK_FULL = Unavailable("disk_full", "the disk of the service is full; its operator must free space, then try again")
