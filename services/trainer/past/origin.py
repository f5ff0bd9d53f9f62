"""Begins a forked job where its parent stood, and feeds jobs what they were brought: batches of a parent, or recorded
episodes.

Rule: the state that a child begins with becomes a checkpoint of epoch 0, before any trainer of its own; from there on
it is recovered like any other job. What has to be trained again to get there is trained with the parent's settings, in
a process of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from gspo_core.descendants import how_it_ended
from gspo_core.learner import UnknownFormat, UnsupportedModel, check_state
from gspo_core.log.batches import LoggedBatch
from gspo_core.log.lineage import Lineage
from gspo_core.position import Position
from gspo_core.replay.past import Past, PastError
from gspo_core.replay.state_process import DAMAGED, UNSUPPORTED
from gspo_core.spec import JobSpec
from services.files.checkpoints import CheckpointStore, UnknownCheckpointFormat
from services.files.disk_space import NoRoom, says_no_room
from services.files.job_dir import JobDir
from services.process.children import die_with_parent
from services.process.telemetry import get_logger
from services.trainer.telling.failure import AttemptFailed, JobFailure


def seed(job: JobDir, spec: JobSpec, checkpoints: CheckpointStore) -> None:
    """Write the checkpoint that a fork begins with, unless it is there and intact, or the fork has gone on.

    Raises JobFailure, UnsupportedModel, AttemptFailed, NoRoom, OSError.
    """
    if spec.parent is None:
        return
    step, past = spec.parent.step, Past(job.origin.path)
    found, beginning = checkpoints.positions(), Position(0, step)
    # If there are others, the fork has gone on, and finds its newest intact one like every job.
    if found and (found != [beginning] or _is_intact(checkpoints, beginning)):
        return
    try:
        start, way = past.way_to(step)
        if start is None and not way and past.origin is None:  # it begins with the model, as its parent did
            return
        if beginning in found:
            get_logger().warning("what it was forked with is damaged, and is written again", step=step)
            checkpoints.remove(beginning)
        if start is not None and not way:
            source = past.learner_dir(start)
            checkpoints.write(beginning, past.lineage(start), lambda state: _copy(source, state))
            return
        lineage = Lineage()  # known once the state is written
        save = partial(_train_again, job.origin.path, step, lineage)
        checkpoints.write(beginning, lineage, save)
    except PastError as error:
        raise JobFailure("data_damaged", f"what was brought of {spec.parent.job} is damaged: {error}") from error
    get_logger().info("forked", parent=spec.parent.job, step=step, steps_trained_again=len(way))


def _is_intact(checkpoints: CheckpointStore, at: Position) -> bool:
    """Recovery tells of what another release wrote, and of what cannot be read right now: neither is damaged."""
    try:
        return checkpoints.is_intact(at, _check)
    except (OSError, UnknownCheckpointFormat):
        return True


def _check(state: Path) -> None:
    """Raises InvalidState."""
    with contextlib.suppress(UnknownFormat):
        check_state(state)


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target)


def _train_again(origin: Path, step: int, lineage: Lineage, state: Path) -> None:
    """Write the learner's state after ``step`` where it stays, for it is large, and let ``lineage`` become its own."""
    argv = [sys.executable, "-P", "-m", "gspo_core.replay.state_process", str(origin), str(step), str(state)]
    with tempfile.TemporaryDirectory(dir=state.parent) as scratch:  # a state of its parent's parent is as large
        env = {**os.environ, "TMPDIR": scratch}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False, preexec_fn=die_with_parent())
    said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    if done.returncode == DAMAGED:
        raise PastError(said)
    if done.returncode == UNSUPPORTED:
        raise UnsupportedModel(said)
    if done.returncode and says_no_room(said):
        raise NoRoom(said)
    if done.returncode:
        how = how_it_ended(done.returncode)
        raise AttemptFailed("process_lost", f"the process that trains again what leads to step {step}: {how}; {said}")
    lineage.become(Lineage.from_dict(json.loads(done.stdout)))


def fed_batches(job: JobDir, spec: JobSpec, after_step: int) -> Iterator[LoggedBatch]:
    """What the job was brought to be trained on after ``after_step``: its parent's batches, or recorded episodes.

    Raises JobFailure.
    """
    if spec.recorded is not None:
        past, step = Past(job.recorded.path), after_step
    elif spec.parent is not None and spec.parent.same_batches:
        past, step = Past(job.origin.path), max(after_step, spec.parent.step)
    else:
        return
    while step < spec.steps and step + 1 in past.batches:
        step += 1
        try:
            yield past.whole_batch(step)
        except PastError as error:
            raise JobFailure("data_damaged", f"what it was brought to be trained on: {error}") from error
