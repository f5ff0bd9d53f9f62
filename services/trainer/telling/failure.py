"""Failures that end a job or an attempt, as shown to the owner: a documented code and a sentence."""

from __future__ import annotations

from services.state.jobs import StatusReason

CANCELLED = StatusReason("user_cancelled", "cancelled on request")
AWAY = StatusReason("redis_unavailable", "its trainer could not reach Redis, or was refused for a while")
NO_ROOM = StatusReason("disk_full", "its trainer found no room to write")
# Ends an attempt whose queue holds unreadable records; the queue is emptied before the next attempt.
QUEUE_DAMAGED = "queue_damaged"


class JobFailure(Exception):
    """Ends the job as ``failed``, with ``code`` as its reason."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class AttemptFailed(Exception):
    """Ends this attempt, which counts; another attempt may continue the job. ``code`` is the cause."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class RanksLost(AttemptFailed):
    """The ranks can no longer compute together; all their processes must restart."""

    def __init__(self, message: str) -> None:
        super().__init__("rank_lost", message)
