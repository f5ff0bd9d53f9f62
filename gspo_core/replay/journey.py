"""The learner as it was at any step: the newest intact checkpoint before, then the logs that follow it.

The rule: a damaged checkpoint is passed over for an older one, whose logs lead to the same weights; a damaged log ends
the journey with its name. Steps that several ranks trained come out alike on one, and bit for bit on as many
(``on_ranks``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gspo_core.learner import Learner, UnknownFormat, compute_as, device_here
from gspo_core.log.batches import LoggedBatch
from gspo_core.log.lineage import Lineage
from gspo_core.log.settings import Tuning, learner_config
from gspo_core.log.steps import train_again
from gspo_core.position import Position
from gspo_core.replay.on_ranks import shared_folder
from gspo_core.replay.past import DamagedPast, Past
from gspo_core.spec import JobSpec

Say = Callable[[str], None]


def say_nothing(_: str) -> None:
    pass


@dataclass
class Arrived:
    """A learner after ``step`` steps of the past."""

    learner: Learner
    lineage: Lineage
    tuning: Tuning
    step: int
    start: Position | None
    """The checkpoint that it came from; None: from the base model."""
    num_replayed: int
    """Steps that were trained again on the way."""


def new_learner(spec: JobSpec) -> Learner:
    device = device_here(spec)
    return Learner(Path(spec.model), learner_config(spec), spec.training_objective, seed=spec.seed, device=device)


def arrive(past: Past, step: int, say: Say = say_nothing) -> Arrived:
    """Raises NotKept, DamagedPast."""
    learner, before = new_learner(past.spec), None
    while True:
        start, steps = past.way_to(step, before)
        try:
            lineage = _begin(past, learner, start)
            break
        except DamagedPast as error:
            say(f"{error}: an older checkpoint is tried")
            before = start
    arrived = Arrived(learner, lineage, Tuning(past.spec), step, start, len(steps))
    for number in steps:
        batch = past.whole_batch(number)
        compute_alike(batch, past.spec, say)
        train_again(learner, lineage, batch, arrived.tuning)
        say(f"step {number} trained again")
    return arrived


def _begin(past: Past, learner: Learner, start: Position | None) -> Lineage:
    if start is None:
        return Lineage() if past.origin is None else _begin_as_fork(past, past.origin, learner)
    lineage = past.lineage(start)
    try:
        learner.load_state(past.learner_dir(start))
    except UnknownFormat:
        raise
    except (ValueError, OSError) as error:
        raise DamagedPast(str(error)) from error
    return lineage


def _begin_as_fork(past: Past, origin: Past, learner: Learner) -> Lineage:
    parent = arrive(origin, past.begun_after)
    with shared_folder() as folder:
        parent.learner.save_state(folder / "state")
        learner.load_state(folder / "state")
    return parent.lineage


def compute_alike(batch: LoggedBatch, spec: JobSpec, say: Say) -> None:
    for problem in compute_as(batch.extra.get("computed"), spec):
        say(f"step {batch.step}: {problem}")
