"""Failures that end a job or an attempt, as shown to the owner: a documented code and a sentence."""

from __future__ import annotations

from typing import Literal, TypeAlias

from services.state.jobs import CountedCode, FailureCode, StatusReason

AlertKind: TypeAlias = Literal[
    "disk_full",
    "disk_has_room",
    "redis_full",
    "redis_has_room",
    "segment_refused",
    "stale_backlog",
    "prompt_too_long",
    "no_tokens_sampled",
    "checkpoint_skipped",
    "batch_log_damaged",
    "fall_answered",
]
"""What an ``alert`` event says of trouble that ends neither job nor attempt; alarms on numbers are apart."""

CANCELLED = StatusReason("user_cancelled", "cancelled on request")
AWAY = StatusReason("redis_unavailable", "its trainer could not reach Redis, or Redis refused its commands for a while")
NO_ROOM = StatusReason("disk_full", "its trainer ran out of disk space")
# Ends an attempt whose queue holds unreadable records; the queue is emptied before the next attempt.
QUEUE_DAMAGED: CountedCode = "queue_damaged"


class JobFailure(Exception):
    """Ends the job as ``failed``, with ``code`` as its reason."""

    def __init__(self, code: FailureCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class AttemptFailed(Exception):
    """Ends this attempt, which counts; another attempt may continue the job. ``code`` is the cause."""

    def __init__(self, code: CountedCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class RanksLost(AttemptFailed):
    """The ranks can no longer compute together; all their processes must restart."""

    def __init__(self, message: str) -> None:
        super().__init__("rank_lost", message)
