"""Every attempt has a process of its own: nothing of one that is over is at work in the next, and none is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from redis.asyncio import Redis

from examples.demo.memory import process_tree
from gspo_core.learner import Learner
from services.files.checkpoints import CheckpointStore
from services.files.job_dir import JobDir
from services.state.jobs import CancelManner, JobRecord
from services.state.keys import job_key
from services.state.server import RedisServer
from services.state.store import Claim
from services.trainer import attempt_process, torchrun
from services.trainer.attempt_process import AttemptProcesses, NotStarted, Start, Started, start_python
from services.trainer.building import make_learner
from services.trainer.telling.attempt_messages import AttemptEnd
from services.trainer.telling.failure import RanksLost
from services.trainer.worker import TrainerWorker
from tests.apparatus.processes import is_running
from tests.apparatus.warm_python import Forked, WarmPython
from tests.core.learner_support import write_model
from tests.patience import HANG_S
from tests.services.trainer.loop_kit import DESCRIPTION, LEASE_S, Loop, a_loop, fingerprint, loop_spec, plain_loop
from tests.services.trainer.test_trainer_ranks import served

DEADLINE_S = HANG_S
# More than are taken before a test that acts after the first one has acted.
STEPS = 8
ATTEMPT = "-m", "services.trainer.attempt_main"
pytestmark = [
    pytest.mark.timeout(600),  # every process imports torch
    pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc"),
]


def children() -> list[int]:
    """The processes of attempts that are there."""
    found = []
    for pid in process_tree(os.getpid()):
        with contextlib.suppress(OSError):
            if b"attempt_main" in Path(f"/proc/{pid}/cmdline").read_bytes() and is_running(pid):
                found.append(pid)
    return found


@pytest.fixture
def warm(warm_python: WarmPython) -> Iterator[Start]:
    """Where it does not matter how a process began: the imports are done once for all of these."""
    started: list[Forked] = []

    def start(stdin: int, stdout: int, stderr: int) -> Started:
        started.append(warm_python.start(ATTEMPT, stdin, stdout, stderr))
        return started[-1]

    yield start
    assert started
    assert not [one.pid for one in started if is_running(one.pid)], "attempts were left"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.02)


@pytest.fixture
def environment(redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of the processes of attempts; sums are formed on as many threads here as there."""
    for name, value in {
        "GSPO_REDIS_URL": redis_server.url,
        "GSPO_DATA_DIR": str(tmp_path),
        "GSPO_LEASE_S": str(LEASE_S),
        "OMP_NUM_THREADS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def num_layers() -> int:
    return 2


@pytest.fixture
def num_steps() -> int:
    return STEPS


@pytest.fixture
async def loop(
    redis_client: Redis,
    tmp_path: Path,
    num_layers: int,
    num_steps: int,
    monkeypatch: pytest.MonkeyPatch,
    environment: None,
) -> AsyncIterator[Loop]:
    spec = loop_spec(write_model(tmp_path / "model", num_hidden_layers=num_layers), steps=num_steps)
    async with (
        a_loop(redis_client, tmp_path / "jobs", spec, monkeypatch) as loop,
        served(loop.transport.engines["engine"]) as url,
    ):
        monkeypatch.setenv("GSPO_ENGINE_URLS", url)
        yield loop
    assert children() == [], "attempts were left"


@contextlib.asynccontextmanager
async def trainer(loop: Loop, start: Start = start_python) -> AsyncIterator[tuple[AttemptProcesses, asyncio.Event]]:
    """A trainer with a process for each attempt, and what stops it."""
    stop = asyncio.Event()
    async with AttemptProcesses(start) as attempts:
        worker = TrainerWorker(loop.store, loop.bus, "trainer", attempts, lease_s=LEASE_S)
        working = asyncio.create_task(worker.run(stop))
        try:
            yield attempts, stop
        finally:
            stop.set()
            async with asyncio.timeout(DEADLINE_S):
                await working


async def at_its_end(loop: Loop, job: str) -> JobRecord:
    async with asyncio.timeout(DEADLINE_S):
        while not (record := await loop.store.jobs.get(job)).status.is_terminal:
            await asyncio.sleep(0.02)
    return record


async def reached(loop: Loop, step: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while (await loop.store.jobs.get(loop.job)).step < step:
            await asyncio.sleep(0.01)


def state_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: one.detach() for name, one in learner._policy.named_parameters()}


async def loads(loop: Loop, job: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while (reason := (await loop.store.jobs.get(job)).status_reason) is None or "loading /" not in reason.message:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("num_layers", [12])  # loading takes longer than a wish is on its way
@pytest.mark.parametrize("num_trials", [1, pytest.param(14, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
async def test_a_job_begins_with_the_weights_of_its_seed_whatever_was_cancelled_before_it(
    loop: Loop, num_trials: int, num_layers: int, warm: Start
) -> None:
    """Low-rank additions begin at random: a thread that still loads the job before would draw between them."""
    model_dir = Path(loop.spec.model)
    given = {"learner": {"lora": {"rank": 4}}}
    await loop.store.jobs.set_desired_state(loop.job, "cancelled")
    async with trainer(loop, warm):
        for trial in range(num_trials):
            lost, spec = (loop_spec(model_dir, seed=100 * trial + number, **given) for number in (1, 2))
            first = (await loop.store.jobs.create(lost)).id
            second = (await loop.store.jobs.create(spec)).id
            await loop.store.environments.describe(second, 0, DESCRIPTION)
            await loads(loop, first)
            await loop.store.jobs.set_desired_state(first, "cancelled")
            await loads(loop, second)
            wanted = (spec.rollout.max_staleness + 1) * spec.groups_per_step
            async with asyncio.timeout(DEADLINE_S):
                while len(await loop.bus.open_groups(second)) < wanted:  # before, there is nothing to be saved
                    await asyncio.sleep(0.02)
            await loop.store.jobs.set_desired_state(second, "cancelled", CancelManner.NOW_WITH_CHECKPOINT)
            assert (await at_its_end(loop, second)).status == "cancelled"
            began = make_learner(spec)
            began.load_state(CheckpointStore(JobDir(loop.job_dir.parent / second)).newest_first()[0].learner_dir)
            expected = state_of(make_learner(spec))
            assert any("lora" in name for name in expected)
            assert {name: one.tolist() for name, one in state_of(began).items()} == {
                name: one.tolist() for name, one in expected.items()
            }


async def test_an_attempt_that_is_killed_is_counted_with_its_cause_and_the_next_goes_on(
    loop: Loop, tmp_path: Path, warm: Start
) -> None:
    """Bit for bit to where an undisturbed one comes; a process is started only when the one before is gone."""
    pids: list[int] = []

    def start(stdin: int, stdout: int, stderr: int) -> Started:
        assert not [pid for pid in pids if is_running(pid)], "two attempts at once"
        started = warm(stdin, stdout, stderr)
        pids.append(started.pid)
        return started

    async with trainer(loop, start) as (attempts, _):
        await reached(loop, 1)
        os.kill(attempts.pid, signal.SIGKILL)
        job = await at_its_end(loop, loop.job)
    assert (str(job.status), job.step) == ("succeeded", STEPS), job.status_reason
    assert [one.code for one in job.attempts] == ["process_lost", "steps_done"]
    assert job.attempts[0].message == "the process of this attempt was killed by SIGKILL, possibly for lack of memory"
    assert len(set(pids)) == len(pids) >= 2
    found = make_learner(loop.spec)
    found.load_state(CheckpointStore(JobDir(loop.job_dir)).newest_first()[0].learner_dir)
    assert fingerprint(found) == fingerprint(plain_loop(loop.spec, tmp_path))


async def test_a_process_that_crashes_leaves_its_last_words(loop: Loop, warm: Start) -> None:
    async with trainer(loop, warm) as (attempts, _):
        await reached(loop, 1)
        os.kill(attempts.pid, signal.SIGSEGV)
        job = await at_its_end(loop, loop.job)
    message = job.attempts[0].message
    assert message is not None
    assert message.startswith("the process of this attempt was killed by SIGSEGV; last lines of stderr: "), message
    assert "File" in message


async def test_an_attempt_that_hangs_is_killed(loop: Loop, warm: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    async with trainer(loop, warm) as (attempts, _):
        await reached(loop, 1)
        monkeypatch.setattr(attempt_process, "SILENCE_S", 4.0)
        os.kill(attempts.pid, signal.SIGSTOP)
        job = await at_its_end(loop, loop.job)
    assert [one.code for one in job.attempts] == ["process_lost", "steps_done"]
    assert "did not answer for 4 s" in str(job.attempts[0].message)


async def test_a_lost_claim_ends_the_attempt_and_the_trainer_goes_on(loop: Loop, warm: Start) -> None:
    """Also one that hangs and hears nothing of it."""
    async with trainer(loop, warm) as (attempts, _):
        await reached(loop, 1)
        lost = attempts.pid
        os.kill(lost, signal.SIGSTOP)
        token = await loop.redis.hget(job_key(loop.job, "trainer"), "token")
        assert token is not None
        await loop.store.jobs.release(loop.job, token.decode())
        await until(lambda: attempts.pid != lost)
        assert not is_running(lost)
        job = await at_its_end(loop, loop.job)
    assert [one.code for one in job.attempts] == ["handed_over", "steps_done"]


@pytest.mark.parametrize("num_steps", [10_000])
async def test_who_is_asked_to_stop_gives_the_job_back_and_leaves_no_process(loop: Loop) -> None:
    """Started as trainers start it, in an interpreter of its own."""
    async with trainer(loop) as (_, stop):
        await reached(loop, 1)
        stop.set()
    job = await loop.store.jobs.get(loop.job)
    assert [one.code for one in job.attempts] == ["handed_over"]
    assert children() == []


async def test_signals_are_for_the_trainer(environment: None) -> None:
    async with AttemptProcesses() as attempts:
        await until(attempts.is_ready)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(attempts.pid, number)
        await asyncio.sleep(0.5)
        assert attempts.is_ready()
        assert os.getpgid(attempts.pid) != os.getpgid(0)
    assert children() == []


async def test_a_trainer_that_is_killed_takes_its_attempt_with_it(environment: None, redis_client: Redis) -> None:
    killed = await asyncio.create_subprocess_exec(sys.executable, "-m", "services.trainer")
    try:
        await until(lambda: bool(children()))
        (child,) = children()
        await asyncio.sleep(0.5)  # it may import as yet
    finally:
        killed.kill()
        await killed.wait()
    await until(lambda: not is_running(child))


async def test_a_process_that_cannot_begin_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    def start(stdin: int, stdout: int, stderr: int) -> Started:
        argv = [sys.executable, "-c", "raise SystemExit('no torch here')"]
        return subprocess.Popen(argv, stdin=stdin, stdout=stdout, stderr=stderr)

    async with AttemptProcesses(start) as attempts:
        with pytest.raises(NotStarted, match="ended with code 1; last lines of stderr: no torch here"):
            async with asyncio.timeout(DEADLINE_S):
                await attempts.capabilities(asyncio.Event())
    assert "no torch here" in capfd.readouterr().err


async def test_a_process_that_is_killed_while_it_stands_by_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempt_process, "MAX_KILLED", 2)

    def start(stdin: int, stdout: int, stderr: int) -> Started:
        return subprocess.Popen([sys.executable, "-c", "input()"], stdin=stdin, stdout=stdout, stderr=stderr)

    async with AttemptProcesses(start) as attempts:
        for _ in range(2):
            killed = attempts.pid
            os.kill(killed, signal.SIGKILL)
            await until(lambda killed=killed: not attempts.is_ready() and attempts.pid != killed)  # type: ignore[misc]
        os.kill(attempts.pid, signal.SIGKILL)
        with pytest.raises(NotStarted, match="was killed by SIGKILL"):
            await attempts.capabilities(asyncio.Event())


def test_the_trainer_itself_imports_no_torch() -> None:
    program = "import services.trainer.__main__, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=HANG_S)


# Several ranks


class Others:
    """The other ranks, as far as attempts ask for them."""

    lost: RanksLost | None = None

    def check(self) -> None:
        if self.lost is not None:
            raise self.lost

    def give_up(self, message: str) -> RanksLost:
        self.lost = RanksLost(message)
        return self.lost


@pytest.mark.parametrize(("patience_s", "is_lost"), [(30.0, False), (0.1, True)])
async def test_ranks_begin_no_attempt_beside_what_another_has_begun(
    monkeypatch: pytest.MonkeyPatch, claim: Claim, patience_s: float, is_lost: bool
) -> None:
    began, may_end, ended = (threading.Event() for _ in range(3))

    def load() -> None:
        began.set()
        may_end.wait(DEADLINE_S)
        ended.set()

    async def run_attempt(*_: object, **__: object) -> AttemptEnd:
        await asyncio.to_thread(load)
        return AttemptEnd("succeeded")

    monkeypatch.setattr(torchrun, "run_attempt", run_attempt)
    monkeypatch.setattr(torchrun, "LEFT_BEHIND_S", patience_s)
    others, nobody = Others(), asyncio.Event()
    attempts = torchrun.RankedAttempts(cast(Any, None), cast(Any, None), cast(Any, others))
    attempt = asyncio.create_task(attempts.run(claim, cast(Any, None), nobody, nobody))
    await asyncio.to_thread(began.wait)
    for _ in range(3):  # as whoever is in a hurry does
        attempt.cancel()
        await asyncio.sleep(0.05)
    assert attempt.done() == is_lost
    may_end.set()
    await asyncio.wait({attempt})
    assert attempt.cancelled()
    if is_lost:
        with pytest.raises(RanksLost, match="still running"):
            attempts.is_ready()
    else:
        assert ended.is_set()
        assert attempts.is_ready()
