"""Which job is meant: a whole id, the beginning of one, ``last``, or a name that only one job has."""

from __future__ import annotations

import re

from gspo_core.api_answers import Job
from gspo_core.cli.command import CommandError
from gspo_core.cli.connection import connected

LAST = "last"
_WHOLE = re.compile(r"job_[0-9a-z]{26}")
_PREFIX = "job_"
_SHOWN = 5


def job_meant(url: str, text: str) -> str:
    """The id of a job. Whole ids cost no request. Raises CommandError."""
    if _WHOLE.fullmatch(text):
        return text
    with connected(url) as client:
        return _meant(list(client.jobs()), text)


def place_meant(url: str, text: str, mark: str) -> str:
    """As ``job_meant`` for what begins with a job: ``last@3``, ``job_01h/17/2``."""
    job, is_marked, rest = text.partition(mark)
    return job_meant(url, job) + is_marked + rest


def _meant(jobs: list[Job], text: str) -> str:
    """``jobs``: all, the newest first."""
    if not jobs:
        raise CommandError("there are no jobs yet; submit one with: gspo submit FILE")
    if text == LAST:
        return jobs[0]["id"]
    beginning = text if text.startswith(_PREFIX) else _PREFIX + text
    found = [job for job in jobs if job["id"] == text] or [job for job in jobs if job["name"] == text]
    found = found or [job for job in jobs if text and job["id"].startswith(beginning)]
    if len(found) == 1:
        return found[0]["id"]
    if not found:
        raise CommandError(f"there is no job {text!r}: write its id, the beginning of it, its name, or `{LAST}`")
    shown = ", ".join(job["id"] for job in found[:_SHOWN]) + (", ..." if len(found) > _SHOWN else "")
    raise CommandError(f"{text!r} may be {len(found)} jobs ({shown}): write more of the id, or `{LAST}` for the newest")
