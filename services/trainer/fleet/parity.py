"""Checks that the engines compute what the trainer computes, on real tokens: before step one and per version.

Two checks, because each catches what the other misses. The first compares recorded log-probs, on tokens of a batch that
the newest version sampled, with the learner's: it covers template, temperature and decoding, and runs before the first
step and whenever a new engine appears. The second runs beside training: each engine scores real tokens under each
version it gets and must match what the learner computed when it published that version. It catches wrong weights under
a right label, whatever the pace of the job.

Rule: never train beyond the bound. An engine that fails a scoring is reloaded once, and the groups it contributed to
meanwhile are dropped; if it fails again, or recorded tokens disagree, the job ends with the reason.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gspo_core.batch import TrainSequence
from gspo_core.types import Branch, CacheMode, Group
from gspo_core.versions import EngineLabel
from services.engines.protocol import EngineError
from services.process.telemetry import get_logger
from services.state.queue_records import DropReason
from services.trainer.fleet.engine_switch import BoundEngine
from services.trainer.telling.failure import JobFailure

# Real tokens to score per version: enough for a mean, too few to slow a job down.
NUM_PROBES = 4
PROBE_TOKENS = 256
# Branches to compare recorded log-probs on, per new engine.
MAX_BRANCHES = 16
LOOK_S = 0.1
SCORE_TIMEOUT_S = 30.0
_MAX_LOG_RATIO = 20.0


def engine_mismatch(message: str) -> JobFailure:
    """Engine and trainer disagree beyond the bound; the job does not train."""
    return JobFailure("engine_mismatch", message)


def learner_diverged(message: str) -> JobFailure:
    """The trainer's own numbers are not finite, so no engine can match them and none is at fault."""
    return JobFailure("learner_diverged", message)


@dataclass(frozen=True)
class LabelledWeights:
    """Identifies a learner's weights as published."""

    version: int
    label: str


class ScoringLearner(Protocol):
    """The part of the learner used here."""

    def logprobs(
        self, sequences: Sequence[TrainSequence], *, sampled_only: bool = False
    ) -> list[NDArray[np.float32]]: ...


class ProbedEngines(Protocol):
    """The part of the pool used here."""

    def ready(self) -> list[BoundEngine]: ...

    async def distrust(self, url: str, reason: str) -> None: ...


def k3(trainer: NDArray[np.float32], engine: NDArray[np.float32]) -> float:
    """Mean of r - 1 - log r with r = trainer / engine: 0 where they agree, never negative.

    NaN if the engine reports NaN, so write any comparison with a bound such that NaN fails it. Raises ValueError on
    empty input: the mean of nothing would look like an engine at fault.
    """
    if not len(trainer):
        raise ValueError("k3 needs at least one token")
    log_ratio = np.clip(trainer.astype(np.float64) - engine, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return float(np.mean(np.exp(log_ratio) - 1 - log_ratio))


class ParityGate:
    """One job's gate. Call ``check`` and ``remember`` between the learner's updates, ``run`` beside them."""

    def __init__(self, engines: ProbedEngines, max_k3: float) -> None:
        self._engines = engines
        self._max_k3 = max_k3
        self._known: set[str] = set()
        """Engines whose recorded tokens passed."""
        self._probes: list[TrainSequence] = []
        self._label = ""
        self._expected: list[NDArray[np.float32]] = []
        """The learner's log-probs of the probes under ``label``."""
        self._judged: dict[str, str] = {}
        """Engine -> the label under which it last passed."""
        self._suspects: set[str] = set()
        """Engines reloaded after a failed scoring that have not passed since."""
        self._distrusted: set[tuple[str, int]] = set()
        """(Engine, version) pairs whose tokens are not trained on."""
        self._largest: dict[str, float] = {}
        """Engine -> k3 at its last scoring."""

    def metrics(self) -> dict[str, float]:
        return {"engine/k3": max(self._largest.values())} if self._largest else {}

    def refusal(self, group: Group) -> DropReason | None:
        """Why a group is not trained on, if any of its tokens comes from mislabelled weights."""
        if not self._distrusted:
            return None
        sources = {(one.engine_id, one.version) for trajectory in group for one in trajectory.segments}
        return "dropped_mismatch" if sources & self._distrusted else None

    async def check(self, learner: ScoringLearner, groups: Sequence[Group], held: LabelledWeights) -> None:
        """Raises JobFailure before any training on tokens with wrong log-probs."""
        branches = [branch for group in groups for trajectory in group for branch in trajectory.branches]
        for url, of_engine in _fresh_by_engine(branches, held.version).items():
            if url not in self._known:
                await self._compare(learner, url, of_engine[:MAX_BRANCHES], held)
        if not self._probes:
            acted = [branch for branch in branches if branch.action_mask[1:].any()]
            self._probes = [_probe(branch) for branch in acted[:NUM_PROBES]]
            await self.remember(learner, held)

    async def remember(self, learner: ScoringLearner, held: LabelledWeights) -> None:
        """Record the log-probs engines must report under the version the learner holds now."""
        if self._probes:
            self._expected = await asyncio.to_thread(learner.logprobs, self._probes, sampled_only=True)
            _require_finite(self._expected, held.label)
            self._label = held.label

    async def run(self) -> None:
        """Score engines until cancelled. Raises JobFailure."""
        while True:
            due = [engine for engine in self._engines.ready() if self._is_due(engine)]
            await asyncio.gather(*(self._judge(engine) for engine in due))
            await asyncio.sleep(LOOK_S)

    def _is_due(self, engine: BoundEngine) -> bool:
        return engine.label == self._label != "" and self._judged.get(engine.url) != self._label

    async def _compare(
        self, learner: ScoringLearner, url: str, fresh: list[tuple[Branch, NDArray[np.bool_]]], held: LabelledWeights
    ) -> None:
        sequences = [_sequence(branch, branch.segments[0].temperature) for branch, _ in fresh]
        ours = await asyncio.to_thread(learner.logprobs, sequences, sampled_only=True)
        _require_finite(ours, held.label)
        trainer = np.concatenate([values[mask] for values, (_, mask) in zip(ours, fresh, strict=True)])
        engine = np.concatenate([branch.behavior_logprobs[mask] for branch, mask in fresh])
        found = k3(trainer, engine)
        get_logger().info("parity", engine=url, label=held.label, k3=found, num_tokens=len(trainer))
        if not found <= self._max_k3:
            raise engine_mismatch(
                f"on {len(trainer)} tokens sampled by {url} under {held.label}, engine and trainer differ by "
                f"k3 = {found:.3g} per token, more than rollout.max_engine_k3 ({self._max_k3:g}): they use "
                "different weights, temperature, chat template or numerics"
            )
        self._known.add(url)

    async def _judge(self, engine: BoundEngine) -> None:
        label, probes, expected = self._label, self._probes, self._expected
        try:
            async with asyncio.timeout(SCORE_TIMEOUT_S):
                answers = [await engine.client.score(probe.token_ids.tolist()) for probe in probes]
        except (EngineError, TimeoutError) as error:
            get_logger().warning("engine could not score the tokens to compare", engine=engine.url, error=str(error))
            return
        if {held for _, held in answers} != {label}:
            return  # it switched meanwhile
        masks = [probe.action_mask[1:] for probe in probes]
        theirs = [np.asarray(values, np.float32)[mask] for (values, _), mask in zip(answers, masks, strict=True)]
        ours = [values[1:][mask] for values, mask in zip(expected, masks, strict=True)]
        self._largest[engine.url] = found = k3(np.concatenate(ours), np.concatenate(theirs))
        if found <= self._max_k3:
            self._judged[engine.url] = label
            self._suspects.discard(engine.url)
        else:
            await self._condemn(engine, label, found)

    async def _condemn(self, engine: BoundEngine, label: str, found: float) -> None:
        reason = (
            f"{engine.url} does not hold {label}: on real tokens it differs from the trainer by k3 = {found:.3g} per "
            f"token, more than rollout.max_engine_k3 ({self._max_k3:g})"
        )
        self._distrusted.add((engine.url, EngineLabel.parse(label).version))
        if engine.url in self._suspects:
            raise engine_mismatch(f"{reason}, even after its weights were reloaded")
        self._suspects.add(engine.url)
        await self._engines.distrust(engine.url, reason)


def _fresh_by_engine(branches: Sequence[Branch], version: int) -> Mapping[str, list[tuple[Branch, NDArray[np.bool_]]]]:
    """For each engine, the branches with actions it sampled under ``version``, and which actions those are."""
    found: dict[str, list[tuple[Branch, NDArray[np.bool_]]]] = defaultdict(list)
    for branch in branches:
        masks: dict[str, NDArray[np.bool_]] = {}
        start = 0
        for segment in branch.segments:
            end = start + segment.num_tokens
            if segment.version == version and segment.num_actions and segment.cache_mode is CacheMode.FRESH:
                mask = masks.setdefault(segment.engine_id, np.zeros(len(branch.token_ids), np.bool_))
                mask[start:end] = segment.action_mask
            start = end
        for url, mask in masks.items():
            found[url].append((branch, mask))
    return found


def _require_finite(logprobs: Sequence[NDArray[np.float32]], label: str) -> None:
    if not all(np.isfinite(values).all() for values in logprobs):
        raise learner_diverged(
            f"the trainer's own log-probs under {label} are not finite: its weights have diverged; try a "
            "lower optimizer.lr or max_grad_norm"
        )


def _probe(branch: Branch) -> TrainSequence:
    """The window of a branch that holds the most sampled tokens; the earliest on a tie.

    Engine and trainer score the same ids from the window's start, so a window tells as much as the whole branch at a
    cost that does not grow with the prompt. The first token of a window has no prefix and is not scored.
    """
    mask = branch.action_mask
    num_starts = max(1, len(mask) - PROBE_TOKENS + 1)
    before = np.concatenate([[0], np.cumsum(mask)])
    starts = np.arange(num_starts)
    num_scored = before[np.minimum(starts + PROBE_TOKENS, len(mask))] - before[starts + 1]
    start = int(np.argmax(num_scored))
    return _sequence(branch, 1.0, slice(start, start + PROBE_TOKENS))


def _sequence(branch: Branch, temperature: float, window: slice = slice(None)) -> TrainSequence:
    """For scoring only: advantages and staleness carry no meaning."""
    token_ids, action_mask = branch.token_ids[window], branch.action_mask[window].copy()
    action_mask[0] = False
    nothing = np.zeros(len(token_ids), np.int32)
    return TrainSequence(
        token_ids=token_ids,
        action_mask=action_mask,
        behavior_logprobs=np.where(action_mask, branch.behavior_logprobs[window], np.float32(0)),
        turn_ids=nothing,
        staleness=nothing,
        advantages=0.0,
        temperature=temperature,
    )
