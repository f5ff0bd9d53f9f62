"""A job stays within its bytes in Redis, and always has room for one step."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from gspo_core.spec import JobSpec
from services.bus import Append, Bus
from services.store import Claim
from services.trainer.admission import BYTES_PER_TOKEN
from services.trainer.run import JobRun, Services
from services.trainer.tasks import TaskSchedule

CONTEXT_TOKENS = 100
EPISODE_BYTES = CONTEXT_TOKENS * BYTES_PER_TOKEN
SPEC = JobSpec.model_validate(
    {
        "model": "m",
        "environments": [{"ref": "a:B"}],
        "limits": {"max_context_tokens": CONTEXT_TOKENS, "max_episode_tokens": CONTEXT_TOKENS},
        "rollout": {"group_size": 2, "max_staleness": 4},
        "groups_per_step": 3,
        "steps": 100,
    }
)
SCHEDULE = TaskSchedule(0, [10], [1.0])


def run_of(bus: Bus, claim: Claim, budget_bytes: int | None) -> Any:
    nothing = cast(Any, None)
    services = Services(
        bus=bus,
        store=nothing,
        status=nothing,
        engines=nothing,
        intake=nothing,
        weights=nothing,
        batch_log=nothing,
        checkpoints=nothing,
        metrics_path=Path("unused"),
        budget_bytes=budget_bytes,
    )
    run: Any = JobRun(claim, SPEC, services, nothing)
    run._admission.schedule = SCHEDULE
    return run


async def test_groups_wait_until_there_is_room(bus: Bus, claim: Claim) -> None:
    job = claim.job_id
    run = run_of(bus, claim, 9 * EPISODE_BYTES)
    await run._admission.admit()
    assert await bus.open_groups(job) == [0, 1, 2, 3]  # the fifth would be the tenth episode
    assert run._lineage.num_dispatched == 4
    token = await bus.join("w")
    leases = await bus.lease(job, "w", token, 2)
    await bus.append(job, token, [Append(lease.key, 0, 0, b"short", True) for lease in leases])
    await run._admission.admit()
    assert await bus.open_groups(job) == [0, 1, 2, 3, 4]
    assert (await bus.usage(job)).charged_bytes == 8 * EPISODE_BYTES + 2 * len(b"short")


async def test_without_a_budget_only_staleness_bounds_them(bus: Bus, claim: Claim) -> None:
    await run_of(bus, claim, None)._admission.admit()
    assert len(await bus.open_groups(claim.job_id)) == 15


async def test_a_step_always_fits(bus: Bus, claim: Claim) -> None:
    """With fewer groups than a step takes, the job would wait for ever."""
    run = run_of(bus, claim, 1)
    await run._admission.admit()
    assert await bus.open_groups(claim.job_id) == [0, 1, 2]
    await bus.commit(claim.job_id, claim.token, 1, [1])
    run._lineage.settle([1])
    run._lineage.num_published = 1
    await run._admission.admit()
    assert await bus.open_groups(claim.job_id) == [0, 2, 3]
