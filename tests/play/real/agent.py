"""Plays an episode with a harness: a coding agent as its user starts it, or an agent that a package's players write.

Rule: what a harness does with what the policy says is its own affair. How it ended is told, and no failure of ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from gspo_core.env import Llm
from tests.play.harnesses import HARMLESS, HARNESSES, Harness
from tests.play.outside import PlayerFailed, outside
from tests.play.packages import PACKAGES, python_of
from tests.play.real.speech import NAMED
from tests.play.stage import Player
from tests.play.tasks import tasks

# Features that need no cue of what the policy says next.
UNCUED = frozenset({"retry", "edited", "best_of", "compacted", "other_tools", "sub_agent"})
# A machine on which two others work, a model behind prompts of twenty thousand tokens.
RUN_S = 600.0
LAST_CHARS = 300
MOST_RUNS = 2
NAMES = (*(name for name, one in HARNESSES.items() if one.acp is None), *PACKAGES)


class Coder:
    """Starts a coding agent in a folder of its own, and tells it to go on there once or twice."""

    def __init__(self, harness: Harness, folder: Path) -> None:
        self._harness = harness
        self._folder = folder

    async def __call__(self, task: Mapping[str, Any], llm: Llm) -> Mapping[str, Any]:
        rng = random.Random(task["seed"])
        home = self._folder / str(task["number"])
        work = home / "work"
        work.mkdir(parents=True)
        (work / "a.txt").write_text("one\ntwo\n")
        ends = []
        for number in range(rng.randint(1, MOST_RUNS)):
            what = f"Look around (#{rng.getrandbits(48):012x}). Use {NAMED[self._harness.name]}."
            ends.append(await self._run(llm, home, what, goes_on=number > 0))
            if ends[-1]:
                break
        return {"ends": [one for one in ends if one]}

    async def _run(self, llm: Llm, home: Path, what: str, *, goes_on: bool) -> str:
        """How it ended, where not as it should."""
        words = self._harness.words(llm, home, what, goes_on)
        env = {"PATH": os.environ["PATH"], "HOME": str(home), **HARMLESS, **self._harness.env(llm)}
        pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            *words,
            cwd=home / "work",
            env=env,
            stdin=nothing,
            stdout=pipe,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(RUN_S):
                out, _ = await process.communicate()
        except TimeoutError:
            return f"it has not ended in {RUN_S:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # and whatever it has started
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        last = out.decode(errors="replace").strip()[-LAST_CHARS:]
        return f"status {process.returncode}: {last}" if process.returncode else ""


def task_of(name: str, seed: int, number: int) -> dict[str, Any]:
    """The episode ``number`` of a harness, as its player takes it."""
    if name in HARNESSES:
        return {"number": number, "features": [], "seed": random.Random(f"{seed} {name} {number}").getrandbits(48)}
    package = PACKAGES[name]
    features = [one for one in package.features if one in UNCUED]
    drawn = tasks(seed, number + 1, features, wild=False, huge=False, ends=package.ends)
    return drawn[number]


class Players:
    """One for each harness; those of packages live in processes of their own."""

    def __init__(self, by_name: Mapping[str, Player]) -> None:
        self._by_name = by_name

    async def play(self, name: str, task: Mapping[str, Any], llm: Llm) -> Mapping[str, Any]:
        try:
            return await self._by_name[name](task, llm)
        except PlayerFailed as error:
            return {"ends": [str(error)[-2 * LAST_CHARS :]]}


@contextlib.asynccontextmanager
async def players(names: list[str], folder: Path, at_once: int) -> AsyncIterator[Players]:
    async with contextlib.AsyncExitStack() as stack:
        by_name: dict[str, Player] = {}
        for name in names:
            if name in HARNESSES:
                by_name[name] = Coder(HARNESSES[name], folder / name.replace(" ", "-"))
            else:
                package = PACKAGES[name]
                by_name[name] = await stack.enter_async_context(
                    outside(python_of(package), package.script, str(at_once))
                )
        yield Players(by_name)
