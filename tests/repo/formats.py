"""Every format that outlives a process: the number of its schema, where that stands, and a digest of its shape.

The rule, which ``test_formats.py`` holds: a shape that a release wrote never changes under its number. ``formats.json``
keeps number and digest of each; ``python -m tests.repo.formats`` writes it, and refuses where a number of a release
would get another shape. A fixture in ``tests/releases`` holds the ``formats.json`` of its release.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_core import codec, lora_adapter
from gspo_core.environment_records import EnvironmentDescription
from gspo_core.learner import state as learner_state
from gspo_core.log import archive, batches, checkpoints, manifests, records, trained
from gspo_core.log.lineage import Lineage
from gspo_core.position import Position
from gspo_core.versions import WeightFile, WeightsManifest
from services.api.http import key_ring
from services.api.views.replay_views import (
    BranchSharesView,
    DifferenceView,
    InfluenceView,
    ReplayAnswer,
    ReplayedStep,
    SingleView,
    VersionFound,
)
from services.episodes import history, snapshots
from services.episodes.matching import TurnEntry
from services.files import data_dir, replays, weight_deltas
from services.files.environments import registry
from services.files.job_dir import JobDir
from services.state import fleet_records, functions
from services.state.jobs import CancelManner, DesiredState, JobStatus, TrainerAttempt
from services.state.kept_jobs import STATUS_FIELDS
from tests.releases.make import about
from tests.repo.redis_shapes import observe
from tests.repo.shapes import shape_of

ROOT = Path(__file__).parents[2]
KEPT = Path(__file__).with_name("formats.json")
RELEASES = ROOT / "tests" / "releases"
# 0.1.0 is commit 84ec78a, from before this table.
FUNCTIONS = "functions in Redis"
BEFORE_THIS_TABLE = {"0.1.0": {FUNCTIONS: (1, "b7507e68f8da4570")}}

ANSWERED = (
    *(ReplayAnswer, ReplayedStep, VersionFound, DifferenceView, InfluenceView),
    *(SingleView, BranchSharesView),
)

Kept = dict[str, tuple[int, str]]
"""Number and digest of each format."""


@dataclass(frozen=True, slots=True)
class Format:
    name: str
    place: str
    """The file that holds the number, and its name there."""
    number: int
    shape: Any

    @property
    def digest(self) -> str:
        if isinstance(self.shape, str):
            return self.shape
        return hashlib.sha256(json.dumps(self.shape, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def complaint(self) -> str:
        file, _, name = self.place.partition(" ")
        return f"the shape of {self.name} changed: raise {name} in {file} and write what reads the old one"


def all_formats() -> list[Format]:
    return [*_of_the_log(), *_of_files(), *_in_redis()]


def _of_the_log() -> Iterator[Format]:
    headers = [codec._PREFIX.format, codec._COUNTS.format, codec._HEADER.format]
    meta = [shape_of(one) for one in codec._META.values()]
    yield Format("segments", "gspo_core/codec.py EVIDENCE_SCHEMA", codec.EVIDENCE_SCHEMA, [headers, meta])
    index = [shape_of(batches._Index), shape_of(batches.BatchExtra), batches._HEADER.format]
    yield Format("batch logs", "gspo_core/log/batches.py SCHEMA", batches.SCHEMA, index)
    packed = [archive._MAGIC.decode(), archive._HEADER.format, "zlib"]
    yield Format("archived batch logs", "gspo_core/log/archive.py SCHEMA", archive.SCHEMA, packed)
    header = [trained._MAGIC.decode(), trained._HEADER.format]
    yield Format("log-probs when trained", "gspo_core/log/trained.py SCHEMA", trained.SCHEMA, header)
    checkpoint = [shape_of(one) for one in (checkpoints.CheckpointRecord, checkpoints.ForkRecord, Lineage)]
    yield Format("checkpoints", "gspo_core/log/checkpoints.py FORMAT", checkpoints.FORMAT, checkpoint)
    fork = shape_of(checkpoints.ForkRecord)
    yield Format("where epochs forked off", "gspo_core/log/checkpoints.py FORK_FORMAT", checkpoints.FORK_FORMAT, fork)
    tensors = [shape_of(learner_state.Manifest), learner_state.MOMENTS, learner_state.shard_name(0)]
    yield Format("learner states", "gspo_core/learner/state.py FORMAT", learner_state.FORMAT, tensors)
    small = [shape_of(learner_state.Manifest), learner_state.SMALL_MOMENTS, learner_state.shard_name(0)]
    place = "gspo_core/learner/state.py SMALL_FORMAT"
    yield Format("learner states, moments in eight bits", place, learner_state.SMALL_FORMAT, small)
    example = WeightsManifest("j", 1, 1, 1, (WeightFile("model.safetensors", 1, "0" * 64),))
    written = [_keys(manifests.encode_manifest(example)), _keys(manifests.encode_row(example))]
    weights = [*written, shape_of(WeightsManifest)]
    yield Format("manifests of weights", "gspo_core/log/manifests.py FORMAT", manifests.FORMAT, weights)
    of_job = [*map(shape_of, (records.AcceptedJob, records.VersionRecord, EnvironmentDescription)), STATUS_FIELDS]
    yield Format("records of a job", "gspo_core/log/records.py SCHEMA", records.SCHEMA, of_job)


def _keys(data: bytes | str) -> Any:
    """Of a JSON object and all below it."""
    value = json.loads(data) if isinstance(data, bytes | str) else data
    if isinstance(value, dict):
        return {name: _keys(json.dumps(inner)) for name, inner in value.items()}
    return [_keys(json.dumps(value[0]))] if isinstance(value, list) and value else type(value).__name__


def _of_files() -> Iterator[Format]:
    registered = [shape_of(registry.Registration), shape_of(registry.ExaminationReport)]
    yield Format(
        "registered environments", "services/files/environments/registry.py SCHEMA", registry.SCHEMA, registered
    )
    key = shape_of(key_ring.KeyRecord)
    yield Format("keys of the API", "services/api/http/key_ring.py SCHEMA", key_ring.SCHEMA, key)
    shapes = {
        one.__name__: {name: str(field.annotation) for name, field in one.model_fields.items()} for one in ANSWERED
    }
    yield Format("answers of replays", "services/files/replays.py FORMAT", replays.FORMAT, shapes)
    delta = [shape_of(weight_deltas.Header), weight_deltas.DELTA_NAME]
    yield Format("deltas of weights", "services/files/weight_deltas.py FORMAT", weight_deltas.FORMAT, delta)
    merged = [shape_of(lora_adapter.Merged), lora_adapter.MERGED_NAME]
    merged += [lora_adapter.ADAPTER_WEIGHTS, lora_adapter.ADAPTER_CONFIG]
    yield Format("merged adapters", "gspo_core/lora_adapter.py FORMAT", lora_adapter.FORMAT, merged)
    yield Format("the data directory", "services/files/data_dir.py LAYOUT", data_dir.LAYOUT, _layout())


def _layout() -> list[str]:
    """A path of each kind, below the data directory and below a job's."""
    at, data = Position(1, 2), data_dir.DataDir(Path())
    job = JobDir(data.jobs.path / "job")
    environments, keys = data.environments, data.keys
    paths = [data.audit, data.redis, data.venvs, data.logs, data.port_of("engine"), data.model("m"), data.demo]
    paths += [environments.record("e", 1), environments.removed("e", 1), environments.report("e", 1, 2)]
    paths += [environments.upload("d"), keys.record("k"), keys.revoked("k")]
    paths += [job.accepted, job.status(1), job.environment(0), job.version_record(1), job.metrics, job.tensorboard]
    paths += [job.batch(at), job.trained_at(at), job.checkpoints, job.export(at), job.version(1)]
    return [str(path) for path in paths]


def _in_redis() -> Iterator[Format]:
    version = "services/state/functions.py LIBRARY_VERSION"
    yield Format(FUNCTIONS, version, functions.LIBRARY_VERSION, functions.library()[1])
    queue_records, others = observe()
    file = functions.LUA / "queue_records.lua"
    [number] = re.findall(r"^local SCHEMA = (\d+)$", file.read_text(), re.MULTILINE)
    yield Format("records of the queue", f"{file.relative_to(ROOT)} SCHEMA", int(number), queue_records)
    told = (fleet_records.EngineRecord, fleet_records.TrainerRecord, fleet_records.WorkerRecord, TrainerAttempt)
    states = (JobStatus, DesiredState, CancelManner)
    shapes = [others, *map(shape_of, (*told, *states))]
    yield Format("records of jobs and processes in Redis", version, functions.LIBRARY_VERSION, shapes)
    world = shape_of(history.WorldSnapshot)
    yield Format("worlds of episodes", "services/episodes/history.py SCHEMA", history.SCHEMA, world)
    tree = [snapshots.KIND, *map(shape_of, (snapshots.TreeSnapshot, TurnEntry, snapshots.StoredReward))]
    yield Format("turns of agents' episodes", "services/episodes/snapshots.py SCHEMA", snapshots.SCHEMA, tree)


def kept(text: bytes | str) -> Kept:
    return {name: (number, digest) for name, (number, digest) in json.loads(text).items()}


def released() -> dict[str, Kept]:
    """The formats of each release, as its fixture holds them."""
    found: dict[str, Kept] = {name: dict(formats) for name, formats in BEFORE_THIS_TABLE.items()}
    for path in sorted(RELEASES.glob("*.tar.xz")):
        record = about(path)
        if "formats" in record:
            found[record["name"]] = kept(json.dumps(record["formats"]))
    return found


def complaints(formats: Sequence[Format], releases: dict[str, Kept]) -> list[str]:
    """What a release wrote under the same number in another shape, or under a higher one."""
    return [
        f"{one.complaint} (release {release} wrote number {number})"
        for one in formats
        for release, written in releases.items()
        for number, digest in [written.get(one.name, (0, ""))]
        if number > one.number or (number == one.number and digest != one.digest)
    ]


def main() -> int:
    formats = all_formats()
    wrong = complaints(formats, released())
    if wrong:
        print(*wrong, sep="\n", file=sys.stderr)
        return 1
    lines = [f"  {json.dumps(one.name)}: {json.dumps([one.number, one.digest])}" for one in formats]
    KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
