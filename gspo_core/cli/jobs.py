"""``gspo submit``, ``jobs``, ``pause``, ``resume``, ``cancel``: a request each, and an answer that fits on a screen."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Literal

from gspo_core.api_answers import Job, Plan, Settings
from gspo_core.cli.command import CommandError
from gspo_core.cli.connection import connected
from gspo_core.cli.terminal import say

Verb = Literal["pause", "resume", "cancel"]


def submit(url: str, file: str, *, dry_run: bool, watch: bool, key: str | None = None) -> int:
    from gspo_core.spec import spec_warnings
    from gspo_core.spec_file import SpecFileError, load_job_spec

    try:
        spec = load_job_spec(Path(file))
    except SpecFileError as error:
        raise CommandError(str(error)) from error
    for warning in spec_warnings(spec):
        print(f"warning: {warning}", file=sys.stderr)
    with connected(url) as client:
        if dry_run:
            plan = client.plan_job(spec)
            print(json.dumps(plan, indent=2))
            _say_what_is_open(plan, set(spec_warnings(spec)))
            return 0
        job = client.create_job(spec, idempotency_key=key)
    print(job["id"])
    if not watch:
        print(f"follow it with: gspo watch {job['id']}", file=sys.stderr)
        return 0
    from gspo_core.cli.watch import watch as follow

    return follow(url, job["id"], as_json=False)


def _say_what_is_open(plan: Plan, said: Collection[str]) -> None:
    """In sentences, beside what is printed for programs."""
    for warning in plan["warnings"]:
        if warning not in said:
            print(f"warning: {warning}", file=sys.stderr)
    for question in plan.get("unchecked", ()):
        print(f"not checked: {question}", file=sys.stderr)
    print("the specification is valid; nothing was created", file=sys.stderr)


def show(url: str, *, as_json: bool) -> int:
    with connected(url) as client:
        jobs = list(client.jobs())
    if as_json:
        for job in jobs:
            print(json.dumps(job))
        return 0
    if not jobs:
        print("no jobs yet; submit one with: gspo submit FILE")
        return 0
    for job in jobs:
        say(*_lines(job))
    return 0


def _lines(job: Job) -> Iterator[str]:
    """The id first and whole, so that it can be copied into another command; a reason below, however long it is."""
    created = f"{job['created_at'][:16]}Z".replace("T", " ")
    yield f"{job['id']}  {job['status']:<10} step {job.get('step', 0):<6} {created}  {job.get('name') or ''}".rstrip()
    reason = job.get("status_reason")
    if reason and reason["message"] and job["status"] != "succeeded":
        yield f"    {reason['message']}"


def change(url: str, job_id: str, assignments: Sequence[str]) -> int:
    """``gspo set JOB optimizer.lr=5e-7``: values are JSON; what is none is text."""
    changes: Settings = {}
    for assignment in assignments:
        key, is_assigned, text = assignment.partition("=")
        if not is_assigned:
            raise CommandError(f"{assignment}: write KEY=VALUE, for example optimizer.lr=5e-7")
        *sections, name = key.split(".")
        place = changes
        for section in sections:
            inner = place.setdefault(section, {})
            if not isinstance(inner, dict):
                raise CommandError(f"{assignment}: {section} was already given a value")
            place = inner
        try:
            place[name] = json.loads(text)
        except ValueError:
            place[name] = text
    with connected(url) as client:
        job = client.change(job_id, changes)
    print(f"{job['id']} continues from its next step with {json.dumps(job['settings'])}")
    return 0


_REACHED = {"pause": ("paused",), "resume": ("running",), "cancel": ("succeeded", "failed", "cancelled")}
_ASKED = {"pause": "to pause", "resume": "to resume", "cancel": "to end"}


def control(url: str, job_id: str, verb: Verb, **manner: bool) -> int:
    """``pause``, ``resume`` and ``cancel``: wishes, which the job's trainer brings about."""
    with connected(url) as client:
        job = {"pause": client.pause, "resume": client.resume, "cancel": client.cancel}[verb](job_id, **manner)
    is_there = job["status"] in _REACHED[verb]
    print(f"{job['id']} is {job['status']}" + ("" if is_there else f"; it was asked {_ASKED[verb]}"))
    return 0
