"""``gspo workers`` and ``gspo drain``: the processes that work on jobs, and asking one to leave."""

from __future__ import annotations

import json

from gspo_core.api_answers import Worker
from gspo_core.cli.connection import connected
from gspo_core.cli.terminal import say

_STATES = {
    "draining": "is draining: {job} gives it back once nothing runs on it",
    "drained": "is drained and may be stopped",
}


def show(url: str, *, as_json: bool) -> int:
    with connected(url) as client:
        found = client.workers()
    for one in found:
        say(json.dumps(one) if as_json else _line(one))
    if not found and not as_json:
        print("no process is registered; start the stack with: gspo up")
    return 0


def _line(one: Worker) -> str:
    notes = ["" if one["alive"] else "gone", str(one.get("state") or ""), f"job {one['job']}" if one.get("job") else ""]
    if one.get("draining") and one.get("state") != "draining":
        notes.append("drained")
    return f"{one['role']:<8} {one['id']}  {', '.join(note for note in notes if note)}".rstrip()


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
