"""Does a job do what the API said yes to? Settings hold from the next step on, who is held stands still."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from gspo_core.live_settings import live_values
from tests.chaos.evidence import JobEvidence


def settings_are_obeyed(job: JobEvidence) -> Iterator[str]:
    asked = [live_values(act["changes"]) for act in job.acts if act["act"] == "change"]
    before = 0
    for step, settings in _settings(job):
        if settings["version"] < before:
            yield f"step {step} has the settings {settings['version']}, a step before it had {before}"
        before = settings["version"]
        if unasked := [
            key for key, value in settings["values"].items() if not any((key, value) in one.items() for one in asked)
        ]:
            yield f"step {step} has settings that nobody asked for: {unasked}"
    for act in (act for act in job.acts if act["act"] == "changed"):
        yield from _not_obeyed(job, act)


def _settings(job: JobEvidence) -> list[tuple[int, dict[str, Any]]]:
    found = [(place[1], dict(batch.extra["settings"])) for place, batch in job.batches.items()]
    return sorted(found, key=lambda one: one[0])


def _not_obeyed(job: JobEvidence, act: dict[str, Any]) -> Iterator[str]:
    """The step that was under way when the answer came may still have the old ones, and no later one."""
    later = [step for step, at in _times(job) if at > act["at"]][1:]
    since = _not_before(job, act)
    settings = dict(_settings(job))
    for step in later:
        for key, value in live_values(act["changes"]).items():
            if settings[step]["values"].get(key) not in [value, *(one[key] for one in since if key in one)]:
                yield f"step {step} does not have {key} {value}, to which the API had said yes"


def _not_before(job: JobEvidence, act: dict[str, Any]) -> list[dict[str, Any]]:
    """What was asked and not done when this was asked: it may have changed the same key again."""
    (asked_at,) = (one["at"] for one in job.acts if one["act"] == "change" and one["change"] == act["change"])
    done = {one["change"] for one in job.acts if one["act"] == "changed" and one["at"] < asked_at}
    asked = [one for one in job.acts if one["act"] == "change" and one["change"] != act["change"]]
    return [dict(live_values(one["changes"])) for one in asked if one["change"] not in done]


def _times(job: JobEvidence) -> list[tuple[int, float]]:
    """When each step of the lineage was written down."""
    return sorted((place[1], job.batch_path(place).stat().st_mtime) for place in job.batches)


def who_is_held_stands_still(job: JobEvidence) -> Iterator[str]:
    for begin, end in _asked_holds(job):
        # The first one may have been under way when the answer came.
        if later := [step for step, at in _times(job) if begin < at < end][1:]:
            yield f"the steps {later} were taken although the API had said yes to a pause"
    for begin, end in _holds(job):
        for step, at in _times(job):
            if begin < at < end:
                yield f"step {step} was taken {at - begin:.2f} s after the job said that it was paused"


def _asked_holds(job: JobEvidence) -> Iterator[tuple[float, float]]:
    """From the answer to the request to go on, which none is where the job ended first; not where an earlier one of
    those may come late."""
    asked = None
    for act in job.acts:
        if act["act"] == "resume unheard":
            return
        if act["act"] == "pause" and act["answer"] == "yes":
            asked = act["at"]
        elif act["act"] == "resume" and asked is not None:
            yield asked, act["at"]
            asked = None
    if asked is not None:
        yield asked, math.inf


def _holds(job: JobEvidence) -> Iterator[tuple[float, float]]:
    stands = None
    for act in job.acts:
        if act["act"] == "stands":
            stands = act["at"]
        elif act["act"] == "resume" and stands is not None:
            yield stands, act["at"]
            stands = None
