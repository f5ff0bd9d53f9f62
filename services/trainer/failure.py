"""Why a job cannot go on, as its owner is told: a code of the documented list and a sentence."""

from __future__ import annotations


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
