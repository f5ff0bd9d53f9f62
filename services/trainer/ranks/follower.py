"""Any rank but the first: holds its part of the learner and does what the first rank says.

Rule: it talks only to the first rank, never to Redis or engines, and decides nothing. It ends when the first rank says
so, and with an error if the first rank is gone or this rank alone failed a call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gspo_core.learner import Copy, Learner
from gspo_core.learner_config import LearnerConfig
from gspo_core.log.sequences import TrainBatch
from gspo_core.log.steps import logged_sequences
from gspo_core.objective_config import ObjectiveConfig
from services.files.batch_log import BatchLog, BatchLogNotFound, LoggedBatch
from services.files.job_dir import JobDir
from services.process.telemetry import get_logger
from services.trainer.ranks.calls import (
    COMMANDS,
    WEIGHTS,
    Beat,
    Build,
    Close,
    End,
    Keep,
    Load,
    Logprobs,
    Look,
    Prepare,
    ReadStep,
    Retune,
    Step,
    Write,
    decode,
    from_wire,
)
from services.trainer.ranks.followers import AFTER_FAILURE_S, PATIENCE_S
from services.trainer.ranks.lines import RankLine, RankPlace, RankProblem

# A client of NFS goes for up to a minute by what it last heard of a directory (acdirmax).
SEEN_WITHIN_S = 60.0
_LOOK_S = 0.1
_SHARED = "all ranks must share the same GSPO_DATA_DIR"


class FirstRankLost(Exception):
    """The first rank is gone, or has dropped this one."""


class Follower:
    def __init__(self, lines: Mapping[str, RankLine], place: RankPlace) -> None:
        self._lines = lines
        self._place = place
        self._learner: Learner | None = None
        self._log: BatchLog
        """The job's, since ``Build``."""
        self._read: TrainBatch | None = None
        """The step that comes next."""
        self._load: Callable[[], None] | None = None
        self._copies: dict[int, Copy] = {}

    def follow(self) -> None:
        """Run until the first rank ends it. Raises FirstRankLost."""
        writing = [
            threading.Thread(target=self._write_along, args=(line,), name=name, daemon=True)
            for name, line in self._lines.items()
            if name != COMMANDS
        ]
        for thread in writing:
            thread.start()
        patience_s = PATIENCE_S
        while not isinstance(call := self._hear(patience_s), End):
            if not isinstance(call, Beat):
                problem = self._attempt(self._obey, call)
                self._answer(problem)
                # If only this rank failed, the first rank would wait in vain while this process lives.
                patience_s = PATIENCE_S if problem is None or isinstance(call, Prepare) else 2 * AFTER_FAILURE_S
            else:
                patience_s = PATIENCE_S
        for thread in writing:
            thread.join()

    def _hear(self, timeout_s: float) -> Any:
        try:
            return decode(self._lines[COMMANDS].hear(timeout_s))
        except RuntimeError as error:
            raise FirstRankLost(f"rank 0 cannot be heard: {error}") from error

    def _answer(self, problem: RankProblem | None) -> None:
        try:
            self._lines[COMMANDS].answer(problem)
        except RuntimeError as error:
            raise FirstRankLost(f"rank 0 takes no answers: {error}") from error

    def _attempt(self, work: Callable[[Any], None], call: Any) -> RankProblem | None:
        try:
            work(call)
        except Exception as error:
            get_logger().exception("a call failed on this rank", rank=self._place.rank, call=type(call).__name__)
            return RankProblem.of(error)
        return None

    def _write_along(self, line: RankLine) -> None:
        """Ignores a lost line: the command thread notices it."""
        try:
            while isinstance(call := decode(line.hear()), Write):
                line.answer(self._attempt(self._write, call))
        except RuntimeError as error:
            get_logger().debug("nothing more to write", error=str(error))

    def _write(self, call: Write) -> None:
        self._copies[call.number].write_share(Path(call.directory))

    def _obey(self, call: Any) -> None:
        match call:
            case Build():
                self._build(call)
            case ReadStep():
                self._read = None
                logged = read_logged(self._log, call, SEEN_WITHIN_S)
                self._read = logged_sequences(logged, self._held.objective.advantage)
            case Step():
                assert self._read is not None
                read, self._read = self._read, None
                self._held.step(read.sequences)
            case Logprobs():
                self._held.logprobs(from_wire(call.sequences), sampled_only=call.sampled_only)
            case Retune():
                self._held.retune(*_configs(call))
            case Keep():
                self._keep(call)
            case Prepare():
                self._load = None
                self._load = self._held.prepare_state(Path(call.directory))
            case Load():
                assert self._load is not None
                self._load()
                self._load = None
            case Close():
                self._drop()
            case Look():
                if not Path(call.path).exists():
                    raise FileNotFoundError(f"{call.path} does not exist: {_SHARED}")

    @property
    def _held(self) -> Learner:
        assert self._learner is not None, "the first rank builds before it asks for more"
        return self._learner

    def _build(self, call: Build) -> None:
        self._drop()
        config, objective = _configs(call)
        self._log = BatchLog(JobDir(Path(call.job)))
        device = self._place.enter(call.device)
        self._learner = Learner(Path(call.model), config, objective, seed=call.seed, device=device)

    def _keep(self, call: Keep) -> None:
        for number in call.dropped:
            self._copies.pop(number, None)
        make = self._held.copy_weights if call.kind == WEIGHTS else self._held.copy_state
        self._copies[call.number] = make()

    def _drop(self) -> None:
        self._learner = self._load = self._read = None
        self._copies.clear()


def read_logged(log: BatchLog, call: ReadStep, within_s: float) -> LoggedBatch:
    """The batch that the first rank has written, as soon as this machine can read it. Raises DamagedBatchLog,
    BatchLogNotFound."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            return log.read(call.epoch, call.step)
        except (BatchLogNotFound, OSError) as error:
            if time.monotonic() > deadline:
                raise BatchLogNotFound(f"{error}, {within_s:g} s after the first rank wrote it: {_SHARED}") from error
        time.sleep(_LOOK_S)


def _configs(call: Build | Retune) -> tuple[LearnerConfig, ObjectiveConfig]:
    return LearnerConfig.model_validate_json(call.config), ObjectiveConfig.model_validate_json(call.objective)
