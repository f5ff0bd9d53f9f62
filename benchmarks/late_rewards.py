"""What it costs a job that 5 % of its rewards come an hour late: ``python -m benchmarks.late_rewards``.

Two measurements, each in pairs: the same job with late rewards and with none. The first runs the real step loop, queue
and logs; engines and episodes are made up, and a clock that is moved by two minutes with each step says what an hour
is. The second is a simulation (``benchmarks.simulator``), where sampling has its price too; its numbers repeat.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, TypedDict, cast

import torch

from benchmarks.simulator import SimulationReport, SimulationSetting, simulate
from benchmarks.trainer_utilisation import NoEngines, episode, write_model
from gspo_core.codec import decode, encode
from gspo_core.spec import JobSpec
from gspo_core.types import EpisodeKey, Outcome, StopReason
from services.files.batch_log import BatchLog
from services.files.checkpoints import CheckpointStore
from services.files.data_dir import DataDir
from services.files.job_dir import JobDir
from services.files.weights import WeightStore
from services.state.client import connect
from services.state.queue import Append, Bus, LeasedEpisode
from services.state.queue_records import AwaitedReward
from services.state.server import RedisServer
from services.state.store import Claim, Store
from services.trainer.building import make_learner
from services.trainer.groups.intake import Intake
from services.trainer.groups.run_context import Services
from services.trainer.run import JobRun
from services.trainer.telling.status import JobStatusBoard

RESULTS = Path(__file__).with_name("results")
LATE_SHARE, LATE_S, STEP_S = 0.05, 3600.0, 120.0
WARM_UP = 5
AIM = 0.9
SETTING = SimulationSetting(warmup_steps=50)
LENGTHS = (250, 500, 1000)
WAYS = ("train", "mask", "drop")
SEEDS = (0, 1, 2)
NUM_DRAWN = 3
SIMULATED = (
    *("steps", "`on_late_reward`", "steps/s", "worst seed", f"at least {AIM:.0%}", "trained tokens/s", "mean age"),
    *("oldest", "trained late", "dropped", "waited"),
)
BY_SEED = (
    *("seed", "`on_late_reward`", *(f"kept, {steps} steps" for steps in LENGTHS[1:])),
    *(f"steps {begin + 1} to {end}" for begin, end in pairwise((0, *LENGTHS))),
)
Simulated = dict[str, dict[str, dict[str, dict[str, Any]]]]
"""Seed -> what is done with late groups, or none are -> steps -> what was found."""

PAGE = """# Rewards that come an hour late

Written by `python -m benchmarks.late_rewards`. {late:.0%} of the episodes are paid {hours:g} h after their end; a group
is trained when its last reward is there, so of groups of 8 a third waits.

## Where sampling has its price: a simulation

{one.groups_per_step} groups of {one.group_size} a step, `max_staleness` {one.max_staleness}, engines that sample
{one.num_episodes} episodes at once; the first {one.warmup_steps} steps are not measured. Seeds {seeds}, of which the
last {drawn} were drawn; medians over them, each beside its run without late rewards.

{simulated}

At least {aim:.0%} of the steps a second are to be kept; the column says with how many seeds they are. Of 500 steps half
are the first hour. `train` keeps the tokens too. `mask` loses what the late groups would have taught; `drop` takes
others in their place, which have to be sampled, for as long as the job lasts.

When the time is lost: each seed's steps a second (all but the first {one.warmup_steps}), and the seconds that parts of
its run took, without late rewards / with them.

{by_seed}

An hour is some 250 steps. The loss is all at the beginning: in the first hour one group of three waits, and others have
to be sampled in its place. From then on the late groups of an hour before come back, and the steps after the first
{lengths[0]} keep {train:.1%} with `train` at the worst seed, {drop:.1%} with `drop`. Nothing is lost at a run's end,
where nobody waits for rewards any more.

## The real trainer and queue

Jobs of {steps} steps of 2 groups of 8 episodes of 64 tokens, `on_late_reward: train`; a clock that moves two minutes a
step, so that an hour is 30 of them; pairs in turns (ABBA), the first {warm} steps left out. {machine}; under such a
load steps a second say little, so what a step costs stands beside them: CPU of the process, and seconds without a
batch. Each cell has the job without late rewards first.

| pair | steps/s | CPU s a step | waits for a batch, s a step | groups trained late | most that waited |
|---|---|---|---|---|---|
{real}

CPU of a step with late rewards, median of the pairs: {cpu:.1%} of that without. Waiting for a batch: {wait:+.3f} s a
step.
"""


class Run(TypedDict):
    """What was measured of one job."""

    rate: float
    """Steps a second."""
    cpu_s: float
    """Of a step."""
    wait_s: float
    """Without a batch, a step."""
    num_late: int
    """Groups that were trained late."""
    num_waited: int
    """The most groups that waited at once."""


# The real trainer


class Minutes:
    """Unix seconds; moved with each step."""

    now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


class Agents:
    """Play whatever is dispatched, at once, under the newest weights; some rewards come late."""

    def __init__(self, bus: Bus, store: Store, job: str, now: Minutes, share: float) -> None:
        self._bus, self._store, self._job, self._now, self._share = bus, store, job, now, share
        self._dice = random.Random(0)
        self._due: list[tuple[float, EpisodeKey]] = []
        self.num_waited = 0

    async def play(self) -> None:
        token = await self._bus.join("agents")
        while True:
            await self._bus.beat("agents", token)
            current = await self._store.versions.current(self._job)
            for lease in await self._bus.lease(self._job, "agents", token, 64) if current else ():
                await self._end(lease, token, current.version if current else 0)
            await self._pay()
            await asyncio.sleep(0.01)

    async def _end(self, lease: LeasedEpisode, token: str, version: int) -> None:
        last = episode(lease.key, 64, version)
        if self._dice.random() >= self._share:
            await self._bus.append(self._job, token, [Append(lease.key, 0, 0, encode(last), True, version)])
            return
        unpaid = dataclasses.replace(last, outcome=Outcome(StopReason.NO_REWARD))
        end = Append(lease.key, 0, 0, encode(unpaid), True, version)
        await self._bus.await_reward(token, end, b"", self._now() + 2 * LATE_S)
        self._due.append((self._now() + LATE_S, lease.key))
        self.num_waited = max(self.num_waited, len((await self._bus.waiting(self._job)).groups))

    async def _pay(self) -> None:
        while self._due and self._due[0][0] <= self._now():
            _, key = self._due.pop(0)
            found = await self._bus.look_at_reward(key, 0, str(key), self._now())
            if isinstance(found, AwaitedReward):
                paid = dataclasses.replace(decode(found.payload), outcome=Outcome(StopReason.COMPLETED, 0.5))
                end = Append(key, 0, 0, encode(paid), True)
                await self._bus.settle_reward(end, str(key), seen=0, now=self._now())


def job_spec(model_dir: Path, steps: int) -> JobSpec:
    return JobSpec.model_validate(
        {
            "model": str(model_dir),
            "environments": [{"ref": "made:up", "agent": {}}],
            "rollout": {"group_size": 8, "max_staleness": 4, "max_engine_k3": 1e30},
            "rewards": {"deadline_s": 2 * LATE_S, "on_late_reward": "train"},
            "groups_per_step": 2,
            "checkpoint_every": 20,
            "steps": steps,
            "optimizer": {"lr": 1e-4},
            "resources": {"device": "cpu"},
        }
    )


async def train(root: Path, model_dir: Path, steps: int, share: float) -> Run:
    spec, now, ends, cpu = job_spec(model_dir, steps), Minutes(), list[float](), list[float]()
    with RedisServer.spawn(root / "redis") as server:
        async with connect(server.url) as redis:
            bus, store = Bus(redis), Store(redis, jobs_dir=DataDir(root).jobs)
            await bus.load_functions()
            job = (await store.jobs.create(spec.model_dump_json())).id
            await store.environments.describe(job, 0, {"num_tasks": {"train": 100, "eval": 1}})
            claim = await store.jobs.claim("benchmark")
            assert claim is not None
            agents = Agents(bus, store, job, now, share)
            playing = asyncio.create_task(agents.play())
            run: Any = run_of(claim, store, bus, DataDir(root).jobs.job(job), spec, now)
            after = run._after_step

            async def after_step(*given: Any) -> None:
                await after(*given)
                ends.append(time.perf_counter())
                cpu.append(time.process_time())
                now.now += STEP_S

            run._after_step = after_step
            try:
                await run.run()
            finally:
                playing.cancel()
    lines = [json.loads(line) for line in DataDir(root).jobs.job(job).metrics.read_text().splitlines()]
    count = len(ends) - 1 - WARM_UP
    return Run(
        rate=count / (ends[-1] - ends[WARM_UP]),
        cpu_s=(cpu[-1] - cpu[WARM_UP]) / count,
        wait_s=sum(line["time/wait_s"] for line in lines if line["step"] > WARM_UP + 1) / count,
        num_late=int(sum(line.get("rewards/late_groups", 0) for line in lines)),
        num_waited=agents.num_waited,
    )


def run_of(claim: Claim, store: Store, bus: Bus, job_dir: JobDir, spec: JobSpec, now: Minutes) -> JobRun:
    services = Services(
        bus=bus,
        store=store,
        status=JobStatusBoard(store, claim),
        engines=cast(Any, NoEngines()),
        intake=Intake(bus, claim.job_id),
        weights=WeightStore(job_dir),
        batch_log=BatchLog(job_dir),
        checkpoints=CheckpointStore(job_dir),
        job_dir=job_dir,
        now=now,
    )
    return JobRun(claim, spec, services, lambda: make_learner(spec))


def real_pairs(steps: int, num_pairs: int) -> list[list[Run]]:
    """Without late rewards, and with some."""
    pairs = []
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        write_model(root / "model", 32)
        for number in range(num_pairs):
            found: dict[float, Run] = {}
            for share in (0.0, LATE_SHARE) if number % 2 == 0 else (LATE_SHARE, 0.0):
                (room := root / f"{number}-{share}").mkdir()
                found[share] = asyncio.run(train(room, root / "model", steps, share))
            pairs.append([found[0.0], found[LATE_SHARE]])
            print(f"pair {number}: {pairs[-1]}", flush=True)
    return pairs


# The simulation


def simulated(seeds: Sequence[int]) -> Simulated:
    """Of one seed all runs sample the same, and a longer one goes on from where a shorter one ends."""
    found: Simulated = {}
    for seed in seeds:
        found[str(seed)] = {}
        for way in ("none", *WAYS):
            setting = SETTING
            if way != "none":
                late: Any = {"late_reward_share": LATE_SHARE, "late_by_s": LATE_S, "on_late_reward": way}
                setting = dataclasses.replace(setting, **late)
            runs = {steps: simulate(dataclasses.replace(setting, num_steps=steps), seed) for steps in LENGTHS}
            found[str(seed)][way] = {str(steps): dataclasses.asdict(one) for steps, one in runs.items()}
        print(f"seed {seed}", flush=True)
    return found


# The page


def reports(found: Simulated, steps: int, way: str) -> list[tuple[SimulationReport, SimulationReport]]:
    """Of each seed: without late rewards, and with some."""
    pairs = [[SimulationReport(**ways[one][str(steps)]) for one in ("none", way)] for ways in found.values()]
    return [(none, late) for none, late in pairs]


def simulated_row(found: Simulated, steps: int, way: str) -> str:
    pairs = reports(found, steps, way)
    late = [one for _, one in pairs]
    kept = [one.steps_per_s / none.steps_per_s for none, one in pairs]
    cells = (
        f"{median(kept):.1%}",
        f"{min(kept):.1%}",
        f"{sum(one >= AIM for one in kept)} of {len(kept)}",
        f"{median(one.tokens_per_s / none.tokens_per_s for none, one in pairs):.1%}",
        f"{median(one.mean_staleness for one in late):.1f}",
        max(one.max_staleness for one in late),
        f"{median(one.num_late_trained for one in late):,.0f}",
        f"{median(one.num_late_dropped for one in late):,.0f}",
        max(one.max_waiting_groups for one in late),
    )
    return f"| {steps} | `{way}` | " + " | ".join(map(str, cells)) + " |"


def seed_row(found: Simulated, seed: str, way: str) -> str:
    """Of all steps after the warm-up, and of each part of the longest run its own."""
    kept = []
    for steps in LENGTHS[1:]:
        none, late = (SimulationReport(**found[seed][one][str(steps)]) for one in ("none", way))
        kept.append(late.steps_per_s / none.steps_per_s)
    ends = {one: [0.0, *(found[seed][one][str(steps)]["seconds"] for steps in LENGTHS)] for one in ("none", way)}
    parts = []
    for number in range(len(LENGTHS)):
        none_s, late_s = (ends[one][number + 1] - ends[one][number] for one in ("none", way))
        parts.append(f"{none_s:,.0f} / {late_s:,.0f} ({none_s / late_s:.1%})")
    return f"| {seed} | `{way}` | " + " | ".join([*(f"{one:.1%}" for one in kept), *parts]) + " |"


def table(head: Sequence[str], rows: Iterable[str]) -> str:
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *rows])


def steady(found: Simulated, way: str) -> float:
    """Of the steps a second behind the first hour, what the worst seed keeps."""
    return min(
        float((runs["none"][-1] - runs["none"][0]) / (runs[way][-1] - runs[way][0]))
        for ways in found.values()
        for runs in [{one: [ways[one][str(steps)]["seconds"] for steps in LENGTHS] for one in ("none", way)}]
    )


def real_row(number: int, none: Run, late: Run) -> str:
    cells = (
        f"{none['rate']:.2f} / {late['rate']:.2f}",
        f"{none['cpu_s']:.3f} / {late['cpu_s']:.3f}",
        f"{none['wait_s']:.3f} / {late['wait_s']:.3f}",
        *(str(late["num_late"]), str(late["num_waited"])),
    )
    return f"| {number} | " + " | ".join(cells) + " |"


def page(found: Mapping[str, Any]) -> str:
    real: list[list[Run]] = found["real"]
    made: Simulated = found["simulated"]
    return PAGE.format(
        late=LATE_SHARE,
        hours=LATE_S / 3600,
        warm=WARM_UP,
        one=SETTING,
        seeds=", ".join(made),
        drawn=len(made) - len(SEEDS),
        lengths=LENGTHS,
        simulated=table(SIMULATED, (simulated_row(made, steps, way) for steps in LENGTHS[1:] for way in WAYS)),
        by_seed=table(BY_SEED, (seed_row(made, seed, way) for way in ("train", "drop") for seed in made)),
        aim=AIM,
        train=steady(made, "train"),
        drop=steady(made, "drop"),
        steps=found["steps"],
        machine=found["machine"],
        real="\n".join(real_row(number, *pair) for number, pair in enumerate(real, 1)),
        cpu=median(late["cpu_s"] / none["cpu_s"] for none, late in real),
        wait=median(late["wait_s"] - none["wait_s"] for none, late in real),
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.late_rewards", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=["real", "simulated", []], help="of both, what to measure again")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--draw", type=int, default=NUM_DRAWN, help="so many seeds of the simulation beside the fixed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    fresh: dict[str, Any] = {}
    if "real" in options.parts or not options.parts:
        load = os.getloadavg()[0]
        fresh |= {"real": real_pairs(options.steps, options.pairs), "steps": options.steps}
        fresh["machine"] = f"{os.cpu_count()} cores, a load of {load:.0f}"
    if "simulated" in options.parts or not options.parts:
        fresh["simulated"] = simulated([*SEEDS, *(random.SystemRandom().randrange(10**6) for _ in range(options.draw))])
    kept = RESULTS / "late_rewards.json"
    found = (json.loads(kept.read_text()) if kept.exists() else {}) | fresh
    found.pop("long", None)  # as it was kept before
    kept.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if {"real", "simulated"} <= found.keys():
        (RESULTS / "late_rewards.md").write_text(page(found), encoding="utf-8")
        print(page(found))


if __name__ == "__main__":
    main()
