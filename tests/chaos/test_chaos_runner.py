"""A run comes to its end when everything that it began is over."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.chaos.runner import Options, Run


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
