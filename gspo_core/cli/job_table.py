"""``gspo jobs``: a line for each job under one header, as wide as what is in it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import PurePath

from gspo_core.api_answers import Job
from gspo_core.cli.connection import connected
from gspo_core.cli.terminal import say
from gspo_core.client import ApiError, Client

HEADER = ("ID", "STATUS", "STEP", "REWARD", "TOOK", "BEGAN (UTC)", "ENVIRONMENT", "MODEL", "NAME")
NUM_SHOWN = 20
LONGEST = 24
"""Characters of an environment, a model or a name in the table."""


def show(url: str, *, as_json: bool, number: int | None = NUM_SHOWN) -> int:
    """The newest ``number`` jobs; None: all."""
    with connected(url) as client:
        if as_json:
            for job in client.jobs():
                print(json.dumps(job))
            return 0
        jobs = list(islice(client.jobs(), None if number is None else number + 1))
        shown = jobs[:number]
        rewards = {job["id"]: last_reward(client, job) for job in shown}
    if not jobs:
        print("no jobs yet; submit one with: gspo submit FILE")
        return 0
    say(*table(shown, rewards, datetime.now(UTC)))
    if len(jobs) > len(shown):
        print(f"the newest {number}; older ones with --all")
    return 0


def last_reward(client: Client, job: Job) -> float | None:
    """The mean reward of its newest step; None if that has none, as where a fork has only been evaluated."""
    if not job["step"]:
        return None
    try:
        rows = client.metrics(job["id"], job["step"] - 1, names="reward/mean")
    except ApiError as error:
        if error.code != "unknown_metric":
            raise
        return None
    return next((row["reward/mean"] for row in reversed(rows) if "reward/mean" in row), None)


def table(jobs: Sequence[Job], rewards: Mapping[str, float | None], now: datetime) -> Iterator[str]:
    """The id first and whole, so that it can be copied into another command; a reason below, however long it is."""
    rows = [HEADER, *(_row(job, rewards[job["id"]], now) for job in jobs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row, job in zip(rows, (None, *jobs), strict=True):
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        reason = None if job is None else job["status_reason"]
        if job is not None and reason and reason["message"] and job["status"] != "succeeded":
            yield f"    {reason['message']}"


def _row(job: Job, reward: float | None, now: datetime) -> tuple[str, ...]:
    environments = job.get("environments") or []  # an older release does not say
    more = f" +{len(environments) - 1}" if len(environments) > 1 else ""
    return (
        job["id"],
        job["status"],
        f"{job['step']}/{job['steps']}",
        "-" if reward is None else f"{reward:.3f}",
        took(job, now),
        job["created_at"][:16].replace("T", " "),
        (_short(environments[0]) + more) if environments else "-",
        _short(PurePath(job["model"]).name),
        _short(job["name"] or ""),
    )


def took(job: Job, now: datetime) -> str:
    """From its beginning to its end, or until now."""
    if job["started_at"] is None:
        return "-"
    ended = now if job["finished_at"] is None else datetime.fromisoformat(job["finished_at"])
    return duration(max(0.0, (ended - datetime.fromisoformat(job["started_at"])).total_seconds()))


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


def _short(text: str) -> str:
    """Its end tells more than its beginning: a path, a class."""
    return text if len(text) <= LONGEST else "…" + text[-LONGEST + 1 :]
