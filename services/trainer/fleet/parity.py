"""Do the engines compute what the trainer computes? Asked on real tokens before the first step, and of every version.

Two checks, because each sees what the other cannot. On the tokens of a batch that the newest version sampled, the
recorded log-probs are compared with the learner's: that covers template, temperature and the way in which the engine
decodes; it is made before the first step and whenever an engine appears for the first time. Beside the training, each
engine scores real tokens under each version that it is given, and must say what the learner said when it published that
version: that finds wrong weights under a right label, whatever the pace of the job.

Rule: nothing is trained beyond the bound. An engine that fails a scoring is loaded anew once, and the groups that it
took part in meanwhile are dropped; when it fails again, or recorded tokens do not agree, the job ends and says why.
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
from gspo_core.engine_label import EngineLabel
from gspo_core.types import Branch, CacheMode, Group
from services.engines.errors import EngineError
from services.process.telemetry import get_logger
from services.trainer.fleet.engine_switch import BoundEngine
from services.trainer.telling.failure import JobFailure

# Real tokens that are scored for every version: enough for a mean, too few to cost a job anything.
NUM_PROBES = 4
PROBE_TOKENS = 256
# Branches whose recorded log-probs are compared, for each engine that is new.
MAX_BRANCHES = 16
LOOK_S = 0.1
SCORE_TIMEOUT_S = 30.0
_MAX_LOG_RATIO = 20.0


def engine_mismatch(message: str) -> JobFailure:
    """Engine and trainer disagree beyond the bound; the job does not train."""
    return JobFailure("engine_mismatch", message)


def learner_diverged(message: str) -> JobFailure:
    """The trainer's own numbers are not finite: no engine can agree with them, and none is to blame."""
    return JobFailure("learner_diverged", message)


@dataclass(frozen=True)
class Held:
    """What the weights of a learner are published as."""

    version: int
    label: str


class ScoringLearner(Protocol):
    """What is used of the learner."""

    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[NDArray[np.float32]]: ...


class ProbedEngines(Protocol):
    """What is used of the pool."""

    def ready(self) -> list[BoundEngine]: ...

    async def distrust(self, url: str, reason: str) -> None: ...


def k3(trainer: NDArray[np.float32], engine: NDArray[np.float32]) -> float:
    """Mean of r - 1 - log r with r = trainer / engine: 0 where they agree, never negative.

    NaN where the engine says NaN: a comparison with a bound must be written so that it fails then. Raises ValueError
    where there is nothing to compare, because the mean of nothing would look like an engine at fault.
    """
    if not len(trainer):
        raise ValueError("k3 needs at least one token")
    log_ratio = np.clip(trainer.astype(np.float64) - engine, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return float(np.mean(np.exp(log_ratio) - 1 - log_ratio))


class ParityGate:
    """Of one job. ``check`` and ``remember`` are called between the learner's updates, ``run`` beside them."""

    def __init__(self, engines: ProbedEngines, max_k3: float) -> None:
        self._engines = engines
        self._max_k3 = max_k3
        self._known: set[str] = set()
        """Engines whose recorded tokens were found true."""
        self._probes: list[TrainSequence] = []
        self._label = ""
        self._expected: list[NDArray[np.float32]] = []
        """Log-probs of the probes under ``label``, by the learner."""
        self._judged: dict[str, str] = {}
        """Engine -> the label under which it was last found true."""
        self._suspects: set[str] = set()
        """Loaded anew because of a failed scoring, not found true since."""
        self._distrusted: set[tuple[str, int]] = set()
        """Engine and version whose tokens are not trained."""
        self._largest: dict[str, float] = {}
        """k3 of each engine at its last scoring."""

    def metrics(self) -> dict[str, float]:
        return {"engine/k3": max(self._largest.values())} if self._largest else {}

    def refusal(self, group: Group) -> str | None:
        """Why a group is not trained, if one of its tokens comes from weights that were not what they were called."""
        if not self._distrusted:
            return None
        sources = {(one.engine_id, one.version) for trajectory in group for one in trajectory.segments}
        return "dropped_mismatch" if sources & self._distrusted else None

    async def check(self, learner: ScoringLearner, groups: Sequence[Group], held: Held) -> None:
        """Raises JobFailure before anything is trained on tokens whose log-probs are not true."""
        branches = [branch for group in groups for trajectory in group for branch in trajectory.branches]
        for url, of_engine in _fresh_by_engine(branches, held.version).items():
            if url not in self._known:
                await self._compare(learner, url, of_engine[:MAX_BRANCHES], held)
        if not self._probes:
            acted = [branch for branch in branches if branch.action_mask[1:].any()]
            self._probes = [_probe(branch) for branch in acted[:NUM_PROBES]]
            await self.remember(learner, held)

    async def remember(self, learner: ScoringLearner, held: Held) -> None:
        """What engines have to say under this version, which the learner holds now."""
        if self._probes:
            self._expected = await asyncio.to_thread(learner.logprobs, self._probes)
            _require_finite(self._expected, held.label)
            self._label = held.label

    async def run(self) -> None:
        """Until cancelled. Raises JobFailure."""
        while True:
            due = [engine for engine in self._engines.ready() if self._is_due(engine)]
            await asyncio.gather(*(self._judge(engine) for engine in due))
            await asyncio.sleep(LOOK_S)

    def _is_due(self, engine: BoundEngine) -> bool:
        return engine.label == self._label != "" and self._judged.get(engine.url) != self._label

    async def _compare(
        self, learner: ScoringLearner, url: str, fresh: list[tuple[Branch, NDArray[np.bool_]]], held: Held
    ) -> None:
        sequences = [_sequence(branch, branch.segments[0].temperature) for branch, _ in fresh]
        ours = await asyncio.to_thread(learner.logprobs, sequences)
        _require_finite(ours, held.label)
        trainer = np.concatenate([values[mask] for values, (_, mask) in zip(ours, fresh, strict=True)])
        engine = np.concatenate([branch.behavior_logprobs[mask] for branch, mask in fresh])
        found = k3(trainer, engine)
        get_logger().info("parity", engine=url, label=held.label, k3=found, num_tokens=len(trainer))
        if not found <= self._max_k3:
            raise engine_mismatch(
                f"on {len(trainer)} tokens sampled by {url} under {held.label}, engine and trainer differ by "
                f"k3 = {found:.3g} per token, more than rollout.max_engine_k3 ({self._max_k3:g}): other weights, "
                "another temperature or template, or other numerics"
            )
        self._known.add(url)

    async def _judge(self, engine: BoundEngine) -> None:
        label, probes, expected = self._label, self._probes, self._expected
        try:
            async with asyncio.timeout(SCORE_TIMEOUT_S):
                answers = [await engine.client.score(probe.token_ids.tolist()) for probe in probes]
        except (EngineError, TimeoutError) as error:
            get_logger().warning("engine not scored", engine=engine.url, error=str(error))
            return
        if {held for _, held in answers} != {label}:
            return  # it has moved on meanwhile
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
            raise engine_mismatch(f"{reason}, also after its weights were loaded anew")
        self._suspects.add(engine.url)
        await self._engines.distrust(engine.url, reason)


def _fresh_by_engine(branches: Sequence[Branch], version: int) -> Mapping[str, list[tuple[Branch, NDArray[np.bool_]]]]:
    """For each engine the branches with actions that it sampled under ``version``, and which those are."""
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
            f"the trainer's own log-probs under {label} are not finite: its weights have diverged; a lower "
            "optimizer.lr or max_grad_norm may help"
        )


def _probe(branch: Branch) -> TrainSequence:
    """The window of a branch that holds the most sampled tokens, the earliest of equals.

    Engine and trainer score the same ids from the window's first one, so a window says as much as the whole branch and
    costs the same whatever the length of the prompt. The first token of a window has no prefix and is not scored.
    """
    mask = branch.action_mask
    num_starts = max(1, len(mask) - PROBE_TOKENS + 1)
    before = np.concatenate([[0], np.cumsum(mask)])
    starts = np.arange(num_starts)
    num_scored = before[np.minimum(starts + PROBE_TOKENS, len(mask))] - before[starts + 1]
    start = int(np.argmax(num_scored))
    return _sequence(branch, 1.0, slice(start, start + PROBE_TOKENS))


def _sequence(branch: Branch, temperature: float, window: slice = slice(None)) -> TrainSequence:
    """To be scored only: advantages and staleness carry no meaning."""
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
