"""The log ratio of a logged step's tokens, policy over sampler, as the sum of what caused it.

The rule: every token names the version that sampled it, so the trainer's own weights of that version are rebuilt from
the logs and asked for the token's log-prob. Three exact parts follow, none of them estimated:

- *mismatch*: the trainer against the engine, with the weights of the version that sampled: numerics, rounding of what
  was published, a stale cache, another template or temperature;
- *staleness*: the policy when the batch entered the trainer against the policy of that version;
- *update*: the policy when the token was trained against that, from the step's own updates.

Tokens of a version that the job's history has left, or of another job whose batches it was fed, cannot be rebuilt; they
are counted and left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gspo_core.json_value import JSON
from gspo_core.log.sequences import TrainBatch
from gspo_core.log.steps import logged_sequences, train_again
from gspo_core.position import Position
from gspo_core.replay.journey import Say, arrive, compute_alike, say_nothing
from gspo_core.replay.past import Past
from gspo_core.staleness import in_history

Floats = NDArray[np.float64]
PARTS = ("mismatch", "staleness", "update")
Logprobs = Sequence[NDArray[np.float32]]
"""For each sequence, of every token of it."""


@dataclass(frozen=True, eq=False)
class RatioParts:
    """The log ratios of trained tokens; their sum is that of the policy to the sampler."""

    mismatch: Floats
    staleness: Floats
    update: Floats

    @property
    def total(self) -> Floats:
        return self.mismatch + self.staleness + self.update

    def at(self, places: NDArray[np.bool_]) -> RatioParts:
        return RatioParts(self.mismatch[places], self.staleness[places], self.update[places])


@dataclass(frozen=True, eq=False)
class StepSplit:
    """The trained tokens of one step, in the order of its sequences."""

    step: int
    parts: RatioParts
    version: NDArray[np.int32]
    age: NDArray[np.int32]
    """In steps."""
    num_left_out: int
    """Tokens of versions that cannot be rebuilt here."""

    def by_age(self) -> dict[int, RatioParts]:
        return {int(age): self.parts.at(self.age == age) for age in np.unique(self.age)}


def split_ratio(behavior: Floats, sampler: Floats, proximal: Floats, policy: Floats) -> RatioParts:
    """From log-probs of the same tokens: as recorded, and by the trainer under the weights of the version that sampled
    them, under those that the step began with, and under those that the token was trained from."""
    return RatioParts(sampler - behavior, proximal - sampler, policy - proximal)


def k3(log_ratio: Floats) -> float:
    """Mean of exp(x) - 1 - x: never negative, and the KL divergence where the tokens are the sampler's; 0 for none."""
    return float((np.expm1(log_ratio) - log_ratio).mean()) if len(log_ratio) else 0.0


def split_step(past: Past, step: int, say: Say = say_nothing) -> StepSplit:
    """Train ``step`` again on a way that passes every version that sampled for it. Raises NotKept, DamagedPast."""
    batch, steps_of = past.whole_batch(step), _steps_of(past)
    needed = {
        known[version]
        for one in batch.trajectories
        for known in [steps_of.get(one.key.job, {})]
        for version in one.versions & known.keys()
    }
    arrived = arrive(past, min(needed, default=step - 1), say)
    learner, scored = arrived.learner, dict[int, Logprobs]()
    for number in range(arrived.step, step):
        if number > arrived.step:
            compute_alike(past.whole_batch(number), past.spec, say)
            train_again(learner, arrived.lineage, past.whole_batch(number), arrived.tuning)
            say(f"step {number} trained again")
        if number in needed or number == step - 1:
            scored[number] = learner.logprobs(logged_sequences(batch, past.spec.objective.advantage).sequences)
    arrived.tuning.recall(learner, batch.extra.get("settings", {}))
    train = logged_sequences(batch, arrived.tuning.spec.objective.advantage)
    compute_alike(batch, past.spec, say)
    learner.step(train.sequences)
    say(f"step {step} trained again")
    return _split(step, train, steps_of, scored, learner.trained_logprobs)


StepsOf = Mapping[str, Mapping[int, int]]
"""By job: after how many steps each version of the history was published. Each job numbers its own versions."""


def _steps_of(past: Past) -> StepsOf:
    newest, forks = past.newest_epoch, past.forks
    found = defaultdict[str, dict[int, int]](dict)
    for one in past.versions():
        if in_history(Position(one.epoch, one.step), newest, forks):
            found[one.job][one.version] = one.step
    return found


def _split(
    step: int, train: TrainBatch, steps_of: StepsOf, scored: Mapping[int, Logprobs], policy: Logprobs
) -> StepSplit:
    columns: list[tuple[Floats, ...]] = []
    versions, ages = list[NDArray[np.int32]](), list[NDArray[np.int32]]()
    num_left_out = 0
    branches = [(one.key.job, branch) for one in train.episodes for branch in one.branches]
    for index, (sequence, (job, branch)) in enumerate(zip(train.sequences, branches, strict=True)):
        mask, found, known = sequence.action_mask, branch.versions[sequence.action_mask], steps_of.get(job, {})
        is_known = np.isin(found, list(known)) & np.isfinite(policy[index])  # nothing trained is not a number
        num_left_out += int((~np.isin(found, list(known))).sum())
        under = np.zeros(len(found))
        for version in np.unique(found[is_known]):
            places = found == version
            under[places] = scored[known[int(version)]][index][mask][places]
        row = (sequence.behavior_logprobs[mask], under, scored[step - 1][index][mask], policy[index])
        columns.append(tuple(np.asarray(one, np.float64)[is_known] for one in row))
        versions.append(found[is_known])
        ages.append(sequence.staleness[mask][is_known])
    parts = split_ratio(*(np.concatenate(column) for column in zip(*columns, strict=True)))
    return StepSplit(step, parts, np.concatenate(versions), np.concatenate(ages), num_left_out)


def as_text(split: StepSplit) -> Iterator[str]:
    """One line for each age, and one for all."""
    yield f"step {split.step}: log ratio of policy to sampler by its cause, mean and k3 over trained tokens"
    head = "".join(f"{name:>24}" for name in (*PARTS, "together"))
    yield f"{'age':>5}{'tokens':>8}{head}"
    rows = [*((str(age), parts) for age, parts in split.by_age().items()), ("all", split.parts)]
    for age, parts in rows:
        cells = "".join(f"{mean:>+14.6f}{distance:>10.2g}" for mean, distance in _means(parts).values())
        yield f"{age:>5}{len(parts.update):>8}{cells}"
    if split.num_left_out:
        yield f"{split.num_left_out} tokens are by versions of another job, or that the history has left, and not in it"


def as_record(split: StepSplit) -> dict[str, JSON]:
    return {
        "step": split.step,
        "num_left_out": split.num_left_out,
        "all": _part_record(split.parts),
        "by_age": {str(age): _part_record(parts) for age, parts in split.by_age().items()},
    }


def _part_record(parts: RatioParts) -> JSON:
    means: dict[str, JSON] = {name: {"mean": mean, "k3": far} for name, (mean, far) in _means(parts).items()}
    return {"num_tokens": len(parts.update), **means}


def _means(parts: RatioParts) -> dict[str, tuple[float, float]]:
    found = {name: getattr(parts, name) for name in PARTS} | {"together": parts.total}
    return {name: (float(values.mean()) if len(values) else 0.0, k3(values)) for name, values in found.items()}
