"""A gateway that was killed in the middle of a turn and starts again where it stood, as processes."""

from __future__ import annotations

import sys

import pytest

from benchmarks.gateway_kills import LONG_S, run


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells where a process stands")
@pytest.mark.timeout(300)
async def test_a_client_that_repeats_a_request_twice_comes_to_its_end() -> None:
    """Once streamed and once not; the lease of the dead is never over here."""
    found = await run(kills=2, minutes=1e9, restart_after_s=0.0, lease_s=10 * LONG_S, python=None, seed=0)
    assert (found.kills, found.finished) == (2, 2)
    assert found.failures == found.problems == []
    assert len(found.silent_s) == len(found.answer_s[True]) == len(found.answer_s[False]) == 1
