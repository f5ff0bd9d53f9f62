"""Whether published weights come from what the job's files say: weights, steps, batches, tokens, versions, base model.

The rule: everything that is kept is read and checked by digest, and what is no longer kept is said, not guessed. That
the weights follow from the batches is shown by training them again (``gspo replay``); without that, digests show that
nothing was changed since it was written, or since a chain of it was kept (``chain``). No network, no service.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gspo_core.invariants import InvalidValue
from gspo_core.learner import check_state
from gspo_core.log import layout
from gspo_core.log.batches import LoggedBatch
from gspo_core.log.checkpoints import DAMAGE, UnknownCheckpointFormat, decode_fork, encode_checkpoint
from gspo_core.log.manifests import decode_manifest, encode_manifest
from gspo_core.position import Position
from gspo_core.replay.bundle import model_digests
from gspo_core.replay.chain import Chain, ChainLink, ChainStart, Published
from gspo_core.replay.past import DamagedPast, NotKept, Past, digests
from gspo_core.staleness import staleness
from gspo_core.types import Trajectory
from gspo_core.versions import WeightsManifest

# Before the names of its files among those that a chain begins with.
MODEL = "model"
Wanted = Callable[[Trajectory], bool]
"""Whether an episode is looked for."""


def none_wanted(_: Trajectory) -> bool:
    return False


@dataclass
class Audited:
    """What was found in order. What was not raises DamagedPast."""

    chain: Chain
    num_episodes: int = 0
    num_tokens: int = 0
    """Sampled ones."""
    foreign_steps: list[int] = field(default_factory=list)
    """Steps of a fork that was fed its parent's batches: their versions are the parent's."""
    kept_versions: list[int] = field(default_factory=list)
    """Those whose files were read; of the others there are the digests alone."""
    checkpoints: list[int] = field(default_factory=list)
    entered: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """The episodes that were looked for, by step: group and member."""


def audit(past: Past, job: str, last: int | None = None, wanted: Wanted = none_wanted) -> Audited:
    """Everything up to step ``last``, or to the newest. Raises NotKept, DamagedPast."""
    if past.accepted.digest != _sha256(past.accepted.spec.encode()):
        raise DamagedPast(f"{layout.ACCEPTED}: the specification has another sha256 than was written beside it")
    end = last if last is not None else max([*past.batches, *(at.step for at in past.checkpoints)], default=0)
    start, steps = whole_way(past, end)
    _check_forks(past)
    accepted = _sha256((past.folder / layout.ACCEPTED).read_bytes())
    found = Audited(Chain(job, accepted, ChainStart("base", 0, {}, {}), ()))
    for at in past.checkpoints:
        if at.step <= end:
            _check_checkpoint(past, at)
            found.checkpoints.append(at.step)
    versions = {one.version: one for one in past.versions()}
    begin, links = _start(past, start, found), list[ChainLink]()
    for step in steps:
        batch = past.batch(step)
        if _is_fed(past, batch, job):
            found.foreign_steps.append(step)
        else:
            _check_ages(past, batch, versions)
        _look_through(found, batch, wanted)
        links.append(_link(past, batch, found))
    found.chain = Chain(job, accepted, begin, tuple(links))
    return found


def _link(past: Past, batch: LoggedBatch, found: Audited) -> ChainLink:
    erased = [f"{group}/{member}" for group, member in sorted(batch.erased)]
    published = _published(past, batch.step, found)
    return ChainLink(batch.step, batch.epoch, _sha256(past.batch_bytes(batch.step)), erased, published)


def whole_way(past: Past, end: int) -> tuple[Position | None, list[int]]:
    """The earliest beginning from which logs lead to step ``end``. Raises NotKept."""
    for start in [None, *past.checkpoints]:
        first = past.begun_after if start is None else start.step
        if first <= end and all(step in past.batches for step in range(first + 1, end + 1)):
            return start, list(range(first + 1, end + 1))
    raise NotKept(f"nothing that is kept leads to step {end}")


def _start(past: Past, start: Position | None, found: Audited) -> ChainStart:
    if start is not None:
        files = digests(past.folder / layout.CHECKPOINTS / layout.step_name(start))
        return ChainStart("checkpoint", start.step, files, _published(past, start.step, found))
    model = {f"{MODEL}/{name}": value for name, value in model_digests(Path(past.spec.model)).items()}
    published = _published(past, past.begun_after, found)
    if past.origin is not None:
        return ChainStart("parent", past.begun_after, model | digests(past.origin.folder), published)
    return ChainStart("base", 0, model, published)


def model_difference(chain: Chain, model: Path) -> list[str]:
    """Files of a base model that are not those of the chain."""
    known = {
        name.partition("/")[2]: digest for name, digest in chain.start.files.items() if name.startswith(f"{MODEL}/")
    }
    found = model_digests(model)
    return sorted(name for name in known.keys() | found.keys() if known.get(name) != found.get(name))


def _is_fed(past: Past, batch: LoggedBatch, job: str) -> bool:
    """Whether the job was given the batch, of its parent or recorded. Raises DamagedPast for any other job's."""
    others = {group.job for group in batch.groups} - {job}
    parent = past.spec.parent
    recorded = past.spec.recorded
    if recorded is None and others and (parent is None or not parent.same_batches):
        raise DamagedPast(f"step {batch.step} holds groups of job {min(others)}, and this is job {job}")
    return bool(others)


def _check_ages(past: Past, batch: LoggedBatch, versions: dict[int, WeightsManifest]) -> None:
    """Each sampled token names a version that was recorded, and was trained as old as that is."""
    here = Position(batch.epoch, batch.step - 1)
    said = {int(number): age for number, age in batch.extra.get("staleness", {}).items()}
    sampled = {one.version for episode in batch.trajectories for one in episode.segments}
    if sampled - said.keys():
        raise DamagedPast(f"step {batch.step}: the log does not say how old version {min(sampled - said.keys())} was")
    for number in sorted(sampled):
        one = versions.get(number)
        if one is None:
            raise DamagedPast(f"step {batch.step}: sampled by version {number}, of which there is no record")
        try:
            age = staleness(Position(one.epoch, one.step), here, past.forks)
        except InvalidValue as error:
            raise DamagedPast(f"step {batch.step}: version {number}: {error}") from error
        if age != said[number]:
            raise DamagedPast(f"step {batch.step}: version {number} was {age} steps old, the log says {said[number]}")


def _look_through(found: Audited, batch: LoggedBatch, wanted: Wanted) -> None:
    for episode in batch.trajectories:
        found.num_episodes += 1
        found.num_tokens += sum(int(one.action_mask.sum()) for one in episode.segments)
        if wanted(episode):
            found.entered.setdefault(batch.step, []).append((episode.key.group, episode.key.member))


def _published(past: Past, step: int, found: Audited) -> dict[str, Published]:
    published = {}
    for manifest in past.published(step):
        kept = past.weights(manifest.version)
        if kept is not None:
            check_weights(kept, manifest)
            found.kept_versions.append(manifest.version)
        record = (past.folder / layout.VERSIONS / layout.numbered_name(manifest.version)).read_bytes()
        published[str(manifest.version)] = Published(_sha256(encode_manifest(manifest)), _sha256(record))
    return published


def check_weights(folder: Path, manifest: WeightsManifest) -> None:
    """Raises DamagedPast naming the file that is not what was published."""
    if (folder / layout.WEIGHTS_MANIFEST).read_bytes() != encode_manifest(manifest):
        record = f"{layout.VERSIONS}/{layout.numbered_name(manifest.version)}"
        raise DamagedPast(f"{folder.name}/{layout.WEIGHTS_MANIFEST} and {record} do not tell the same")
    there = {name: digest for name, digest in digests(folder).items() if name != layout.WEIGHTS_MANIFEST}
    expected = {file.path: file.sha256 for file in manifest.files}
    odd = [name for name in sorted(expected.keys() | there.keys()) if expected.get(name) != there.get(name)]
    if odd:
        raise DamagedPast(f"{folder.name}: {', '.join(odd)}: not what was published as version {manifest.version}")


def manifest_of(folder: Path) -> WeightsManifest:
    """The manifest of weights in any folder. Raises NotKept, DamagedPast."""
    try:
        return decode_manifest((folder / layout.WEIGHTS_MANIFEST).read_bytes())
    except FileNotFoundError:
        raise NotKept(f"{folder} holds no published weights: there is no {layout.WEIGHTS_MANIFEST}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedPast(f"{folder / layout.WEIGHTS_MANIFEST}: {error}") from error


def check_against(chain: Chain, folder: Path) -> int:
    """The step after which weights were published that lie anywhere, by a chain alone. Raises NotKept, DamagedPast."""
    manifest = manifest_of(folder)
    check_weights(folder, manifest)
    if manifest.job != chain.job:
        raise DamagedPast(f"{folder.name} is of job {manifest.job}, the chain is of job {chain.job}")
    digest = _sha256(encode_manifest(manifest))
    for one in chain.stages:
        told = one.published.get(str(manifest.version))
        if told is not None and told.manifest == digest:
            return one.step
    raise DamagedPast(f"{folder.name}: the chain knows no version {manifest.version} with this manifest")


def _check_checkpoint(past: Past, at: Position) -> None:
    """The learner's state too: checkpoint.json has the sha256 of its manifest, which has those of the tensors."""
    lineage, place = past.lineage(at), past.folder / layout.CHECKPOINTS / layout.step_name(at)
    manifest = place / layout.LEARNER_MANIFEST
    learner = _sha256(manifest.read_bytes()) if manifest.is_file() else None
    record = place / layout.CHECKPOINT_MANIFEST
    if record.is_file() and record.read_bytes() != encode_checkpoint(at, lineage, learner):
        raise DamagedPast(f"{place.name}/{record.name} is not spelled as it was written")
    try:
        if learner is not None:
            check_state(past.learner_dir(at))
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise DamagedPast(f"{place.name}: {error}") from error


def _check_forks(past: Past) -> None:
    """Each record of where an epoch forked off, and its copy, which says the same byte for byte."""
    said: dict[int, dict[str, bytes]] = {}
    for name in past.fork_record_names():
        data = (past.folder / name).read_bytes()
        try:
            decode_fork(data)
        except (UnknownCheckpointFormat, *DAMAGE) as error:
            raise DamagedPast(f"{name}: {error}") from error
        said.setdefault(layout.epoch_of_fork_record(Path(name).name) or 0, {})[name] = data
    for copies in said.values():
        if len(set(copies.values())) > 1:
            raise DamagedPast(f"{' and '.join(copies)} do not tell the same")


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
