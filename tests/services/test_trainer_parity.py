"""The gate between engines and trainer: real tokens before the first step, then every version; never in silence.

The learner is exact here (the language of the scripted engine is a function); what lies is an engine.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from gspo_core.batch import TrainSequence
from gspo_core.types import CacheMode, Group, WeightFile, WeightsManifest
from services.engine.scripted import ScriptedEngine, ScriptedTransport
from services.engine.scripted.language import true_logprobs
from services.engine_client import EngineClient
from services.trainer import parity
from services.trainer.engine_switch import BoundEngine, EngineState
from services.trainer.failure import JobFailure
from services.trainer.parity import ParityGate, k3
from tests.services.rollout_kit import until
from tests.services.trainer_kit import group

MAX_K3 = 0.02
JOB = "job_a"
VOCAB_SIZE = 300


def manifest(version: int) -> WeightsManifest:
    return WeightsManifest(JOB, version, 1, version, (WeightFile("model.safetensors", 1, "0" * 64),))


@dataclass
class ExactLearner:
    """Computes what an honest engine says under ``weights``."""

    weights: str

    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[NDArray[np.float32]]:
        found = []
        for one in sequences:
            ids = one.token_ids.tolist()
            rest = true_logprobs(self.weights, ids[:1], ids[1:], one.temperature, VOCAB_SIZE)
            found.append(np.array([0.0, *rest], np.float32))
        return found


@dataclass
class Pool:
    """One engine, loaded by hand."""

    engine: ScriptedEngine
    bound: BoundEngine
    root: Path
    reasons: list[str] = field(default_factory=list)

    def ready(self) -> list[BoundEngine]:
        return [self.bound] if self.bound.state is EngineState.READY else []

    async def distrust(self, url: str, reason: str) -> None:
        self.reasons.append(reason)
        self.bound.distrust(EngineState.DIRTY, reason)
        await self.load(int(self.engine.label.rpartition("/")[2]))  # as the pool heals it

    async def load(self, version: int) -> str:
        path = self.root / f"v{version}"
        path.mkdir(exist_ok=True)
        await self.bound.client.load_weights(path, manifest(version).label)
        self.bound.state, self.bound.label = EngineState.READY, manifest(version).label
        return str(path)


@pytest.fixture
async def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pool]:
    monkeypatch.setattr(parity, "LOOK_S", 0.01)
    engine = ScriptedEngine("first", vocab_size=VOCAB_SIZE)
    async with httpx.AsyncClient(transport=ScriptedTransport({"e": engine})) as http:
        yield Pool(engine, BoundEngine(EngineClient("http://e", http)), tmp_path)


async def until_judged(gate: ParityGate, version: int) -> None:
    await until(lambda: gate._judged.get("http://e") == manifest(version).label)


def true_group(weights: str, version: int = 0, *, off_by: float = 0.0, **changes: object) -> Group:
    """A group whose recorded log-probs are those of ``weights``, or off by something."""
    episodes = []
    for trajectory in group(0, [1.0, 0.0], versions=(version, version)):
        ids: list[int] = trajectory.branches[0].token_ids.tolist()
        values = np.array([0.0, *true_logprobs(weights, ids[:1], ids[1:], 1.0, VOCAB_SIZE)], np.float32) - off_by
        segments, start = [], 0
        for segment in trajectory.segments:
            end = start + segment.num_tokens
            recorded = np.where(segment.action_mask, values[start:end], 0).astype(np.float32)
            segments.append(replaced(segment, behavior_logprobs=recorded, engine_id="http://e", **changes))
            start = end
        episodes.append(type(trajectory)(tuple(segments)))
    base = group(0, [1.0, 0.0])
    return Group(base.job, base.group, base.split, base.task_index, base.size, tuple(episodes))


def replaced(segment: object, **changes: object) -> object:
    return dataclasses.replace(segment, **changes)  # type: ignore[type-var]


async def test_tokens_that_agree_may_be_trained_and_are_asked_once_for_each_engine(pool: Pool) -> None:
    weights = await pool.load(0)
    gate = ParityGate(pool, MAX_K3)
    learner = ExactLearner(weights)
    await gate.check(learner, [true_group(weights)], manifest(0))
    learner.weights = "a later version"
    await gate.check(learner, [true_group(weights)], manifest(0))  # known by now: what follows is asked by scoring


@pytest.mark.parametrize("off_by", [0.5, 5.0])
async def test_recorded_logprobs_that_differ_end_the_job_before_its_first_step(pool: Pool, off_by: float) -> None:
    weights = await pool.load(0)
    gate = ParityGate(pool, MAX_K3)
    with pytest.raises(JobFailure, match=r"12 tokens sampled by http://e under job_a/1/0.*max_engine_k3") as failure:
        await gate.check(ExactLearner(weights), [true_group(weights, off_by=off_by)], manifest(0))
    assert failure.value.code == "engine_mismatch"


async def test_only_tokens_of_the_newest_version_on_fresh_keys_are_compared(pool: Pool) -> None:
    weights = await pool.load(1)
    gate = ParityGate(pool, MAX_K3)
    learner = ExactLearner(weights)
    await gate.check(learner, [true_group(weights, version=0, off_by=5.0)], manifest(1))
    await gate.check(learner, [true_group(weights, version=1, off_by=5.0, cache_mode=CacheMode.STALE)], manifest(1))


async def test_every_version_is_scored_and_an_honest_engine_passes(pool: Pool) -> None:
    weights = await pool.load(0)
    gate = ParityGate(pool, MAX_K3)
    learner = ExactLearner(weights)
    await gate.check(learner, [true_group(weights)], manifest(0))
    running = asyncio.create_task(gate.run())
    for version in (1, 2):
        learner.weights = str(pool.root / f"v{version}")
        await gate.remember(learner, manifest(version))
        await pool.load(version)
        await until_judged(gate, version)
    assert gate.metrics()["engine/k3"] < 1e-9
    assert gate.refusal(true_group(weights, version=2)) is None
    running.cancel()


async def gate_before_a_lie(pool: Pool) -> tuple[ParityGate, str]:
    """Version 0 was found true; of version 1 the engine takes the label only."""
    weights = await pool.load(0)
    gate = ParityGate(pool, MAX_K3)
    learner = ExactLearner(weights)
    await gate.check(learner, [true_group(weights)], manifest(0))
    learner.weights = str(pool.root / "v1")
    await gate.remember(learner, manifest(1))
    pool.engine.lies = True
    await pool.load(1)
    return gate, weights


async def test_an_engine_that_keeps_its_old_weights_is_caught_by_the_next_version(pool: Pool) -> None:
    gate, weights = await gate_before_a_lie(pool)
    with pytest.raises(JobFailure, match=r"http://e does not hold job_a/1/1: .*after its weights were loaded anew"):
        await gate.run()
    assert len(pool.reasons) == 1  # it was loaded anew once
    assert gate.refusal(true_group(weights, version=1)) == "dropped_mismatch"
    assert gate.refusal(true_group(weights, version=0)) is None


async def test_an_engine_that_was_wrong_once_is_mended_and_what_it_sampled_meanwhile_is_dropped(pool: Pool) -> None:
    gate, weights = await gate_before_a_lie(pool)
    pool.engine.lies = False
    running = asyncio.create_task(gate.run())
    await until_judged(gate, 1)
    assert len(pool.reasons) == 1
    assert gate.refusal(true_group(weights, version=1)) == "dropped_mismatch"
    running.cancel()


def test_k3_is_nothing_where_both_agree_and_grows_with_the_distance() -> None:
    trainer = np.log(np.array([0.5, 0.1, 0.01], np.float32))
    assert k3(trainer, trainer) == 0
    assert 0 < k3(trainer, trainer - 0.01) < 1e-4
    assert k3(trainer, trainer - 0.5) > 0.1
    assert np.isfinite(k3(trainer, trainer - 1000))
