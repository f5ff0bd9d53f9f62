"""Resumes a run: loads its newest intact checkpoint and replays the steps logged after it.

Rule: read files only, and report everything skipped. Skip a damaged checkpoint for the next older one, whose logs lead
to the same weights, and ignore files from a dead epoch. Files from another release, of another model, or temporarily
unreadable, are not damaged: resuming without them would silently discard the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from gspo_core.learner import UnfitState
from gspo_core.learner import UnknownFormat as UnknownState
from gspo_core.log.lineage import Lineage
from gspo_core.log.settings import Tuning
from gspo_core.position import Position
from gspo_core.staleness import in_history
from gspo_core.versions import WeightsManifest
from services.files.batch_log import BatchLog, UnknownLogSchema
from services.files.checkpoints import LOST, CheckpointStore, LostForkRecord, UnknownCheckpointFormat
from services.process.telemetry import get_logger
from services.trainer.past.replay import replay
from services.trainer.ranks.learner import AnyLearner
from services.trainer.telling.failure import AlertKind, AttemptFailed, JobFailure

Replayed: TypeAlias = list[tuple[Position, Mapping[str, float]]]


@dataclass(frozen=True)
class Remark:
    """A skipped file, reported to the owner of the job."""

    kind: AlertKind
    message: str


@dataclass
class Recovered:
    """The state of a learner after recovery."""

    lineage: Lineage
    saved: Position
    """The loaded checkpoint, or step 0 of the previous epoch if there was none."""
    reached: Position
    """The position after replaying the logs that follow it."""
    remarks: list[Remark] = field(default_factory=list)
    replayed: Replayed = field(default_factory=list)
    """Steps that were trained again on the way, and what each reports."""


def recover(
    learner: AnyLearner,
    checkpoints: CheckpointStore,
    log: BatchLog,
    epoch: int,
    tuning: Tuning,
    *,
    checkpoint_every: int | None = None,
    is_for_good: Callable[[int], bool] = lambda _: False,
    before_saving: Callable[[Replayed], None] = lambda _: None,
) -> Recovered:
    """Bring ``learner`` to the point that the epochs before ``epoch`` reached. Raises JobFailure, AttemptFailed.

    Saves a checkpoint every ``checkpoint_every`` replayed steps, under the usual names. Otherwise trainers that die
    before a long replay ends would restart it forever. Saves one after each step that ``is_for_good``, too: the trainer
    before may have died before it was written. Each time, ``before_saving`` gets what was replayed since the last time,
    which is not replayed again.
    """
    found = Recovered(Lineage(), Position(epoch - 1, 0), Position(epoch - 1, 0))
    try:
        forks = checkpoints.forks()
        # Before the first record there may be what a fork begins with, of epoch 0.
        oldest = max((at.epoch for at in checkpoints.positions()), default=epoch)
        _load(found, learner, checkpoints, max(forks, default=oldest), forks)
        keep = _Keeping(found, learner, checkpoints, checkpoint_every, is_for_good, before_saving)
        found.reached, problem = replay(learner, found.lineage, found.saved, log, forks, tuning, keep)
    except (UnknownCheckpointFormat, UnknownState, UnknownLogSchema) as error:
        raise JobFailure("incompatible_release", str(error)) from error
    except UnfitState as error:
        raise JobFailure("model_invalid", f"a checkpoint is intact and does not fit the job: {error}") from error
    except LostForkRecord as error:
        raise JobFailure("data_damaged", str(error)) from error
    except OSError as error:
        raise AttemptFailed("data_unreadable", f"{error}: not skipped, for the file may be intact") from error
    if problem:
        _remark(found, "batch_log_damaged", f"{problem}; the groups of that step and of later steps are played again")
    return found


class _Keeping:
    """Saves checkpoints during replay. A failed save only costs another replay."""

    def __init__(
        self,
        found: Recovered,
        learner: AnyLearner,
        checkpoints: CheckpointStore,
        every: int | None,
        is_for_good: Callable[[int], bool],
        before_saving: Callable[[Replayed], None],
    ) -> None:
        self._found, self._learner, self._checkpoints, self._every = found, learner, checkpoints, every
        self._is_for_good, self._saved_step = is_for_good, found.saved.step
        self._before_saving, self._num_told = before_saving, 0

    def __call__(self, position: Position, metrics: Mapping[str, float]) -> None:
        self._found.replayed.append((position, metrics))
        is_due = self._every is not None and position.step - self._saved_step >= self._every
        if not (is_due or self._is_for_good(position.step)):
            return
        self._saved_step = position.step
        if self._checkpoints.has(position):
            return
        self._before_saving(self._found.replayed[self._num_told :])
        self._num_told = len(self._found.replayed)
        try:
            self._checkpoints.write(position, self._found.lineage, self._learner.copy_state().write)
        except Exception as error:
            get_logger().warning("checkpoint not saved", step=position.step, error=f"{type(error).__name__}: {error}")


def _load(
    found: Recovered,
    learner: AnyLearner,
    checkpoints: CheckpointStore,
    newest_epoch: int,
    forks: Mapping[int, Position],
) -> None:
    # List checkpoints again each time: a trainer unaware that it lost the job may still replace old ones.
    tried, told = set[Position](), set[str]()

    def skipped(name: str, problem: str) -> None:
        if name not in told:
            told.add(name)
            _remark(found, "checkpoint_skipped", f"{name} is skipped: {problem}")

    while checkpoint := next((one for one in checkpoints.newest_first(skipped) if one.position not in tried), None):
        tried.add(checkpoint.position)
        if not in_history(checkpoint.position, newest_epoch, forks):
            skipped(checkpoint.name, "it was written by a trainer that had already lost the job")
            continue
        try:
            learner.load_state(checkpoint.learner_dir)
        except (UnknownState, UnfitState):
            raise
        except (ValueError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in LOST:
                raise
            skipped(checkpoint.name, str(error))
            continue
        found.lineage, found.saved = checkpoint.lineage, checkpoint.position
        return


def version_of(at: Position, versions: Iterable[WeightsManifest], newest: int) -> int:
    """The version of the weights after a step of this history: published by the epoch that trained it, or by a later
    one; ``newest`` if it never was. Another history's version of the same step does not count."""
    of_the_step = [(one.epoch, one.version) for one in versions if one.step == at.step and one.epoch >= at.epoch]
    return min(of_the_step, default=(0, newest))[1]


def _remark(found: Recovered, kind: AlertKind, message: str) -> None:
    get_logger().warning(kind.replace("_", " "), message=message)
    found.remarks.append(Remark(kind, message))
