"""A run of ``benchmarks.baselines`` that leaves the directory of a job, written by the product's own writers, so that
`gspo replay`, `audit` and forks find in it what a job leaves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.baselines.cells import Cell
from benchmarks.baselines.training import Training
from gspo_core.json_value import JSON
from gspo_core.learner import computing
from gspo_core.log import layout
from gspo_core.log.batches import BatchExtra
from gspo_core.log.changes import changed_spec
from gspo_core.log.lineage import Lineage
from gspo_core.log.manifests import encode_row
from gspo_core.log.records import AcceptedJob, VersionRecord
from gspo_core.log.settings import Tuning
from gspo_core.log.steps import train_again
from gspo_core.position import Position
from gspo_core.replay.journey import arrive
from gspo_core.replay.past import Past
from gspo_core.spec import JobSpec, ParentSpec
from gspo_core.types import Group
from services.files.batch_log import BatchLog
from services.files.checkpoints import CheckpointStore
from services.files.job_dir import JobDir
from services.files.job_records import JobRecords
from services.files.weights import WeightStore

EVERY, CHECKPOINT_EVERY = 3, 6
"""Measured, and kept, so often."""
FAR = "gspo/k3_policy_proximal"


@dataclass
class Run:
    """A job in the making, or a fork of one."""

    name: str
    curve: dict[int, float]
    far: dict[int, float]


class LoggedTraining(Training):
    """Writes the directory of a job."""

    def __init__(self, cell: Cell, spec: JobSpec, job: JobDir) -> None:
        super().__init__(cell, spec)
        self._job, self._lineage, self._tuning = job, Lineage(), Tuning(spec)
        self._log, self._weights = BatchLog(job), WeightStore(job)
        text = spec.model_dump_json()
        digest = hashlib.sha256(text.encode()).hexdigest()
        JobRecords(job).accept(AcceptedJob(text, digest, "2026-01-01T00:00:00.000Z"))
        self._store = CheckpointStore(job)
        self._store.begin_epoch(1, Position(0, 0))

    def begin(self) -> int:
        """At the base model, or where a fork begins; the number of steps that are over."""
        if self._spec.parent is None:
            self._publish(0)
            return 0
        step, past = self._spec.parent.step, Past(self._job.path)
        arrived = arrive(past, step)
        arrived.learner.retune(self._learner.config, self._learner.objective)
        self._learner, self._lineage = arrived.learner, arrived.lineage
        parent = self._job.path.parent / self._spec.parent.job / layout.WEIGHTS
        for version in range(max(0, step - self._cell.staleness), step):
            self._sampler.add(version, parent / layout.version_name(version))
        self._publish(step)
        return step

    def go_on(self, name: str, last: int, without: Sequence[int], say: Callable[[str], None]) -> Run:
        """``last``: the step to end with. ``without``: groups that are not trained."""
        first = self.begin()
        run = Run(name, {first: self._evaluate(first)}, {})
        for index in range(first, last):
            groups = [group for group in self._sample(index) if group.group not in without]
            run.far[index + 1] = self._train_logged(index, groups).get(FAR, 0.0)
            if (index + 1) % EVERY == 0:
                run.curve[index + 1] = self._evaluate(index + 1)
                say(f"{name}: {run.curve[index + 1]:.2f} after step {index + 1}")
        return run

    def _train_logged(self, index: int, groups: Sequence[Group]) -> dict[str, float]:
        step = index + 1
        versions = {version for group in groups for one in group for version in one.versions}
        extra: BatchExtra = {
            "version": index,
            "num_dispatched": step * self._spec.groups_per_step,
            "dropped": {},
            "staleness": {str(version): index - version for version in sorted(versions)},
            "settings": {"version": 0, "values": {}},
            "computed": computing(self._spec),
        }
        self._log.write(1, step, groups, extra)
        metrics = train_again(self._learner, self._lineage, self._log.read(1, step), self._tuning)
        self._publish(step)
        if step % CHECKPOINT_EVERY == 0:
            self._store.write(Position(1, step), self._lineage, self._learner.save_state)
        return metrics

    def _publish(self, version: int) -> None:
        manifest = self._weights.write(version, 1, version, self._learner.save_weights)
        JobRecords(self._job).write_version(VersionRecord(version, version, encode_row(manifest)))
        self._sampler.add(version, self._weights.path(version))
        self._sampler.forget_before(version - self._cell.staleness)


def forked(spec: JobSpec, parent: str | None, step: int, changes: Mapping[str, JSON]) -> JobSpec:
    changed = changed_spec(spec, changes)
    return changed if parent is None else changed.model_copy(update={"parent": ParentSpec(job=parent, step=step)})


def weights_at(job: JobDir, version: int) -> list[str]:
    return [file.sha256 for file in WeightStore(job).manifest(version).files]
