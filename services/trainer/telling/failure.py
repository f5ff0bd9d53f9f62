"""Why a job cannot go on, as its owner is told: a code of the documented list and a sentence."""

from __future__ import annotations

from services.state.jobs import StatusReason

CANCELLED = StatusReason("user_cancelled", "cancelled on request")
AWAY = StatusReason("redis_unavailable", "its trainer could not reach Redis, or was refused for a while")
NO_ROOM = StatusReason("disk_full", "its trainer found no room to write")
# Ends an attempt whose queue holds records that nobody can read; the queue is emptied before the next one.
QUEUE_DAMAGED = "queue_damaged"


class JobFailure(Exception):
    """Ends the job as ``failed``; ``code`` is its reason."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class AttemptFailed(Exception):
    """Ends this attempt, which counts; another one may go on with the job. ``code`` is its cause."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class RanksLost(AttemptFailed):
    """The ranks can compute nothing together any more; all their processes have to be started again."""

    def __init__(self, message: str) -> None:
        super().__init__("rank_lost", message)
