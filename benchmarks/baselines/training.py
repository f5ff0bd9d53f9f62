"""One cell with one seed: sample under weights of the age that the cell says, train, measure on held-out tasks.

Rule: what a cell may not differ in (tasks, seeds of sampling, sizes) is a function of the seed alone. Advantages,
sequences and updates are the trainer's own; nothing is trained that a job would not train.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.baselines.cells import Attribution, Cell
from benchmarks.baselines.play import Ages, Task, context_length, play
from benchmarks.baselines.sampler import DenseSampler, MixtureSampler, Sampler
from gspo_core.batch import TrainSequence
from gspo_core.chat import HermesCodec, load_tokenizer
from gspo_core.env import Environment, load_environment
from gspo_core.learner import Learner
from gspo_core.log.sequences import group_metrics, train_batch
from gspo_core.log.settings import learner_config
from gspo_core.spec import JobSpec
from gspo_core.types import Group, Split
from services.trainer.groups.tasks import FIRST_EVAL_GROUP, TaskSchedule

RECORDED = (
    "reward/mean",
    "gspo/clip_frac",
    "gspo/clip_frac_positive",
    "gspo/clip_frac_negative",
    "gspo/clip_frac_sequence",
    "gspo/ratio_mean",
    "gspo/log_ratio_std",
    "gspo/k3_proximal_behavior",
    "gspo/k3_policy_behavior",
    "gspo/k3_policy_proximal",
    "gspo/weight_mean",
    "gspo/weight_raw_mean",
    "gspo/weight_truncated_frac",
    "gspo/ess_token",
    "gspo/ess_sequence",
    "gspo/kept_frac",
    "gspo/kept_frac_k3",
    "learner/grad_norm",
    "learner/grad_norm_max",
    "learner/grad_alignment",
    "learner/num_bounded_updates",
    "learner/step_k3",
    "learner/step_kept",
    "learner/rate_share",
    "gspo/k3_gate",
    "gspo/clip_low",
    "gspo/kept_frac_m2",
    "learner/num_idle_sequences",
    "staleness/mean",
    "staleness/max",
    "staleness/within_one",
    "episodes/mixed_versions_share",
    "episodes/actions_mean",
    "episodes/turns_mean",
    "sampling/entropy",
)
"""Of each step."""
NUM_KEPT = 256
"""Episodes whose computed tokens a sampler keeps from turn to turn, where they are long: more than play at once. Where
they are short, runs stay what they were to the last bit."""


@dataclasses.dataclass
class Result:
    """What one cell with one seed showed."""

    evaluations: list[tuple[int, float]]
    """Held-out success after so many steps."""
    steps: dict[str, list[float | None]]
    """By metric, a number for each step; None where it had no data."""
    seconds: dict[str, float]
    """Of one core, which is the wall time where nothing else runs on it: sampling, training, evaluating, all."""
    engine_difference: float
    """Largest difference between a recorded log-prob and that of the trainer, in the first batch."""


class Training:
    """Holds everything that one cell needs."""

    def __init__(self, cell: Cell, spec: JobSpec) -> None:
        self._cell, self._spec = cell, spec
        model = Path(spec.model)
        self._environment: Environment = load_environment(spec.environments[0].ref)
        self._codec = HermesCodec(load_tokenizer(model))
        self._learner = Learner(model, learner_config(spec), spec.training_objective, seed=spec.seed)
        self._sampler: Sampler = (
            MixtureSampler(self._codec.stop_ids[1])
            if cell.model == "mixture"
            else DenseSampler(model, context_length(spec), NUM_KEPT if cell.model == "cashbook" else 0)
        )
        num_tasks = self._environment.num_tasks(Split.TRAIN)
        assert num_tasks is not None
        self._schedule = TaskSchedule(spec.seed, [num_tasks], [1.0])
        self._seconds = {"sampling": 0.0, "training": 0.0, "evaluating": 0.0}
        self._metrics: list[dict[str, float]] = []

    def run(self) -> Result:
        started = time.process_time()
        self._publish(0)
        evaluation = self._spec.evaluation
        assert evaluation is not None
        evaluations = [(0, self._evaluate(0))]
        difference = 0.0
        for step in range(self._spec.steps):
            groups = self._sample(step)
            if step == 0:
                difference = self._engine_difference(groups)
            self._train(step, groups)
            done = step + 1
            if done in self._cell.judged_at:
                evaluations.append((done, self._evaluate(done, self._cell.judged_times)))
            elif done % evaluation.every == 0 or done == self._spec.steps:
                evaluations.append((done, self._evaluate(done)))
        self._seconds["all"] = time.process_time() - started
        steps = {name: [_rounded(one.get(name)) for one in self._metrics] for name in RECORDED}
        return Result(
            evaluations=evaluations,
            steps={name: values for name, values in steps.items() if any(value is not None for value in values)},
            seconds={name: round(value, 1) for name, value in self._seconds.items()},
            engine_difference=difference,
        )

    def _publish(self, version: int) -> None:
        """Version n holds the weights after n steps; those that nobody will sample with any more are forgotten."""
        with tempfile.TemporaryDirectory() as folder:
            self._learner.save_weights(Path(folder) / "weights")
            self._sampler.add(version, Path(folder) / "weights")
        self._sampler.forget_before(version - self._cell.staleness)

    def _sample(self, step: int) -> list[Group]:
        started = time.process_time()
        first = step * self._spec.groups_per_step
        tasks = [
            Task(group, self._schedule.task(group).index, Split.TRAIN, self._spec.rollout.group_size)
            for group in range(first, first + self._spec.groups_per_step)
        ]
        of_step = Ages.sustained if self._cell.schedule == "sustained" else Ages.of_step
        ages = of_step(step, self._cell.staleness)
        groups = play(self._spec, self._environment, self._codec, self._sampler, tasks, ages)
        self._seconds["sampling"] += time.process_time() - started
        return groups

    def _train(self, step: int, groups: Sequence[Group]) -> None:
        started = time.process_time()
        config = self._spec.objective.advantage
        sequences = train_batch(groups, lambda versions: np.asarray(step - versions, np.int32), config).sequences
        sequences = attribute(sequences, step, self._cell.attribution, self._sampler)
        if self._cell.only_successes:
            sequences = without_failures(sequences)
        metrics = self._learner.step(sequences)
        within = {"staleness/within_one": _within_one(sequences, self._cell.staleness)}
        self._metrics.append(metrics | group_metrics(groups) | within)
        self._publish(step + 1)
        self._seconds["training"] += time.process_time() - started

    def _evaluate(self, version: int, times: int = 1) -> float:
        """Success of the newest weights on the held-out tasks, each played ``times``, sampled as in training."""
        started = time.process_time()
        evaluation = self._spec.evaluation
        assert evaluation is not None
        num_tasks = self._environment.num_tasks(Split.EVAL)
        assert num_tasks is not None
        count, ages = min(evaluation.tasks, num_tasks), Ages(version, version)
        total = 0.0
        for first in range(FIRST_EVAL_GROUP, FIRST_EVAL_GROUP + times * count, count):
            tasks = [Task(first + index, index, Split.EVAL, 1) for index in range(count)]
            groups = play(self._spec, self._environment, self._codec, self._sampler, tasks, ages)
            total += sum(reward for group in groups for reward in group.rewards if reward is not None)
        self._seconds["evaluating"] += time.process_time() - started
        return total / (times * count)

    def _engine_difference(self, groups: Sequence[Group]) -> float:
        """Sampler against trainer under the same weights: what is not staleness."""
        sequences = train_batch(groups, np.zeros_like, self._spec.objective.advantage).sequences
        scored = self._learner.logprobs(sequences)
        pairs = zip(sequences, scored, strict=True)
        return max(float(np.abs(one.behavior_logprobs - logprobs)[one.action_mask].max()) for one, logprobs in pairs)


def attribute(
    sequences: Sequence[TrainSequence], step: int, attribution: Attribution, sampler: Sampler
) -> list[TrainSequence]:
    """The sequences as a system would train them that keeps one version for an episode and computes its log-probs."""
    if attribution == "recorded":
        return list(sequences)
    pick = np.max if attribution == "oldest" else np.min
    ages = [int(pick(one.staleness[one.action_mask])) for one in sequences]
    result = list(sequences)
    for age in sorted(set(ages)):
        places = [place for place, one in enumerate(ages) if one == age]
        scored = sampler.score(step - age, [sequences[place].token_ids.tolist() for place in places])
        for place, logprobs in zip(places, scored, strict=True):
            one = sequences[place]
            claimed = np.where(one.action_mask, [0.0, *logprobs], 0.0).astype(np.float32)
            result[place] = dataclasses.replace(
                one, behavior_logprobs=claimed, staleness=np.full_like(one.staleness, age)
            )
    return result


def without_failures(sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
    """Those below their group's mean teach nothing; they still count in the mean over the batch."""
    return [dataclasses.replace(one, advantages=np.maximum(one.advantages, 0.0)) for one in sequences]


def _within_one(sequences: Sequence[TrainSequence], staleness: int) -> float:
    """Share of the trained tokens that are so many steps old, or one more or less."""
    ages = np.concatenate([one.staleness[one.action_mask] for one in sequences])
    return float((np.abs(ages - staleness) <= 1).mean())


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
