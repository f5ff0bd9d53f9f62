"""For what share of the wall time does the learner compute, when groups enough are in Redis?

    python -m benchmarks.trainer_utilisation [--steps 10] [--hidden 256] [--tokens 256] [--serial]

The real step loop, queue, batch log, weights and checkpoints on one machine; only engines and episodes are made up, so
that nothing is ever waited for. The first steps are left out. ``--serial`` finishes publishing and saving before the
next step begins, as a trainer without overlap would; both ways end with the same weights, which is checked.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers

from gspo_core.codec import encode
from gspo_core.learner import Learner
from gspo_core.spec import JobSpec
from gspo_core.types import EpisodeKey, Outcome, Segment, StopReason
from gspo_core.versions import WeightsManifest
from services.files.batch_log import BatchLog
from services.files.checkpoints import CheckpointStore
from services.files.data_dir import DataDir
from services.files.job_dir import JobDir
from services.files.weights import WeightStore
from services.state.client import connect
from services.state.queue import Append, Bus
from services.state.server import RedisServer
from services.state.store import Claim, Store
from services.trainer.building import make_learner
from services.trainer.groups.intake import Intake
from services.trainer.groups.run_context import Services
from services.trainer.past.background_writer import BackgroundWriter
from services.trainer.run import JobRun
from services.trainer.telling.status import JobStatusBoard

WARM_UP = 2
VOCABULARY = 4096
PARTS = {
    "time/wait_s": "choosing, logging and committing a batch",
    "time/behind_s": "waiting for the publication before",
}


class Busy:
    """When the learner computed: every call of it from the step ``WARM_UP`` on, by what it was for."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.began = self.ended = 0.0
        self._num_steps = 0

    def watch(self, learner: Learner) -> Learner:
        for name in ("step", "logprobs", "copy_weights"):
            setattr(learner, name, self._timed(name, getattr(learner, name)))
        return learner

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            self._num_steps += name == "step"
            start = time.perf_counter()
            if name == "step" and self._num_steps == WARM_UP + 1:
                self.began = start
            result = call(*args)
            if self.began:
                self.seconds[name] += time.perf_counter() - start
                if name == "copy_weights":  # what a step ends with
                    self.ended = time.perf_counter()
            return result

        return timed


class NoEngines:
    """Always ready: these jobs sample nothing."""

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def release(self) -> None: ...

    async def publish(self, manifest: WeightsManifest) -> None: ...

    async def wait_for(self, manifest: WeightsManifest, **_: object) -> None: ...

    def ready(self) -> list[object]:
        return []

    def absence(self) -> None: ...

    def versions_in_use(self) -> set[int]:
        return set()

    def last_switch_s(self) -> float:
        return 0.0

    def metrics(self) -> Mapping[str, float]:
        return {}


def write_model(directory: Path, hidden: int) -> int:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    model = transformers.Qwen3ForCausalLM(config)
    model.save_pretrained(directory)
    return int(sum(parameter.numel() for parameter in model.parameters()))


def job_spec(model_dir: Path, steps: int) -> JobSpec:
    return JobSpec.model_validate(
        {
            "model": str(model_dir),
            "environments": [{"ref": "made:Up"}],
            "rollout": {"group_size": 8, "max_staleness": 4, "max_engine_k3": 1e30},
            "groups_per_step": 2,
            "checkpoint_every": 2,
            "steps": steps,
            "seed": 5,
            "optimizer": {"lr": 1e-4},
            "resources": {"device": "cpu"},
        }
    )


def episode(key: EpisodeKey, num_tokens: int, version: int) -> Segment:
    """A function of its key, so that two runs train the same."""
    rng = np.random.default_rng((key.group, key.member))
    acts = np.arange(num_tokens) >= num_tokens // 4
    return Segment(
        key=key,
        attempt=0,
        branch=0,
        index=0,
        turn=0,
        version=version,
        temperature=1.0,
        engine_id="made-up",
        token_ids=rng.integers(0, VOCABULARY, num_tokens).astype(np.int32),
        action_mask=acts,
        behavior_logprobs=np.where(acts, -np.log(VOCABULARY), 0).astype(np.float32),
        outcome=Outcome(StopReason.COMPLETED, float(rng.random())),
    )


async def feed(bus: Bus, job: str, num_tokens: int) -> None:
    """Every episode is finished as soon as it is dispatched; all say version 0, so that two runs train the same."""
    token = await bus.join("feeder")
    while True:
        await bus.beat("feeder", token)
        leases = await bus.lease(job, "feeder", token, 64)
        ended = [Append(one.key, 0, 0, encode(episode(one.key, num_tokens, 0)), True, 0) for one in leases]
        if ended:
            await bus.append(job, token, ended)
        await asyncio.sleep(0.02)


@contextlib.contextmanager
def serially(is_serial: bool) -> Iterator[None]:
    overlapping = BackgroundWriter.start

    async def start(self: BackgroundWriter, work: Coroutine[Any, Any, None]) -> None:
        await overlapping(self, work)
        await self.finish()

    if is_serial:
        BackgroundWriter.start = start  # type: ignore[method-assign]
    try:
        yield
    finally:
        BackgroundWriter.start = overlapping  # type: ignore[method-assign]


async def train(
    root: Path, model_dir: Path, options: argparse.Namespace, busy: Busy
) -> tuple[list[dict[str, float]], str]:
    """The metrics of every step, and a digest of the weights at the end."""
    spec = job_spec(model_dir, options.steps)
    with RedisServer.spawn(root / "redis") as server:
        async with connect(server.url) as redis:
            bus, store = Bus(redis), Store(redis, jobs_dir=DataDir(root).jobs)
            await bus.load_functions()
            job = (await store.jobs.create(spec.model_dump_json())).id
            await store.environments.describe(job, 0, {"num_tasks": {"train": 100, "eval": 1}})
            claim = await store.jobs.claim("benchmark")
            assert claim is not None
            feeding = asyncio.create_task(feed(bus, job, options.tokens))
            try:
                await run_of(claim, store, bus, DataDir(root).jobs.job(job), spec, busy).run()
            finally:
                feeding.cancel()
    job_dir = DataDir(root).jobs.job(job)
    lines = [json.loads(line) for line in job_dir.metrics.read_text().splitlines()]
    state = CheckpointStore(job_dir).newest_first()[0].learner_dir / "rank-00000.safetensors"
    return [line for line in lines if "time/step_s" in line], hashlib.sha256(state.read_bytes()).hexdigest()


def run_of(claim: Claim, store: Store, bus: Bus, job_dir: JobDir, spec: JobSpec, busy: Busy) -> JobRun:
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
    )
    return JobRun(claim, spec, services, lambda: busy.watch(make_learner(spec)))


def report(name: str, steps: list[dict[str, float]], busy: Busy) -> None:
    """Of the wall time from the first step after the warm-up until the weights of the last one are copied."""
    steady, wall = steps[WARM_UP:], busy.ended - busy.began
    print(f"\n{name}: {len(steady)} steps, {wall / len(steady):.3f} s each")
    shares = {
        "training steps": busy.seconds["step"],
        "log-probs of the probes of the parity gate": busy.seconds["logprobs"],
        "copying weights": busy.seconds["copy_weights"],
        **{text: sum(step[part] for step in steady[1:]) for part, text in PARTS.items()},
    }
    shares["anything else"] = wall - sum(shares.values())
    for text, seconds in shares.items():
        print(f"  {seconds / wall:7.2%}  {text}")
    print(f"  {(busy.seconds['step'] + busy.seconds['logprobs']) / wall:7.2%}  in all: the learner computes")
    print(
        f"  ({sum(step['time/publish_s'] for step in steady) / wall:.2%} publishing, beside the learner unless serial)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainer_utilisation", description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256, help="of an episode; a step trains sixteen")
    parser.add_argument("--serial", action="store_true", help="also without overlap, for comparison")
    options = parser.parse_args()
    torch.set_num_threads(1)
    digests = set()
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        size = write_model(root / "model", options.hidden)
        load = os.getloadavg()[0]
        print(
            f"{size / 1e6:.1f} M parameters, 16 episodes of {options.tokens} tokens a step, one thread, load {load:.1f}"
        )
        for is_serial in (True, False) if options.serial else (False,):
            name = "serial" if is_serial else "overlapping"
            (root / name).mkdir()
            busy = Busy()
            with serially(is_serial):
                steps, digest = asyncio.run(train(root / name, root / "model", options, busy))
            report(name, steps, busy)
            digests.add(digest)
    if options.serial:
        print(f"\nthe same weights, moments and random state both ways: {len(digests) == 1}")


if __name__ == "__main__":
    main()
