"""Replays that this process works on; questions and answers lie in the job's directory (``services.files.replays``).

Rule: a question is worked on once, however many requests and processes ask; one at a time, in a process of its own that
ends with this one; few wait, and each has a bound of time. Nothing here needs torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from gspo_core.json_value import JSON
from services.api.views.replay_views import Status
from services.files.job_dir import JobDir
from services.files.replays import AskedReplay, Replays
from services.process.cancelling import cancel_all

# Each loads a model, and takes all of a core.
MAX_TOGETHER = 1
MAX_WAITING = 8
# The way from the base model to a late step may be hours long: that is for the command, which has no such bound.
MOST_S = 3600.0
MOST_SAID = 100_000
_TRAINED = re.compile(r"step \d+ trained ")


@dataclass
class _Work:
    """One replay that waits or runs."""

    trained: list[str] = field(default_factory=list)
    """What it said of each step that it trained."""
    is_running: bool = False
    task: asyncio.Task[None] | None = None


class ReplayWork:
    def __init__(self, most_s: float = MOST_S) -> None:
        self._most_s = most_s
        self._room = asyncio.Semaphore(MAX_TOGETHER)
        self._works: dict[tuple[str, str], _Work] = {}

    @property
    def is_full(self) -> bool:
        return len(self._works) >= MAX_TOGETHER + MAX_WAITING

    def begin(self, job: JobDir, found: AskedReplay) -> None:
        """Does nothing where this process works on it already."""
        key = (job.id, found.id)
        if key not in self._works:
            work = self._works[key] = _Work()
            work.task = asyncio.create_task(self._work(job, found, work), name=f"replay {job.id}/{found.id}")

    async def stop(self, job: JobDir, name: str) -> None:
        work = self._works.get((job.id, name))
        if work is not None and work.task is not None:
            await cancel_all([work.task])

    def said(self, job: JobDir, name: str) -> list[str] | None:
        """None where this process does not work on it."""
        work = self._works.get((job.id, name))
        return None if work is None else work.trained

    def status(self, job: JobDir, found: AskedReplay) -> Status:
        """Blocking: call it in a thread."""
        if found.answered is not None:
            return "done" if "answer" in found.answered else "failed"
        work = self._works.get((job.id, found.id))
        if work is not None:
            return "running" if work.is_running else "waiting"
        return "running" if Replays(job).is_held(found.id) else "interrupted"

    async def close(self) -> None:
        """Abandon all; their processes end with this one."""
        await cancel_all([work.task for work in self._works.values() if work.task is not None])

    async def _work(self, job: JobDir, found: AskedReplay, work: _Work) -> None:
        store = Replays(job)
        try:
            async with self._room:
                with store.held(found.id) as is_mine:
                    if not is_mine:  # another process is at it, or it was removed
                        return
                    work.is_running = True
                    answered = await self._answer(job, found.asked["question"], work)
                    await asyncio.to_thread(_keep, store, job, found, answered)
        finally:
            self._works.pop((job.id, found.id), None)

    async def _answer(self, job: JobDir, question: Mapping[str, JSON], work: _Work) -> dict[str, JSON]:
        # A task of its own: cancelled twice, by the bound and by a stop, this one would not wait for its process.
        training = asyncio.create_task(_trained_again(job, question, work))
        try:
            await asyncio.wait([training], timeout=self._most_s)
            is_over = training.done()
        finally:
            await cancel_all([training])
        too_long: dict[str, JSON] = {"message": f"it took more than {self._most_s:g} s: gspo replay has no such bound"}
        return {**(training.result() if is_over else too_long), "finished_at": now()}


async def _trained_again(job: JobDir, question: Mapping[str, JSON], work: _Work) -> dict[str, JSON]:
    from services.process.children import die_with_parent  # few processes ever replay

    # -P keeps the caller's folder off the path: a user's own package must not shadow ours. GPUs belong to trainers and
    # engines.
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "gspo_core.replay.answer_process", str(job.path)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        preexec_fn=die_with_parent(),
        limit=MOST_SAID,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        process.stdin.write(json.dumps(question).encode())
        process.stdin.close()
        answer, last = await asyncio.gather(process.stdout.read(), _listen(process.stderr, work))
        if await process.wait():
            return {"message": last or f"the process ended with {process.returncode}"}
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    return {"answer": json.loads(answer)}


async def _listen(stream: asyncio.StreamReader, work: _Work) -> str:
    """The last line; those that tell of a step are noted."""
    last = ""
    async for line in stream:
        last = line.decode(errors="replace").strip() or last
        if _TRAINED.match(last):
            work.trained.append(last)
    return last


def _keep(store: Replays, job: JobDir, found: AskedReplay, answered: Mapping[str, JSON]) -> None:
    """An episode that was erased meanwhile is not shown: erasing looks for answers after the logs."""
    from gspo_core.replay.past import Past, PastError

    store.answer(found.id, answered)
    question = found.asked["question"]
    if question["single"] is None:
        return
    past = Past(job.path)
    try:
        is_shown = all(past.is_whole(step) for step in range(question["first"], question["last"] + 1))
    except PastError:
        is_shown = False
    if not is_shown:
        store.remove(found.id)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
