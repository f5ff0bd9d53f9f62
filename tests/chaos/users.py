"""What users do while faults strike: jobs submitted, some through both APIs at once, settings changed, jobs held and
let go, jobs given up.

The rule kept here: what the API said yes to is written down, so that the oracle can hold the job to it; what was asked
and not answered may have happened or not.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from gspo_core.client import ApiError, Client, ClientError
from gspo_core.json_value import JSON
from tests.chaos.faults import Hit, Outcome
from tests.chaos.stack import Stack
from tests.chaos.watch import Watch

SUBMIT_FOR_S = 120.0
PAUSED_FOR_S = (0.5, 3.0)
PAUSES_WITHIN_S = 120.0
STEPS_ENOUGH = 3
"""After so many steps that it took in spite of the request, enough is seen: on a slow machine that takes its time."""
RETRY_S = 0.2
FIRST_EXTRA = 10_000
"""Numbers of jobs that are submitted to be given up begin here."""


class RunFailed(Exception):
    """The run did not come to its end."""


class RunLate(RunFailed):
    """More time might have brought it there."""


class Users:
    def __init__(
        self,
        stack: Stack,
        watch: Watch,
        seed: int,
        make_spec: Callable[[int], dict[str, Any]],
        note: Callable[..., None],
    ) -> None:
        self._stack, self._watch, self._seed = stack, watch, seed
        self._make_spec, self._note = make_spec, note
        self._held: set[str] = set()
        self._num_extra = self._num_changes = 0
        self.kinds: dict[str, Callable[[random.Random], Any]] = {
            "change settings": self._change_settings,
            "hold job": self._hold,
            "give job up": self._give_up,
        }

    # Submission

    async def submit(self, number: int, *, is_raced: bool) -> str:
        """``is_raced``: through every API at once, under one key."""
        spec, key = self._make_spec(number), f"chaos-{self._seed}-{number}"
        self._note("submissions.jsonl", key=key, number=number)
        urls = self._stack.api_urls if is_raced else [self._stack.api_urls[number % len(self._stack.api_urls)]]
        found = await asyncio.gather(*(asyncio.to_thread(self._send, url, spec, key) for url in urls))
        if len(set(found)) > 1:
            raise RunFailed(f"the key {key} made the jobs {found}")
        self._note("submissions.jsonl", key=key, accepted=found[0])
        directory, is_of_agents = self._stack.data / "jobs" / found[0], "agent" in spec["environments"][0]
        self._watch.add(found[0], directory, is_of_agents=is_of_agents, is_extra=number >= FIRST_EXTRA)
        return str(found[0])

    def _send(self, url: str, spec: dict[str, Any], key: str) -> str:
        deadline = time.monotonic() + SUBMIT_FOR_S
        while True:
            try:
                with Client(url) as client:
                    return client.create_job(spec, idempotency_key=key)["id"]
            except ApiError as error:
                if error.status < 500:
                    raise RunFailed(f"a job was not accepted: {error}") from error
                if time.monotonic() > deadline:
                    raise RunLate(f"a job was not accepted in {SUBMIT_FOR_S:.0f} s: {error}") from error
            except ClientError as error:
                if time.monotonic() > deadline:
                    raise RunLate(f"a job was not accepted in {SUBMIT_FOR_S:.0f} s: {error}") from error
            time.sleep(RETRY_S)

    # What is asked of a job

    async def _change_settings(self, rng: random.Random) -> Outcome:
        job = self._some_job(rng)
        if job is None:
            return "no job trains"
        possible: list[dict[str, JSON]] = [
            {"optimizer": {"lr": rng.choice([1e-4, 5e-4, 2e-3])}},
            {"objective": {"clip_high": rng.choice([0.1, 0.3, 0.5])}},
            {"optimizer": {"max_grad_norm": rng.choice([0.1, 0.5])}, "checkpoint_every": rng.choice([2, 4, 6])},
        ]
        changes = rng.choice(possible)
        self._num_changes += 1
        change = {"job": job, "change": self._num_changes, "changes": changes}
        self._note("acts.jsonl", act="change", **change)
        answer = await self._ask(rng, lambda client: client.change(job, changes))
        if isinstance(answer, str):
            return answer
        self._note("acts.jsonl", act="changed", **change)
        return Hit(job, [job], json.dumps(changes))

    async def _hold(self, rng: random.Random) -> Outcome:
        """Paused, and some time after it stands still let go again."""
        job = self._some_job(rng)
        if job is None:
            return "no job trains"
        self._held.add(job)
        answer = await self._ask(rng, lambda client: client.pause(job))
        self._note("acts.jsonl", act="pause", job=job, answer=answer if isinstance(answer, str) else "yes")
        seconds = rng.uniform(*PAUSED_FOR_S)
        return Hit(job, [job], f"{seconds:.1f} s", self._let_go(job, self._watch.jobs[job].step, seconds, rng))

    async def _let_go(self, job: str, step: int, seconds: float, rng: random.Random) -> None:
        try:
            if await self._stands(job, step + STEPS_ENOUGH):
                self._note("acts.jsonl", act="stands", job=job)
                await asyncio.sleep(seconds)
            await self._resume(job, rng)
        finally:
            self._held.discard(job)

    async def _stands(self, job: str, too_late: int) -> bool:
        """False where it has ended, or goes on to the step ``too_late``."""
        deadline, watched = time.monotonic() + PAUSES_WITHIN_S, self._watch.jobs[job]
        while time.monotonic() < deadline and not watched.is_over and watched.step < too_late:
            if watched.status == "paused":
                return True
            await asyncio.sleep(0.05)
        return False

    async def let_everybody_go(self) -> None:
        """At the end: a request to hold a job that was given up for lost may have come after the one to let it go."""
        for job in self._watch.running():
            if job.status == "paused" and job.id not in self._held:
                await self._resume(job.id, random.Random(job.id))

    async def _resume(self, job: str, rng: random.Random) -> None:
        deadline = time.monotonic() + SUBMIT_FOR_S
        while not self._watch.jobs[job].is_over:
            self._note("acts.jsonl", act="resume", job=job)
            answer = await self._ask(rng, lambda client: client.resume(job))
            is_answered = not isinstance(answer, str) or answer.startswith("4")
            if not is_answered:
                self._note("acts.jsonl", act="resume unheard", job=job)
            if is_answered and self._watch.jobs[job].status not in ("pausing", "paused"):
                return
            if time.monotonic() > deadline:
                raise RunLate(f"{job} could not be let go: {answer}")
            await asyncio.sleep(RETRY_S)

    async def _give_up(self, rng: random.Random) -> Outcome:
        """A job of its own, so that the others still have to come to their end."""
        number = FIRST_EXTRA + self._num_extra
        self._num_extra += 1
        job = await self.submit(number, is_raced=rng.random() < 0.5)
        seconds = rng.uniform(0.0, 6.0)
        return Hit(job, [], f"after {seconds:.1f} s", self._cancel(job, seconds, rng))

    async def _cancel(self, job: str, seconds: float, rng: random.Random) -> None:
        await asyncio.sleep(seconds)
        deadline = time.monotonic() + SUBMIT_FOR_S
        while not self._watch.jobs[job].is_over:
            self._note("acts.jsonl", act="cancel", job=job)
            answer = await self._ask(rng, lambda client: client.cancel(job))
            if not isinstance(answer, str):
                self._note("acts.jsonl", act="cancelled", job=job)
                return
            if answer.startswith("409"):  # it is over, or an earlier request had been heard
                return
            if time.monotonic() > deadline:
                raise RunLate(f"{job} could not be cancelled: {answer}")
            await asyncio.sleep(RETRY_S)

    async def give_up(self, job: str, rng: random.Random) -> None:
        await self._cancel(job, 0.0, rng)

    def _some_job(self, rng: random.Random) -> str | None:
        found = [one.id for one in self._watch.running() if one.step and one.id not in self._held]
        return rng.choice(found) if found else None

    async def _ask(self, rng: random.Random, what: Callable[[Client], Mapping[str, Any]]) -> Mapping[str, Any] | str:
        """The answer of one of the APIs, or why there is none; it may have been done all the same."""

        def ask() -> Mapping[str, Any] | str:
            try:
                with Client(rng.choice(self._stack.api_urls)) as client:
                    return what(client)
            except ApiError as error:
                return f"{error.status} {error}"
            except ClientError as error:
                return f"no answer: {error}"

        return await asyncio.to_thread(ask)
