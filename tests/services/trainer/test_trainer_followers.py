"""What the first rank makes of the answers of the others, and how ranks that are started again find each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed

from gspo_core.batch import TrainSequence
from gspo_core.codec import encode
from services.files.batch_log import BatchLog, BatchLogNotFound, LoggedBatch
from services.files.job_dir import JobDir
from services.process.ports import free_port
from services.trainer.ranks import calls
from services.trainer.ranks.calls import (
    COMMANDS,
    LINES,
    WEIGHTS,
    Beat,
    End,
    Load,
    Logprobs,
    Prepare,
    ReadStep,
    Step,
    Write,
)
from services.trainer.ranks.follower import read_logged
from services.trainer.ranks.followers import AFTER_FAILURE_S, Followers, RanksLost, ShareNotWritten
from services.trainer.ranks.lines import COLLECTIVE_TIMEOUT_S, RankProblem, agree_on_round, is_of_the_lines
from tests.core.learner_support import make_sequences
from tests.patience import HANG_S
from tests.services.trainer.trainer_kit import group

DEADLINE_S = HANG_S
STEP = Step()
READ = ReadStep(1, 1)


class SpokenTo:
    """A line to one other rank, which answers what a test says."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.problem: RankProblem | None = None
        self.is_gone = False
        self.waited_s: float | None = -1.0

    def say(self, message: bytes) -> None:
        if self.is_gone:
            raise RuntimeError("connection closed by peer")
        self.heard.append(calls.decode(message))

    def answers(self, timeout_s: float | None = None) -> dict[int, RankProblem | None]:
        self.waited_s = timeout_s
        if self.is_gone:
            raise RuntimeError("connection closed by peer")
        return {1: self.problem}


def followers(beat_s: float = 1000.0) -> tuple[Followers, dict[str, SpokenTo]]:
    lines = {name: SpokenTo() for name in LINES}
    made: Any = lines
    return Followers(made, beat_s=beat_s), lines


def fails(error: Exception) -> Callable[[], None]:
    def own() -> None:
        raise error

    return own


def test_a_call_is_said_before_the_first_rank_takes_part() -> None:
    ranks, lines = followers()
    heard = ranks.run(Load(), lambda: list(lines[COMMANDS].heard))
    assert [type(call) for call in heard] == [Load]


def test_what_fails_alike_everywhere_is_raised_and_nothing_is_lost() -> None:
    ranks, lines = followers()
    lines[COMMANDS].problem = RankProblem("ValueError", "no")
    with pytest.raises(ValueError, match="as here"):
        ranks.run(STEP, fails(ValueError("as here")))
    lines[COMMANDS].problem = None
    assert ranks.run(STEP, lambda: 3) == 3


@pytest.mark.parametrize("who", ["first", "other"])
def test_what_one_rank_alone_could_not_do_means_that_all_start_again(who: str) -> None:
    ranks, lines = followers()
    own = fails(MemoryError("too large")) if who == "first" else lambda: None
    lines[COMMANDS].problem = RankProblem("MemoryError", "too large") if who == "other" else None
    with pytest.raises(RanksLost, match="too large"):
        ranks.run(STEP, own)
    assert lines[COMMANDS].waited_s == (AFTER_FAILURE_S if who == "first" else COLLECTIVE_TIMEOUT_S)
    lines[COMMANDS].problem = None
    with pytest.raises(RanksLost):
        ranks.run(STEP, lambda: None)
    with pytest.raises(RanksLost):
        ranks.check()


def unreachable() -> RuntimeError:
    """What gloo says of a rank that does not come in time."""
    store, found = torch.distributed.HashStore(), list[RuntimeError]()  # type: ignore[attr-defined]

    def come(rank: int) -> None:
        make: Any = torch.distributed.ProcessGroupGloo  # type: ignore[attr-defined]
        group = make(store, rank, 2, timedelta(seconds=2))
        if rank == 0:
            try:
                group.allreduce([torch.zeros(1)]).wait()
            except RuntimeError as error:
                found.append(error)
        leaving.wait(DEADLINE_S)

    leaving = threading.Event()
    threads = [threading.Thread(target=come, args=(rank,), daemon=True) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    wait_for(lambda: bool(found))
    leaving.set()
    for thread in threads:
        thread.join(DEADLINE_S)
    return found[0]


def test_ranks_that_could_not_reach_each_other_say_nothing_of_the_job() -> None:
    """Also where all of them say so: another attempt may go on."""
    silence = unreachable()
    assert is_of_the_lines(silence)
    for own, other in ((silence, silence), (silence, ValueError("no")), (ValueError("no"), silence)):
        ranks, lines = followers()
        lines[COMMANDS].problem = RankProblem.of(other)
        with pytest.raises(RanksLost):
            ranks.run(STEP, fails(own))
    assert not is_of_the_lines(RuntimeError("CUDA out of memory")), "that is an answer"


def test_why_a_rank_failed_is_told_where_the_first_one_waited_for_it_in_vain() -> None:
    ranks, lines = followers()
    lines[COMMANDS].problem = RankProblem("BatchLogNotFound", "there is no log")
    with pytest.raises(RanksLost, match=r"^rank 1: BatchLogNotFound: there is no log; rank 0 on .* failed: gloo/"):
        ranks.run(STEP, fails(RuntimeError("gloo/transport: timed out")))


def test_what_is_not_done_together_may_fail_on_one_rank() -> None:
    ranks, lines = followers()
    lines[COMMANDS].problem = RankProblem("InvalidState", "it is damaged")
    with pytest.raises(ValueError, match="rank 1: InvalidState: it is damaged"):
        ranks.run(Prepare("d"), lambda: None, together=False)
    lines[COMMANDS].problem = RankProblem.of(PermissionError(13, "may not be read", "d"))
    with pytest.raises(OSError, match="rank 1: PermissionError") as refused:
        ranks.run(Prepare("d"), lambda: None, together=False)
    assert refused.value.errno == 13
    lines[COMMANDS].problem = None
    with pytest.raises(KeyError):
        ranks.run(Prepare("d"), fails(KeyError("mine")), together=False)
    ranks.check()


def test_a_rank_that_is_gone_is_noticed_while_nothing_is_to_do() -> None:
    ranks, lines = followers(beat_s=0.01)
    wait_for(lambda: sum(isinstance(call, Beat) for call in lines[COMMANDS].heard) > 1)
    ranks.check()
    lines[COMMANDS].is_gone = True

    def is_noticed() -> bool:
        ranks.check()
        return False

    with pytest.raises(RanksLost, match="closed by peer"):
        wait_for(is_noticed)


def test_what_another_rank_was_told_by_its_disk_is_told_here() -> None:
    ranks, lines = followers()
    lines[WEIGHTS].problem = RankProblem("OSError", "no room", 28)
    with pytest.raises(OSError, match="rank 1: no room") as raised:
        ranks.write(WEIGHTS, Write(0, "d"), lambda: None)
    assert raised.value.errno == 28
    lines[WEIGHTS].problem = RankProblem("SafetensorError", "I/O error: (os error 28)")
    with pytest.raises(ShareNotWritten, match="os error 28"):
        ranks.write(WEIGHTS, Write(0, "d"), lambda: None)
    lines[WEIGHTS].problem = None
    ranks.write(WEIGHTS, Write(0, "d"), lambda: None)
    assert lines[COMMANDS].heard == []


def test_the_end_is_said_on_every_line() -> None:
    ranks, lines = followers()
    ranks.end()
    assert all([type(call) for call in line.heard] == [End] for line in lines.values())


def test_sequences_arrive_as_they_were() -> None:
    sent = [*make_sequences(3, per_token_advantages=True), *make_sequences(2)]
    message = calls.encode(Logprobs(calls.to_wire(sent), True))
    received = calls.from_wire(calls.decode(message).sequences)
    for one, other in zip(sent, received, strict=True):
        for name in TrainSequence.__dataclass_fields__:
            assert np.array_equal(getattr(one, name), getattr(other, name)), name


class SeenLater(BatchLog):
    """On a machine that goes by what it last heard of a directory."""

    num_looks = 0

    def read(self, epoch: int, step: int) -> LoggedBatch:
        self.num_looks += 1
        if self.num_looks < 3:
            raise BatchLogNotFound("there is no such file") if self.num_looks < 2 else OSError(116, "stale")
        return super().read(epoch, step)


def test_a_step_is_said_by_its_number_and_read_from_its_log(tmp_path: Path) -> None:
    """As soon as it is seen; its segments are the bytes of the log."""
    log, groups = SeenLater(JobDir(tmp_path)), [group(0, [1.0, 0.0])]
    written = log.write(READ.epoch, READ.step, groups, {"staleness": {"0": 0}}).read_bytes()
    message = calls.encode(READ)
    assert len(message) < 50
    read = read_logged(log, calls.decode(message), HANG_S)
    assert read.groups[0].rewards == groups[0].rewards
    encoded = [one.encoded for trajectory in read.trajectories for one in trajectory.segments]
    assert encoded == [encode(one) for trajectory in groups[0] for one in trajectory.segments]
    assert b"".join(one or b"" for one in encoded) in written


def test_a_log_that_a_rank_never_sees_is_told_with_what_is_to_be_done(tmp_path: Path) -> None:
    with pytest.raises(BatchLogNotFound, match=r"-step000001, .*all ranks must share the same GSPO_DATA_DIR"):
        read_logged(BatchLog(JobDir(tmp_path)), READ, 0.0)


def test_ranks_that_are_started_again_do_not_take_the_round_of_those_before() -> None:
    """The store keeps all that was written into it."""
    distributed: Any = torch.distributed
    store = distributed.TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    first = met(store)
    assert len(set(first)) == 1
    # Of the next ones the second rank is first: it sees the old round, and waits for another.
    second = met(store)
    assert len(set(second)) == 1
    assert set(first) & set(second) == set()


def met(store: Any) -> list[str]:
    found: dict[int, str] = {}

    def meet(rank: int) -> None:
        found[rank] = agree_on_round(store.clone(), rank, 3)

    threads = [threading.Thread(target=meet, args=(rank,), daemon=True) for rank in (2, 1, 0)]
    for thread in threads:
        thread.start()
        time.sleep(0.3)
    for thread in threads:
        thread.join(DEADLINE_S)
    return list(found.values())


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
