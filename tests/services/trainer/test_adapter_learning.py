"""A whole job that publishes adapters, with the real learner, queue and embedded engine: it ends where the same job
with whole versions does, bit for bit, also when its trainer is lost on the way.

Episodes are one turn long and played here one after the other, with seeds of their own: what is sampled depends on the
weights alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import pytest
from safetensors.torch import load_file

from gspo_core.codec import encode
from gspo_core.lora_adapter import ADAPTER_WEIGHTS, BaseWeights, merged_weights
from gspo_core.spec import JobSpec
from gspo_core.types import Outcome, Segment, StopReason
from services.engines.sglang import EngineClient
from services.engines.transport import EngineTransport
from services.files.batch_log import BatchLog
from services.files.checkpoints import CheckpointStore
from services.files.data_dir import DataDir
from services.files.job_dir import JobDir
from services.files.weights import WeightStore
from services.process.settings import Settings
from services.state.client import RedisClient
from services.state.queue import Append, Bus, LeasedEpisode
from services.state.store import Store
from services.trainer.building import make_learner, make_run
from services.trainer.fleet import engines as engines_module
from tests.apparatus.warm_python import WarmPython
from tests.patience import HANG_S
from tests.services.engines.engine_kit import VOCAB_SIZE, EngineProcess, make_model
from tests.services.trainer.loop_kit import Clock, Killed, after_each_step, fingerprint
from tests.services.trainer.trainer_kit import stop

STEPS, NUM_TASKS, NUM_TOKENS = 4, 3, 6
LEASE_S, DEADLINE_S = 30.0, 120.0
Transport = Literal["disk", "adapter"]


def spec_of(model: Path, transport: Transport) -> JobSpec:
    return JobSpec.model_validate(
        {
            "model": str(model),
            "environments": [{"ref": "a:B"}],
            "rollout": {"group_size": 3, "max_staleness": 0, "weight_transport": transport},
            "groups_per_step": 2,
            "checkpoint_every": 2,
            "checkpoints": {"keep_versions": 1000},
            "steps": STEPS,
            "optimizer": {"lr": 1e-2},
            "objective": {"minibatches": 2},
            "learner": {"lora": {"rank": 4, "alpha": 8}},
            "resources": {"device": "cpu"},
        }
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="module")
def process(model: Path, warm_python: WarmPython) -> Iterator[EngineProcess]:
    """Without a prefix cache: what was asked before changes the order of additions."""
    engine = EngineProcess(model, "--prefix-cache-mib", "0", python=warm_python.path)
    yield engine
    engine.close()


@dataclass
class Job:
    store: Store
    bus: Bus
    clock: Clock
    id: str
    spec: JobSpec
    settings: Settings
    client: EngineClient

    @property
    def dir(self) -> JobDir:
        return DataDir(self.settings.data_dir).jobs.job(self.id)

    async def play(self) -> None:
        """One episode at a time, those of a lower group and member first."""
        token = await self.bus.join("player")
        while True:
            await self.bus.beat("player", token)
            await self.bus.reap(self.id)
            for lease in await self.bus.lease(self.id, "player", token, 1):
                await self._play(lease, token)
            await asyncio.sleep(0.01)

    async def _play(self, lease: LeasedEpisode, token: str) -> None:
        key, prompt = lease.key, [5, 6, 7, 10 + lease.task_index]
        seed = 1000 * key.group + key.member
        answer = await self.client.generate(
            prompt, max_new_tokens=NUM_TOKENS, temperature=1.0, stop_token_ids=[], sampling_seed=seed
        )
        [span] = answer.spans
        reward = float(np.mean(np.array(answer.output_ids) < VOCAB_SIZE // 2))
        segment = Segment(
            key=key,
            attempt=lease.attempt,
            branch=0,
            index=0,
            turn=0,
            version=int(span.label.rpartition("/")[2]),
            temperature=1.0,
            engine_id=self.client.url,
            token_ids=np.array([*prompt, *answer.output_ids], np.int32),
            action_mask=np.array([False] * len(prompt) + [True] * NUM_TOKENS),
            behavior_logprobs=np.array([0.0] * len(prompt) + answer.logprobs, np.float32),
            outcome=Outcome(StopReason.COMPLETED, reward),
        )
        await self.bus.append(self.id, token, [Append(key, lease.attempt, 0, encode(segment), True, segment.version)])

    async def train(self) -> None:
        """By one trainer, to the end or to its death."""
        while (claim := await self.store.jobs.claim("trainer")) is None:
            self.clock.now += LEASE_S / 5

        def make() -> Any:
            return make_learner(self.spec)

        run = make_run(self.settings, self.bus, self.store, lambda _: self.client, claim, self.spec, [], make)
        async with asyncio.timeout(DEADLINE_S):
            await run.run()


async def trained(
    transport: Transport,
    *,
    deaths: int,
    model: Path,
    redis: RedisClient,
    root: Path,
    http: httpx.AsyncClient,
    process: EngineProcess,
) -> Job:
    clock, settings = Clock(), Settings(data_dir=root, engine_urls=(process.url,), redis_url="unix:///unused")
    jobs_dir = DataDir(root).jobs
    store = Store(redis, lease_s=LEASE_S, clock=clock, max_attempts=10, jobs_dir=jobs_dir)
    bus, spec = Bus(redis), spec_of(model, transport)
    await redis.flushall()  # else the job before, whose trainer did not say that it is over, would be claimed
    await bus.load_functions()
    id_ = (await store.jobs.create(spec.model_dump_json())).id
    await store.environments.describe(id_, 0, {"num_tasks": {"train": NUM_TASKS, "eval": 1}})
    job = Job(store, bus, clock, id_, spec, settings, EngineClient(process.url, http))
    playing = asyncio.create_task(job.play())
    try:
        for _ in range(deaths):
            with pytest.raises(Killed):
                await job.train()
        await job.train()
    finally:
        await stop(playing)
    return job


@pytest.mark.timeout(300)
async def test_it_ends_with_the_weights_that_whole_versions_lead_to(
    model: Path, process: EngineProcess, redis_client: RedisClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines_module, "WATCH_S", 0.1)
    hooks, ends = after_each_step(monkeypatch), dict[str, str]()
    wire = Wire()
    async with httpx.AsyncClient(transport=wire, timeout=HANG_S, trust_env=False) as http:
        place: dict[str, Any] = {"model": model, "redis": redis_client, "http": http, "process": process}
        whole = await trained("disk", deaths=0, root=tmp_path / "disk", **place)
        assert wire.calls.count("/update_weights_from_adapter") == 0
        wire.calls.clear()

        async def die(_: Any, step: int) -> None:
            if step == 3 and not ends:
                ends["killed"] = "after its third step, one after its checkpoint"
                raise Killed

        hooks.append(die)
        alone = await trained("adapter", deaths=1, root=tmp_path / "adapter", **place)
    assert ends, "a trainer was lost"
    assert wire.calls.count("/update_weights_from_disk") == 0
    assert wire.calls.count("/update_weights_from_adapter") > STEPS  # and the base
    assert fingerprint(learner_of(whole)) == fingerprint(learner_of(alone))
    assert behaviors(whole) == behaviors(alone)
    compare_published(whole, alone, model)


class Wire(EngineTransport):
    """Tells what was asked."""

    def __init__(self) -> None:
        super().__init__(64)
        self.calls: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.calls.append(request.url.path)
        return await super().handle_async_request(request)


def learner_of(job: Job) -> Any:
    learner, newest = make_learner(job.spec), CheckpointStore(job.dir).newest_first()[0]
    assert newest.position.step == STEPS
    learner.load_state(newest.learner_dir)
    return learner


def behaviors(job: Job) -> list[tuple[Any, ...]]:
    """What was sampled for each episode that was trained, and how probable the engine said it was."""
    log = BatchLog(job.dir)
    by_step = {step: log.read(epoch, step) for epoch, step in sorted(log.steps())}
    return sorted(
        (step, one.key.group, one.key.member, segment.token_ids.tolist(), segment.behavior_logprobs.tobytes())
        for step, batch in by_step.items()
        for one in batch.trajectories
        for segment in one.segments
    )


def compare_published(whole: Job, alone: Job, model: Path) -> None:
    """After every step; of what was trained and not published by the trainer that was lost, by the next one."""
    base, whole_by_step = BaseWeights(model), dict[int, Path]()
    for version in WeightStore(whole.dir).versions():
        whole_by_step[WeightStore(whole.dir).manifest(version).step] = WeightStore(whole.dir).path(version)
    store = WeightStore(alone.dir)
    steps = [store.manifest(version).step for version in store.versions()]
    assert set(steps) == set(whole_by_step) == set(range(STEPS + 1))
    for version, step in zip(store.versions(), steps, strict=True):
        assert [path.name for path in store.path(version).glob("*.safetensors")] == [ADAPTER_WEIGHTS]
        expected = load_file(whole_by_step[step] / "model.safetensors")
        merged = merged_weights(base, store.path(version))
        assert all(np.array_equal(merged[name].numpy(), one.numpy()) for name, one in expected.items())
