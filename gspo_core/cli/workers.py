"""``gspo workers`` and ``gspo drain``: the processes that work on jobs, and asking one to leave."""

from __future__ import annotations

import json
from collections.abc import Mapping

from gspo_core.api_answers import Job, Worker
from gspo_core.cli.connection import connected
from gspo_core.cli.terminal import say
from gspo_core.client import Client

_STATES = {
    "draining": "is draining: {job} gives it back once nothing runs on it",
    "drained": "is drained and may be stopped",
}


HEADER = ("ROLE", "ID", "STATE", "HOLDS", "ON")


def show(url: str, *, as_json: bool) -> int:
    with connected(url) as client:
        found = client.workers()
        training = {} if as_json else _trained_by(client)
    if as_json:
        for one in found:
            print(json.dumps(one))
        return 0
    if not found:
        print("no process is registered; start the stack with: gspo up")
        return 0
    rows = [HEADER, *((one["role"], one["id"], _state(one), _held(one, training), _place(one)) for one in found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    say(*("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows))
    return 0


def _trained_by(client: Client) -> dict[str, Job]:
    """Trainer -> the job that it has."""
    open_jobs = [job for job in client.jobs() if job["finished_at"] is None]
    return {one["trainer"]: job for job in open_jobs for one in job["attempts"] if one["ended_at"] is None}


def _state(one: Worker) -> str:
    if not one["alive"]:
        return "gone"
    if one.get("draining"):
        return "draining" if one.get("state") == "draining" else "drained" if one["role"] == "engine" else "leaving"
    return str(one.get("state") or "alive")


def _held(one: Worker, training: Mapping[str, Job]) -> str:
    if one["role"] == "trainer":
        job = training.get(one["id"])
        return "no job" if job is None else f"{job['id']}, step {job['step']} of {job['steps']}"
    if one["role"] == "engine":
        label = one.get("label")
        return f"{one['job']}" + (f", weights {label}" if label else "") if one.get("job") else "no job"
    number, jobs = one.get("num_episodes", 0), one.get("jobs", [])
    episodes = "1 episode" if number == 1 else f"{number} episodes"
    return f"{episodes} of {', '.join(jobs)}" if jobs else episodes


def _place(one: Worker) -> str:
    """Where it computes, as far as it says."""
    device = one.get("device") or ""
    return ", ".join(text for text in (one.get("host") or "", device) if text)


def drain(url: str, process: str, *, undo: bool, as_json: bool) -> int:
    """An engine is named by its address, which no other process's name looks like."""
    with connected(url) as client:
        is_engine = undo or "://" in process
        found = client.drain_engine(process, undo=undo) if is_engine else client.drain_worker(process)
    if as_json:
        print(json.dumps(found))
        return 0
    if not is_engine:
        print(f"{process} was asked to leave" if found["alive"] else f"{process} has left")
        return 0
    print(f"{process} " + _STATES.get(found["state"], "is in use again").format(job=found["job"]))
    return 0
