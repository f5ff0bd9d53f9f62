"""What one episode 100 times as long as the median costs a job at default settings: `python -m benchmarks.straggler`.

A real worker and queue; an engine with a token clock; a trainer that takes and admits groups with the system's own
functions and computes nothing. What is measured is the simulated time of the engine, so other work on the machine adds
little. The same number of steps with the long episode and without, in turns (ABBA), in one run.
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
from services.state.store import Claim

RESULTS = Path(__file__).with_name("results") / "straggler.md"
MEDIAN_TOKENS, LONG_TOKENS = 80, 8000
TOKEN_S, TRAIN_S, JITTER_S = 0.05, 0.5, 1.0
GROUPS_PER_STEP = 8
AIM = 0.8

PAGE = """# One long episode

Written by `python -m benchmarks.straggler --steps {steps} --pairs {pairs}`: default settings of `rollout`,
{groups} groups a step, a worker with 64 places; episodes of {median} tokens at {rate:g} tokens/s, which begin up to
{jitter:g} s late, and one of {long:,} tokens; a step is trained in {train:g} s. {machine}. Each row is a job of its
own; its rate is that of {steps} steps after the first.

| long episode | steps/s | CPU of the worker | of the pair's other |
|---|---|---|---|
{rows}

Steps/s with the long episode: {ratio:.1%} of those without, the median of {pairs} pairs from {low:.1%} to {high:.1%}
(aim: at least {aim:.0%}: {verdict}).
"""


class Trainer:
    """Takes, commits and publishes as the real one does."""

    def __init__(self, stage: Stage, claim: Claim, rollout: RolloutSpec, *, has_long: bool) -> None:
        self._stage, self._claim, self._rollout, self._has_long = stage, claim, rollout, has_long
        self.step = 0
        self._births: dict[int, int] = {}
        self._num_dispatched = 0

    async def run(self, num_steps: int) -> float:
        """Steps per second, after the first one."""
        await self._admit()
        begun = time.monotonic()
        while self.step <= num_steps:
            if groups := await self._choose():
                await self._train(groups)
                begun = time.monotonic() if self.step == 1 else begun
            else:
                await asyncio.sleep(0.01)
        return num_steps / (time.monotonic() - begun)

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


async def measure(num_steps: int, *, has_long: bool) -> tuple[float, float]:
    """Steps per second, and the share of a core that the worker took."""
    async with open_stage(num_turn_tokens=MEDIAN_TOKENS) as stage:
        codec = stage.codec
        words = codec.tokenizer.encode("so " * MEDIAN_TOKENS)[: MEDIAN_TOKENS - 1]
        mark = msgspec.json.encode(codec.tokenizer.encode(LONG)).decode()[1:-1]
        claim = await stage.submit(
            config={"page_chars": 100},
            sampling={"max_new_tokens": LONG_TOKENS},
            limits={"max_episode_tokens": LONG_TOKENS},
        )
        say = [*words, codec.stop_ids[0]]
        await stage.serve(claim, say=say, seconds=(0.0, JITTER_S), seconds_per_token=TOKEN_S, mark=mark)
        trainer = Trainer(stage, claim, RolloutSpec(), has_long=has_long)
        async with stage.working(max_episodes=64) as worker:
            while claim.job_id not in worker._jobs:
                await asyncio.sleep(0.01)
            cpu, wall = time.process_time(), time.monotonic()
            rate = await trainer.run(num_steps)
            share = (time.process_time() - cpu) / (time.monotonic() - wall)
            assert worker.counters["stop/max_tokens"] == 0, "the long episode came to its end: measure fewer steps"
            assert has_long == (0 in trainer._births), "the long episode is not where it should be"
        return rate, share


async def main(num_steps: int, num_pairs: int) -> None:
    rows, ratios = [], []
    for number in range(num_pairs):
        rates = {}
        for has_long in (False, True) if number % 2 == 0 else (True, False):
            rates[has_long], share = await measure(num_steps, has_long=has_long)
            ratio = f"{rates[True] / rates[False]:.1%}" if len(rates) == 2 else ""
            rows.append(f"| {'yes' if has_long else 'no'} | {rates[has_long]:.3f} | {share:.0%} | {ratio} |")
            print(rows[-1], flush=True)
        ratios.append(rates[True] / rates[False])
    page = PAGE.format(
        steps=num_steps,
        pairs=num_pairs,
        groups=GROUPS_PER_STEP,
        median=MEDIAN_TOKENS,
        long=LONG_TOKENS,
        rate=1 / TOKEN_S,
        jitter=JITTER_S,
        train=TRAIN_S,
        machine=machine(),
        rows="\n".join(rows),
        ratio=median(ratios),
        low=min(ratios),
        high=max(ratios),
        aim=AIM,
        verdict="kept" if median(ratios) >= AIM else "missed",
    )
    RESULTS.write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--pairs", type=int, default=4)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.steps, arguments.pairs))
