"""Jobs in miniature with all that they leave on disk, written with nothing but the library: for tests of the past."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gspo_core.learner import Learner, computing
from gspo_core.log import layout
from gspo_core.log.batches import BatchExtra, LoggedBatch, encode_batch
from gspo_core.log.checkpoints import encode_checkpoint, encode_fork
from gspo_core.log.lineage import Lineage
from gspo_core.log.manifests import encode_manifest, encode_row
from gspo_core.log.records import AcceptedJob, VersionRecord, encode_record
from gspo_core.log.settings import Tuning
from gspo_core.log.steps import train_again
from gspo_core.position import Position
from gspo_core.replay.journey import new_learner
from gspo_core.spec import JobSpec
from gspo_core.types import EpisodeKey, Group, Outcome, Segment, Split, StopReason, Trajectory
from gspo_core.versions import WeightFile, WeightsManifest
from tests.core.learner_support import VOCABULARY

SIZE = 4
GROUPS = 3


def spec_of(model: Path, **changes: Any) -> JobSpec:
    base: dict[str, Any] = {
        "model": str(model),
        "environments": [{"ref": "a:B"}],
        "groups_per_step": GROUPS,
        "steps": 6,
        "checkpoint_every": 2,
        "optimizer": {"lr": 1e-3},
        "objective": {"minibatches": 2},
        "rollout": {"group_size": SIZE, "max_staleness": 1},
    }
    return JobSpec.model_validate(base | changes)


@dataclass
class MadePast:
    """A job that was trained for ``steps`` steps."""

    folder: Path
    spec: JobSpec
    learner: Learner
    losses: dict[int, float]


def make_past(
    folder: Path,
    spec: JobSpec,
    *,
    steps: int = 6,
    settings: dict[int, dict[str, Any]] | None = None,
    seed: int = 0,
    trains: bool = True,
) -> MadePast:
    """``settings``: live settings from a step on. ``trains``: else there are batch logs alone."""
    folder.mkdir(parents=True)
    text = spec.model_dump_json()
    job = AcceptedJob(text, hashlib.sha256(text.encode()).hexdigest(), "2026-01-01T00:00:00.000Z")
    _write(folder / layout.ACCEPTED, encode_record(job))
    for name in layout.fork_records(1):
        _write(folder / layout.CHECKPOINTS / name, encode_fork(Position(0, 0)))
    learner, lineage, tuning, losses = new_learner(spec), Lineage(), Tuning(spec), dict[int, float]()
    rng = np.random.default_rng(seed)
    _publish(folder, learner, 0)
    values: dict[str, Any] = {}
    for step in range(1, steps + 1):
        values = (settings or {}).get(step, values)
        groups = [_group(learner, rng, folder.name, number) for number in range((step - 1) * GROUPS, step * GROUPS)]
        extra: BatchExtra = {
            "version": step - 1,
            "num_dispatched": step * GROUPS + 2,
            "dropped": {},
            "staleness": {str(step - 1): 0, str(max(0, step - 2)): 0 if step < 2 else 1},
            "settings": {"version": len(values), "values": values},
            "computed": computing(spec),
        }
        at = Position(1, step)
        _write(folder / layout.BATCHES / layout.step_name(at), b"".join(encode_batch(at, groups, extra)))
        if not trains:
            continue
        batch = LoggedBatch(1, step, tuple(groups), extra)
        losses[step] = train_again(learner, lineage, batch, tuning)["gspo/loss"]
        _publish(folder, learner, step)
        if step % spec.checkpoint_every == 0:
            save_checkpoint(folder, learner, lineage, at)
    return MadePast(folder, spec, learner, losses)


def save_checkpoint(folder: Path, learner: Learner, lineage: Lineage, at: Position) -> None:
    place = folder / layout.CHECKPOINTS / layout.step_name(at)
    learner.save_state(place / layout.LEARNER)
    digest = hashlib.sha256((place / layout.LEARNER_MANIFEST).read_bytes()).hexdigest()
    _write(place / layout.CHECKPOINT_MANIFEST, encode_checkpoint(at, lineage, digest))


def _publish(folder: Path, learner: Learner, step: int) -> None:
    place = folder / layout.WEIGHTS / layout.version_name(step)
    learner.save_weights(place)
    files = tuple(
        WeightFile(path.name, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(place.iterdir())
    )
    manifest = WeightsManifest(folder.name, step, 1, step, files)
    _write(place / layout.WEIGHTS_MANIFEST, encode_manifest(manifest))
    record = VersionRecord(step, step, encode_row(manifest))
    _write(folder / layout.VERSIONS / layout.numbered_name(step), encode_record(record))


def _group(learner: Learner, rng: np.random.Generator, job: str, number: int) -> Group:
    prompt = rng.integers(0, VOCABULARY, 20)
    members = tuple(_episode(learner, rng, EpisodeKey(job, number, member), prompt) for member in range(SIZE))
    return Group(job, number, Split.TRAIN, number, SIZE, members)


def _episode(learner: Learner, rng: np.random.Generator, key: EpisodeKey, prompt: Any) -> Trajectory:
    """Two turns. The log-probs are those of the weights of now, a little off, as an engine's are."""
    from gspo_core.batch import TrainSequence

    turns = [rng.integers(0, VOCABULARY, int(rng.integers(3, 12))) for _ in range(2)]
    ids = np.concatenate([prompt, turns[0], [5], turns[1]])
    mask = np.concatenate([np.zeros(20, bool), np.ones(len(turns[0]), bool), [False], np.ones(len(turns[1]), bool)])
    nothing = np.zeros(len(ids))
    sequence = TrainSequence(ids, mask, nothing, nothing, nothing, 1.0)
    [logprobs] = learner.logprobs([sequence])
    told = np.where(mask, np.minimum(logprobs + rng.normal(0, 0.01, len(ids)), -1e-4), 0).astype(np.float32)
    cut = 20 + len(turns[0])
    version = learner.counters.num_steps
    exact, form = float(rng.random() < 0.5), float(rng.random())
    outcome = Outcome(StopReason.COMPLETED, exact + form, {"exact": exact, "form": form})

    def segment(index: int, part: slice, of_version: int, **more: Any) -> Segment:
        fields = (ids[part], mask[part], told[part])
        return Segment(key, 0, 0, index, index, of_version, 1.0, "engine", *fields, **more)

    older = max(0, version - 1)
    return Trajectory((segment(0, slice(0, cut), older), segment(1, slice(cut, None), version, outcome=outcome)))


def remove_step(folder: Path, kind: str, step: int, epoch: int = 1) -> None:
    path = folder / kind / layout.step_name(Position(epoch, step))
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
