"""``python -m tests.play.harness_play [--seed N] [--episodes N] [NAME ...]``: coding agents play random episodes.

Each is the unmodified program (``make harnesses`` installs them), started in a folder of its own and told to go on
there once or twice; those with ``(ACP)`` in their names are asked as often in one session of that protocol. The gateway
and its queue are real; what the policy says is drawn, since a model that could drive them all does not fit a laptop.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import services.episodes.outbox
from gspo_core.env import Llm, Timeouts
from gspo_core.env.acp_run import AcpStart, acp_run
from services.process.telemetry import configure_logging
from services.state.client import connect
from services.state.server import RedisServer
from tests.apparatus.processes import processes_of
from tests.play.harnesses import HARMLESS, HARNESSES, Harness
from tests.play.observed import given_up, goes_on, observed
from tests.play.run import qwen_codec
from tests.play.stage import Part, set_up
from tests.play.verdict import reasons_of
from tests.services.gateway.gateway_kit import judge

RUN_S = 300.0
MOST_RUNS = 3
LAST_CHARS = 600


def plan(harness: Harness, rng: random.Random) -> list[dict[str, Any]]:
    """Of each run: what the policy says, turn by turn, and what goes wrong with the first request."""
    runs = []
    for number in range(rng.randint(2, MOST_RUNS)):
        turns = [harness.calls(rng) for _ in range(rng.randint(1, 4))]
        if rng.random() < 0.3:
            turns.append([*harness.calls(rng), *harness.calls(rng)])
        if rng.random() < 0.2:
            turns.append([{"name": "no_such_tool", "arguments": {}}, *harness.calls(rng)])
        rng.shuffle(turns)
        cues = [f"exactly:{json.dumps(calls)}" for calls in turns]
        word = rng.choice(("Done.", "Fertig: Größe 🦊", "It says <|im_end|> there.", "a\n\nb "))
        mishap = rng.choice(("unavailable", "lost")) if number and rng.random() < 0.3 else ""
        end = f"say:{word}" if harness.last is None else f"exactly:{json.dumps([harness.last])}"
        runs.append({"cues": [*cues, end], "mishap": mishap})
    return runs


class Player:
    """Starts a harness for each episode."""

    def __init__(self, harness: Harness, folder: Path) -> None:
        self._harness = harness
        self._folder = folder

    async def __call__(self, task: Mapping[str, Any], llm: Llm) -> Mapping[str, Any]:
        home = self._folder / str(task["number"])
        work = home / "work"
        work.mkdir(parents=True)
        (work / "a.txt").write_text("one\ntwo\n")
        said: list[str] = []
        if self._harness.acp is not None:
            for run in task["runs"]:
                await asyncio.to_thread(_direct, llm, run)
            prompts = [f"Look around ({number})." for number in range(len(task["runs"]))]
            return {"said": [await self._speak(self._harness.acp, llm, home, prompts)]}
        for number, run in enumerate(task["runs"]):
            await asyncio.to_thread(_direct, llm, run)
            said.append(await self._run(llm, home, f"Look around ({number}).", goes_on=number > 0))
        return {"said": said}

    async def _speak(self, acp: AcpStart, llm: Llm, home: Path, prompts: Sequence[str]) -> str:
        """One session, as a job's would be."""
        set_to = {"HOME": str(home), **HARMLESS, **self._harness.env(llm)}
        command = ["env", *(f"{name}={value}" for name, value in set_to.items())]
        command += self._harness.words(llm, home, "", False)
        work = home / "work"
        run = acp_run(command, acp, {"prompts": list(prompts)}, llm, work, work, limits=Timeouts(reset_timeout_s=RUN_S))
        running = asyncio.create_task(asyncio.to_thread(run.run))
        try:
            async with asyncio.timeout(RUN_S):
                return str(await asyncio.shield(running))[-LAST_CHARS:]
        except TimeoutError:
            run.cancel()
            await asyncio.wait({running})
            raise AssertionError(f"it has not ended in {RUN_S:g} s") from None
        finally:
            for left in processes_of(home):  # in a job they end with the process of their episode
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(left.name), signal.SIGKILL)

    async def _run(self, llm: Llm, home: Path, task: str, *, goes_on: bool) -> str:
        words = self._harness.words(llm, home, task, goes_on)
        env = {"PATH": os.environ["PATH"], "HOME": str(home), **HARMLESS, **self._harness.env(llm)}
        pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            *words, cwd=home / "work", env=env, stdin=nothing, stdout=pipe, stderr=asyncio.subprocess.STDOUT
        )
        try:
            async with asyncio.timeout(RUN_S):
                out, _ = await process.communicate()
        except TimeoutError:
            process.kill()
            out, _ = await process.communicate()
            raise AssertionError(f"it has not ended in {RUN_S:g} s; it said last: {_last(out)}") from None
        if process.returncode:
            raise AssertionError(f"it ended with status {process.returncode}: {_last(out)}")
        return _last(out)


def _last(out: bytes) -> str:
    return out.decode(errors="replace").strip()[-LAST_CHARS:]


def _direct(llm: Llm, wanted: Mapping[str, Any]) -> None:
    url, headers = llm.base_url.removesuffix("/v1") + "/play", {"authorization": f"Bearer {llm.api_key}"}
    body = json.dumps(wanted).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body, headers | {"content-type": "application/json"})):
        pass


def faults_of(part: Part) -> list[str]:
    """Stored ids are sampled ids, all that was planned was said, and what goes on to the letter made no branch."""
    found = [part.failure] if part.failure else []
    try:
        judge(part.record, part.policy.served)
    except AssertionError as error:
        found.append(f"stored ids are not the sampled ones: {error}")
    if part.policy.cues:
        found.append(f"{len(part.policy.cues)} turns were never asked for")
    asked = {one.turn: one.asked for one in part.record if one.asked is not None}
    for turn, before in goes_on(observed(part.requests), given_up(part.requests)).items():
        if turn in asked and asked[turn].reason:
            found.append(f"turn {turn} goes on from turn {before} and began a branch: {asked[turn].reason}")
    return found


async def play(harness: Harness, seed: int, numbers: Sequence[int], at_once: int, folder: Path) -> list[Part]:
    drawn = [random.Random(f"{seed} {harness.name} {number}") for number in numbers]
    tasks: list[dict[str, Any]] = [
        {"number": number, "features": [], "runs": plan(harness, rng)}
        for number, rng in zip(numbers, drawn, strict=True)
    ]
    with RedisServer.spawn(folder / "redis") as server:
        redis = connect(server.url)
        async with set_up(redis, qwen_codec(), seed, Player(harness, folder)) as stage:
            parts = await stage.play(tasks, at_once)
        await redis.aclose()
    return parts


def refused_fields(parts: Sequence[Part]) -> Counter[str]:
    """What requests were refused for, by the field."""
    return Counter(one.refused for part in parts for one in part.requests if one.refused)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.play.harness_play", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32), help="drawn if left out")
    parser.add_argument("--episodes", type=int, default=20, help="of each harness (default: %(default)s)")
    parser.add_argument("--at-once", type=int, default=3, help="episodes side by side (default: %(default)s)")
    parser.add_argument("--only", type=int, help="the episode of this number alone")
    parser.add_argument("names", nargs="*", choices=[*HARNESSES, []], help="left out: all")
    given = parser.parse_args()
    configure_logging("play", level="error", log_format="text")
    services.episodes.outbox.DISTANCE_S = 0.0
    print("seed", given.seed, flush=True)
    has_faults = False
    for name in given.names or HARNESSES:
        numbers = range(given.episodes) if given.only is None else [given.only]
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "redis").mkdir()
            parts = asyncio.run(play(HARNESSES[name], given.seed, numbers, given.at_once, Path(folder)))
        faults = [f"episode {part.task['number']}: {fault}" for part in parts for fault in faults_of(part)]
        reasons = sum((reasons_of(part) for part in parts), Counter[str]())
        sampled = sum(one.num_actions for part in parts for one in part.record)
        print(
            f"{name}: {len(parts)} episodes, {sum(part.num_turns for part in parts)} turns, {sampled} tokens sampled, "
            f"branches {dict(reasons)}, refused {dict(refused_fields(parts))}, {len(faults)} faults, "
            f"{time.monotonic() - begun:.0f} s",
            *faults,
            sep="\n  ",
            flush=True,
        )
        has_faults |= bool(faults)
    return int(has_faults)


if __name__ == "__main__":
    sys.exit(main())
