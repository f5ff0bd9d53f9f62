"""What one episode 100 times as long as the median costs a job at default settings: `python -m benchmarks.straggler`.

A real worker and queue; an engine with a token clock; a trainer that takes and admits groups with the system's own
functions and computes nothing. The same time with the long episode and without, in turns, in one run.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.rollout_stage import Stage, machine, open_stage
from benchmarks.rollout_worlds import LONG, LONG_TASK
from gspo_core.job_spec import RolloutSpec
from gspo_core.staleness import OpenGroup, choose_groups, groups_admissible
from gspo_core.types import Split
from services.store import Claim

RESULTS = Path(__file__).with_name("results") / "straggler.md"
MEDIAN_TOKENS, LONG_TOKENS = 80, 8000
TOKEN_S, TRAIN_S = 0.05, 0.5
GROUPS_PER_STEP = 8
AIM = 0.8

PAGE = """# One long episode

Written by `python -m benchmarks.straggler --seconds {seconds:g} --pairs {pairs}`: default settings of `rollout`,
{groups} groups a step, a worker with 64 places; episodes of {median} tokens at {rate:g} tokens/s, and one of {long:,};
a step is trained in {train:g} s. {machine}. Each row is a job of its own, {seconds:g} s long.

| long episode | steps | steps/s | of the pair's other |
|---|---|---|---|
{rows}

Steps/s with the long episode: {ratio:.1%} of those without, the median of the pairs (aim: at least {aim:.0%}:
{verdict}).
"""


class Trainer:
    """Takes, commits and publishes as the real one does."""

    def __init__(self, stage: Stage, claim: Claim, rollout: RolloutSpec, *, has_long: bool) -> None:
        self._stage, self._claim, self._rollout, self._has_long = stage, claim, rollout, has_long
        self.step = 0
        self._births: dict[int, int] = {}
        self._num_dispatched = 0

    async def run(self, seconds: float) -> float:
        """Steps per second."""
        await self._admit()
        begun = time.monotonic()
        while time.monotonic() < begun + seconds:
            if groups := await self._choose():
                await self._train(groups)
            else:
                await asyncio.sleep(0.01)
        return self.step / (time.monotonic() - begun)

    async def _choose(self) -> tuple[int, ...]:
        ready = {one.group for one in await self._stage.bus.ready_groups(self._claim.job_id)}
        groups = [OpenGroup(number, number in ready, None, birth) for number, birth in self._births.items()]
        return choose_groups(
            groups,
            step=self.step,
            groups_per_step=GROUPS_PER_STEP,
            staleness_cap=self._rollout.staleness_cap,
            on_stale=self._rollout.on_stale,
        ).train

    async def _train(self, groups: tuple[int, ...]) -> None:
        for group in groups:
            del self._births[group]
        await self._stage.bus.commit(self._claim.job_id, self._claim.token, self.step + 1, groups)
        await asyncio.sleep(TRAIN_S)
        self.step += 1
        await self._stage.publish(self._claim, self.step)
        await self._admit()

    async def _admit(self) -> None:
        allowed = groups_admissible(
            max_staleness=self._rollout.max_staleness,
            groups_per_step=GROUPS_PER_STEP,
            num_dispatched=self._num_dispatched,
            num_dropped=0,
            num_published=self.step * GROUPS_PER_STEP,
        )
        for group in range(self._num_dispatched, self._num_dispatched + allowed):
            task = LONG_TASK if self._has_long and group == 0 else 0
            await self._stage.bus.dispatch(
                self._claim.job_id,
                self._claim.token,
                group,
                size=self._rollout.group_size,
                split=Split.TRAIN,
                task_index=task,
            )
            self._births[group] = self.step
        self._num_dispatched += allowed


async def measure(seconds: float, *, has_long: bool) -> tuple[int, float]:
    """Steps, and steps per second."""
    async with open_stage(num_turn_tokens=MEDIAN_TOKENS) as stage:
        codec = stage.codec
        words = codec.tokenizer.encode("so " * MEDIAN_TOKENS)[: MEDIAN_TOKENS - 1]
        mark = msgspec.json.encode(codec.tokenizer.encode(LONG)).decode()[1:-1]
        claim = await stage.submit(
            config={"page_chars": 100},
            sampling={"max_new_tokens": LONG_TOKENS},
            limits={"max_episode_tokens": LONG_TOKENS},
        )
        await stage.serve(claim, say=[*words, codec.stop_ids[0]], seconds_per_token=TOKEN_S, mark=mark)
        trainer = Trainer(stage, claim, RolloutSpec(), has_long=has_long)
        async with stage.working(max_episodes=64) as worker:
            while claim.job_id not in worker._jobs:
                await asyncio.sleep(0.01)
            rate = await trainer.run(seconds)
            assert worker.counters["stop/max_tokens"] == 0, "the long episode came to its end: measure for less time"
            assert has_long == (0 in trainer._births), "the long episode is not where it should be"
        return trainer.step, rate


async def main(seconds: float, num_pairs: int) -> None:
    rows, ratios = [], []
    for _ in range(num_pairs):
        without_steps, without = await measure(seconds, has_long=False)
        with_steps, with_it = await measure(seconds, has_long=True)
        ratios.append(with_it / without)
        rows += [
            f"| no | {without_steps} | {without:.2f} | |",
            f"| yes | {with_steps} | {with_it:.2f} | {ratios[-1]:.1%} |",
        ]
        print("\n".join(rows[-2:]), flush=True)
    page = PAGE.format(
        seconds=seconds,
        pairs=num_pairs,
        groups=GROUPS_PER_STEP,
        median=MEDIAN_TOKENS,
        long=LONG_TOKENS,
        rate=1 / TOKEN_S,
        train=TRAIN_S,
        machine=machine(),
        rows="\n".join(rows),
        ratio=median(ratios),
        aim=AIM,
        verdict="kept" if median(ratios) >= AIM else "missed",
    )
    RESULTS.write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--pairs", type=int, default=2)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.seconds, arguments.pairs))
