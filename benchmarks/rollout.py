"""What a turn costs in a rollout worker that holds 2,000 episodes: `python -m benchmarks.rollout`.

One worker process; Redis, the environment's processes and the engine run in others. The engine takes 2 to 5 s for a
turn and computes nothing. All episodes begin together, with a short first prompt and then, in a second worker, with a
long one, so that the context is alike for all of them; what beginning costs, up to the first turn of each, is counted
apart. CPU time is the worker's; it grows where others use the same caches, so how busy the machine was stands beside
it. Wall clock and lag are those of a shared machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import numpy as np

from benchmarks.rollout_stage import CountingClient, LoopLag, Stage, machine, open_stage, resident_bytes
from services.workers.worker import EpisodeWorker

RESULTS = Path(__file__).with_name("results") / "rollout.md"
TURN_TOKENS, PAGE_CHARS = 128, 350
FOREWORDS = (0, 6000)
GROUP_SIZE = 8
AIM_MS, AIM_TOKENS = 2.0, 8000
_LOOK_S = 0.25

PAGE = """# A turn in a rollout worker

Written by `python -m benchmarks.rollout --episodes {episodes} --turns {turns}`: one worker with {episodes:,} episodes
at once; an engine that answers after 2 to 5 s and computes nothing; the environment in its host, async, one tool call a
turn of 128 sampled tokens and 350 read ones. {machine}. CPU time is that of the worker's process alone; where it has
less than a core, wall clock shows that. "Busy" is the share of all cores that anybody used, the worker included: the
more others do, the more often its caches are cold.

| context, tokens | turns | CPU ms a turn | turns/s | of those asked | lag p50 ms | lag p99 ms | MiB an episode | busy |
|---|---|---|---|---|---|---|---|---|
{rows}

A turn costs {fixed:.2f} ms and {slope:.3f} ms for each 1,000 tokens of its context (a line through the rows), at
{aim_tokens:,} tokens {at_aim:.2f} ms (aim: under {aim:g}: {verdict}). Beginning a long episode (lease, session, first
prompt) took {begin:.2f} ms.
"""


@dataclass(frozen=True)
class Window:
    """The turns between two looks at the clock."""

    turns: int
    context_tokens: float
    cpu_s: float
    wall_s: float
    num_open: int
    lag_p50_ms: float
    lag_p99_ms: float
    episode_mib: float
    busy: float

    @property
    def cpu_ms(self) -> float:
        return self.cpu_s / self.turns * 1e3

    def row(self) -> str:
        asked = self.num_open / 3.5
        cells = (
            *(f"{self.context_tokens:,.0f}", f"{self.turns:,}", f"{self.cpu_ms:.2f}"),
            *(f"{self.turns / self.wall_s:,.0f}", f"{self.turns / self.wall_s / asked:.0%}"),
            *(f"{self.lag_p50_ms:.0f}", f"{self.lag_p99_ms:.0f}", f"{self.episode_mib:.2f}", f"{self.busy:.0%}"),
        )
        return f"| {' | '.join(cells)} |"


class Samples:
    """Where CPU time goes, looked at every few milliseconds of it: a tracing profiler makes small functions dear."""

    PERIOD_S = 0.003

    def __init__(self) -> None:
        self._number = 0
        self._inside: Counter[str] = Counter()
        self._own: Counter[str] = Counter()

    def begin(self) -> None:
        signal.signal(signal.SIGPROF, self._look)
        signal.setitimer(signal.ITIMER_PROF, self.PERIOD_S, self.PERIOD_S)

    def end(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)

    def _look(self, _number: int, frame: FrameType | None) -> None:
        self._number += 1
        names = []
        while frame is not None:
            code = frame.f_code
            names.append(f"{'/'.join(Path(code.co_filename).parts[-2:])}:{code.co_firstlineno} {code.co_qualname}")
            frame = frame.f_back
        self._own[names[0]] += 1
        self._inside.update(set(names))

    def show(self) -> None:
        for title, counts in (("in it or below", self._inside), ("in it", self._own)):
            print(f"\nshare of CPU time {title}:")
            for name, count in counts.most_common(45):
                print(f"  {count / self._number:6.1%}  {name}")


def busy_s() -> float:
    """CPU time of everybody on this machine."""
    user, nice, system, _idle, _waiting, *others = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
    return (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK")


async def windows(num_episodes: int, num_turns: int, rss: int, begun: int) -> list[Window]:
    """One window for a turn of all episodes; ``begun`` is what was counted when each had had its first."""
    found: list[Window] = []
    while CountingClient.turns < begun:
        await asyncio.sleep(_LOOK_S)
    while len(found) < num_turns:
        lag = LoopLag()
        watching = asyncio.create_task(lag.watch())
        turns, tokens = CountingClient.turns, CountingClient.context_tokens
        cpu, wall, busy = time.process_time(), time.perf_counter(), busy_s()
        while CountingClient.turns < begun + (len(found) + 1) * num_episodes:
            await asyncio.sleep(_LOOK_S)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        busy = (busy_s() - busy) / wall / (os.cpu_count() or 1)
        watching.cancel()
        turns, tokens = CountingClient.turns - turns, CountingClient.context_tokens - tokens
        mib = (resident_bytes() - rss) / num_episodes / 2**20
        lags = lag.percentile(0.5), lag.percentile(0.99)
        found.append(Window(turns, tokens / turns, cpu, wall, num_episodes, *lags, mib, busy))
        print(found[-1].row(), flush=True)
    return found


async def begin(stage: Stage, worker: EpisodeWorker, num_episodes: int) -> tuple[float, int]:
    """CPU ms of beginning an episode, and the memory before the first one."""
    claim_job = next(iter(stage.engine_urls))
    while claim_job not in worker._jobs:
        await asyncio.sleep(0.01)
    rss, cpu = resident_bytes(), time.process_time()
    while worker._num_episodes() < num_episodes:
        await asyncio.sleep(0.01)
    return (time.process_time() - cpu) / num_episodes * 1e3, rss


async def run(num_episodes: int, num_turns: int, foreword: int, samples: Samples | None) -> tuple[list[Window], float]:
    """The windows, and CPU ms of beginning an episode."""
    async with open_stage(num_turn_tokens=TURN_TOKENS) as stage:
        limits = {"max_turns": num_turns + 20, "max_tool_calls": 1000, "max_episode_tokens": 1_000_000}
        config = {"page_chars": PAGE_CHARS, "foreword_chars": foreword}
        claim = await stage.submit(config=config, limits=limits)
        await stage.serve(claim, seconds=(2.0, 5.0))
        await stage.dispatch(claim, range(-(-num_episodes // GROUP_SIZE)), size=GROUP_SIZE)
        async with stage.working(max_episodes=num_episodes) as worker:
            begun = CountingClient.turns + num_episodes
            begin_ms, rss = await begin(stage, worker, num_episodes)
            if samples is not None:
                samples.begin()
            found = await windows(num_episodes, num_turns, rss, begun)
            if samples is not None:
                samples.end()
    return found, begin_ms


def page(found: list[Window], num_episodes: int, num_turns: int, begin_ms: float) -> str:
    slope, fixed = np.polyfit([one.context_tokens / 1e3 for one in found], [one.cpu_ms for one in found], 1)
    at_aim = fixed + slope * AIM_TOKENS / 1e3
    return PAGE.format(
        episodes=num_episodes,
        turns=num_turns,
        machine=machine(),
        rows="\n".join(one.row() for one in found),
        fixed=fixed,
        slope=slope,
        at_aim=at_aim,
        aim_tokens=AIM_TOKENS,
        aim=AIM_MS,
        verdict="kept" if at_aim < AIM_MS else "missed",
        begin=begin_ms,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--profile", action="store_true", help="print where the CPU time goes; nothing is stored")
    arguments = parser.parse_args()
    samples = Samples() if arguments.profile else None
    found: list[Window] = []
    for foreword in FOREWORDS:
        measured, begin_ms = asyncio.run(run(arguments.episodes, arguments.turns, foreword, samples))
        found += measured
    text = page(found, arguments.episodes, arguments.turns, begin_ms)
    print(text)
    if samples is not None:
        samples.show()
    else:
        RESULTS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
