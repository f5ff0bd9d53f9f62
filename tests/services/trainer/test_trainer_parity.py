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
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from gspo_core.batch import TrainSequence
from gspo_core.types import Branch, CacheMode, EpisodeKey, Group, Segment, Split, Trajectory
from gspo_core.versions import WeightFile, WeightsManifest
from services.engines.sglang import EngineClient
from services.trainer.fleet import parity
from services.trainer.fleet.engine_switch import BoundEngine, EngineState
from services.trainer.fleet.parity import PROBE_TOKENS, ParityGate, _probe, k3
from services.trainer.telling.failure import JobFailure
from tests.apparatus.scripted_engine import ScriptedEngine, ScriptedTransport
from tests.apparatus.scripted_engine.language import true_logprobs
from tests.services.rollout.rollout_kit import until
from tests.services.trainer.trainer_kit import group, segment

MAX_K3 = 0.02
JOB = "job_a"
VOCAB_SIZE = 300


def manifest(version: int) -> WeightsManifest:
    return WeightsManifest(JOB, version, 1, version, (WeightFile("model.safetensors", 1, "0" * 64),))


@dataclass
class ExactLearner:
    """Computes what an honest engine says under ``weights``."""

    weights: str

    def logprobs(self, sequences: Sequence[TrainSequence], *, sampled_only: bool = False) -> list[NDArray[np.float32]]:
        assert sampled_only  # of the other tokens, a prompt's say, the gate compares none
        found = []
        for one in sequences:
            ids = one.token_ids.tolist()
            rest = true_logprobs(self.weights, ids[:1], ids[1:], one.temperature, VOCAB_SIZE)
            found.append(np.where(one.action_mask, np.array([0.0, *rest], np.float32), np.float32(0)))
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


def with_prompt(trajectory: Trajectory, prompt: Sequence[int]) -> Trajectory:
    """The same episode after a prompt."""
    first, *rest = trajectory.segments
    longer = replaced(
        first,
        token_ids=np.concatenate([np.array(prompt, np.int32), first.token_ids]),
        action_mask=np.concatenate([np.zeros(len(prompt), np.bool_), first.action_mask]),
        behavior_logprobs=np.concatenate([np.zeros(len(prompt), np.float32), first.behavior_logprobs]),
    )
    return Trajectory((longer, *rest))


def true_group(
    weights: str, version: int = 0, *, off_by: float = 0.0, prompt: Sequence[int] = (), **changes: object
) -> Group:
    """A group whose recorded log-probs are those of ``weights``, or off by something."""
    episodes = []
    for short in group(0, [1.0, 0.0], versions=(version, version)):
        trajectory = with_prompt(short, prompt)
        ids: list[int] = trajectory.branches[0].token_ids.tolist()
        values = np.array([0.0, *true_logprobs(weights, ids[:1], ids[1:], 1.0, VOCAB_SIZE)], np.float32) - off_by
        segments, start = [], 0
        for one in trajectory.segments:
            end = start + one.num_tokens
            recorded = np.where(one.action_mask, values[start:end], 0).astype(np.float32)
            segments.append(replaced(one, behavior_logprobs=recorded, engine_id="http://e", **changes))
            start = end
        episodes.append(type(trajectory)(tuple(segments)))
    base = group(0, [1.0, 0.0])
    return Group(base.job, base.group, base.split, base.task_index, base.size, tuple(episodes))


def replaced(segment: Segment, **changes: object) -> Segment:
    return dataclasses.replace(segment, **changes)  # type: ignore[arg-type]


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


@pytest.mark.parametrize("num_prompt", [1, 254, 255, 256, 257, 4000])
async def test_a_prompt_of_any_length_leaves_sampled_tokens_to_score(pool: Pool, num_prompt: int) -> None:
    """A probe that held the first 256 tokens of a branch had none left, and the engine was blamed for it."""
    prompt = np.random.default_rng(num_prompt).integers(3, VOCAB_SIZE, num_prompt).tolist()
    weights = await pool.load(0)
    gate = ParityGate(pool, MAX_K3)
    learner = ExactLearner(weights)
    await gate.check(learner, [true_group(weights, prompt=prompt)], manifest(0))
    running = asyncio.create_task(gate.run())
    await until_judged(gate, 0)
    assert gate.metrics()["engine/k3"] < 1e-9
    pool.engine.lies = True
    learner.weights = str(pool.root / "v1")
    await gate.remember(learner, manifest(1))
    await pool.load(1)
    with pytest.raises(JobFailure, match="does not hold job_a/1/1"):
        await running


@given(st.lists(st.booleans(), min_size=1, max_size=900), st.sampled_from([0, 300, 30_000]))
def test_a_probe_is_the_window_that_scores_the_most_sampled_tokens(mask: list[bool], num_prompt: int) -> None:
    whole = [*[False] * num_prompt, *mask]
    ids = np.arange(len(whole), dtype=np.int32)
    values = np.where(whole, -1.0, 0.0).astype(np.float32)
    key = EpisodeKey("job_a", 0, 0)
    branch = Branch((segment(key, 0, 0, 1, token_ids=ids, action_mask=whole, behavior_logprobs=values),))
    probe = _probe(branch)
    assert len(probe.token_ids) <= PROBE_TOKENS
    start = int(probe.token_ids[0])
    assert probe.token_ids.tolist() == list(range(start, start + len(probe.token_ids)))
    assert probe.action_mask.tolist() == [False, *whole[start + 1 : start + PROBE_TOKENS]]
    scored = [sum(whole[first + 1 : first + PROBE_TOKENS]) for first in range(len(whole))]
    assert int(probe.action_mask[1:].sum()) == max(scored)


async def test_a_branch_without_a_scored_action_is_no_probe(pool: Pool) -> None:
    weights = await pool.load(0)
    gate = ParityGate(pool, MAX_K3)
    silent = []
    for one in next(iter(true_group(weights))).segments:
        nothing = np.zeros(len(one.token_ids), np.bool_)
        silent.append(replaced(one, action_mask=nothing, behavior_logprobs=nothing.astype(np.float32)))
    quiet = Group("job_a", 0, Split.TRAIN, 0, 1, (Trajectory(tuple(silent)),))
    await gate.check(ExactLearner(weights), [quiet], manifest(0))
    assert not gate._probes
    await gate.check(ExactLearner(weights), [true_group(weights)], manifest(0))
    assert gate._probes


@dataclass
class DivergedLearner(ExactLearner):
    """Its weights are NaN."""

    def logprobs(self, sequences: Sequence[TrainSequence], *, sampled_only: bool = False) -> list[NDArray[np.float32]]:
        assert sampled_only  # of the other tokens, a prompt's say, the gate compares none
        return [np.full(len(one.token_ids), np.nan, np.float32) for one in sequences]


async def test_a_learner_that_diverged_blames_no_engine(pool: Pool) -> None:
    weights = await pool.load(0)
    gate = ParityGate(pool, MAX_K3)
    with pytest.raises(JobFailure, match="diverged") as failure:
        await gate.check(DivergedLearner(weights), [true_group(weights)], manifest(0))
    assert failure.value.code == "learner_diverged"
    await gate.check(ExactLearner(weights), [true_group(weights)], manifest(0))
    with pytest.raises(JobFailure, match="job_a/1/1 are not finite"):
        await gate.remember(DivergedLearner(weights), manifest(1))
    assert not pool.reasons


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
    with pytest.raises(JobFailure, match=r"http://e does not hold job_a/1/1: .*even after its weights were reloaded"):
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


def test_k3_of_nothing_is_an_error_and_of_nan_is_beyond_every_bound() -> None:
    nothing = np.array([], np.float32)
    with pytest.raises(ValueError, match="at least one token"):
        k3(nothing, nothing)
    assert not k3(np.zeros(2, np.float32), np.array([0, np.nan], np.float32)) <= MAX_K3
