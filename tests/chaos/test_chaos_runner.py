"""A run comes to its end when everything that it began is over."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest

from tests.chaos.lines import Line, to_port
from tests.chaos.processes import Process
from tests.chaos.runner import Options, Run
from tests.chaos.streams import Sampling, Stream
from tests.chaos.users import RunFailed


def test_the_end_waits_for_a_job_that_is_being_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "run", Options(1, faults=0, minutes=0.0, least_jobs=1))
    run.disk.close()

    async def end_while_a_job_is_submitted() -> None:
        is_under_way, is_accepted = asyncio.Event(), asyncio.Event()

        async def submit(number: int, *, is_raced: bool) -> str:
            is_under_way.set()
            await is_accepted.wait()
            return f"job_{number}"

        monkeypatch.setattr(run.users, "submit", submit)
        submitting = asyncio.create_task(run._submit_without_end())
        await is_under_way.wait()
        run._is_calm = True
        settling = asyncio.create_task(run._settle(submitting))
        await asyncio.sleep(0)
        assert not settling.done()
        is_accepted.set()
        await settling
        submitting.cancel()

    asyncio.run(end_while_a_job_is_submitted())


async def test_what_found_nobody_is_ordered_until_it_happens_and_then_no_more(tmp_path: Path) -> None:
    kind, call = "kill engine at join", b"POST /init_weights_update_group"
    run = Run(tmp_path / "run", Options(1, faults=2, minutes=0.0, kinds=(kind,), least_jobs=0))
    run.disk.close()
    names = ("engine-0", "engine-1")
    run.stack.engine_lines = {name: Line(to_port(1)) for name in names}
    run.stack.nursery.processes = {name: Process(name, "engine", [], {}) for name in names}
    idle = asyncio.create_task(asyncio.Event().wait())
    striking = asyncio.create_task(run._strike_all(cast("asyncio.Task[None]", idle)))
    lines = list(run.stack.engine_lines.values())
    while not all(line.is_ordered(kind) for line in lines):
        assert not striking.done()
        await asyncio.sleep(0.01)
    run.faults.are_orders_single = True
    assert not run._is_calm
    for name in names:
        assert isinstance(run.faults._order(name, run.stack.engine_lines[name], kind, mark=call), str)
    found = lines[0]._take(call)
    assert found is not None
    found[0].done()
    async with asyncio.timeout(60.0):
        await striking
    idle.cancel()
    assert run._is_calm
    assert run.coverage.never_ran() == []
    assert not any(line.is_ordered(kind) for line in lines)


class Slow:
    """A clock that goes on by a second whenever it is asked, and a job that takes a step every so often."""

    def __init__(self, run: Run, step_s: int, num_steps: int) -> None:
        self._run, self._step_s, self._num_steps = run, step_s, num_steps
        self._at = 0

    def monotonic(self) -> float:
        self._at += 1
        if self._at % self._step_s == 0 and self._run.watch.num_steps < self._num_steps:
            self._run.watch.num_steps += 1
        if self._run.watch.num_steps == self._num_steps:
            for job in self._run.watch.jobs.values():
                job.is_over = True
        return float(self._at)


@pytest.mark.parametrize(("step_s", "fails"), [(20, False), (60, True)])
async def test_a_slow_machine_may_take_its_time_for_each_step_and_no_longer(
    step_s: int, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "run", Options(1, faults=0, minutes=0.0, settle_s=40.0, least_jobs=0))
    run.disk.close()
    run.watch.add("job_1", tmp_path / "job_1")
    run._is_calm = True
    monkeypatch.setattr("tests.chaos.runner.time", Slow(run, step_s, num_steps=10))
    sleep = asyncio.sleep
    monkeypatch.setattr("tests.chaos.runner.asyncio.sleep", lambda seconds: sleep(0))
    idle = cast("asyncio.Task[None]", asyncio.create_task(asyncio.Event().wait()))
    try:
        if fails:
            with pytest.raises(RunFailed, match="no step was taken in 40 s: job_1 at step 0"):
                await run._settle(idle)
        else:
            await run._settle(idle)
    finally:
        idle.cancel()


async def test_who_was_killed_a_moment_ago_is_not_killed_again(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", Options(1, faults=0, minutes=0.0, least_jobs=0))
    run.disk.close()
    sleepers = [await asyncio.create_subprocess_exec("sleep", "60") for _ in range(2)]
    names = ("gateway", "engine")
    run.stack.nursery.processes = {
        f"{name}-0": Process(f"{name}-0", name, [], {}, pid=one.pid) for name, one in zip(names, sleepers, strict=True)
    }
    run.stack.sampling["engine-0"] = sampling = Sampling(str)
    sampling.tap().run = "abcdef"  # type: ignore[attr-defined]
    stream = Stream(800, "abcdef")
    assert run.faults._kill_engine_under([Stream(801, "fedcba")]) is None
    assert run.faults._kill_engine_under([stream]) == {"engine": "engine-0", "sampled": ["abcdef"]}
    assert run.faults._kill_engine_under([stream]) is None
    assert run.faults._kill_hosts_under([stream]) is None
    assert not stream.is_doomed
    assert run.faults._kill_under([stream]) == {}
    assert stream.is_doomed
    assert run.faults._kill_under([stream]) is None
    assert [await one.wait() for one in sleepers] == [-9, -9]
