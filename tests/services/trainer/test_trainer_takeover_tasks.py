"""A trainer that takes over goes on in the order of tasks where its predecessor's checkpoint stands."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from gspo_core.log.lineage import Lineage
from services.state.queue import Bus
from services.state.store import Claim
from services.trainer.groups.tasks import TaskSchedule
from tests.services.trainer.test_trainer_budget import SPEC, run_of

NUM_TASKS = 7


def schedule() -> TaskSchedule:
    """As every trainer of the job makes it anew."""
    return TaskSchedule(SPEC.seed, [NUM_TASKS], [1.0])


async def train(run: Any, bus: Bus, claim: Claim, groups: list[int]) -> None:
    """A step, as far as the books are concerned."""
    run._lineage.step += 1
    run._lineage.settle(groups)
    run._lineage.num_published += len(groups)
    await bus.commit(claim.job_id, claim.token, run._lineage.step, groups)
    await run._admission.admit()


async def test_the_order_of_tasks_goes_on_after_a_takeover(bus: Bus, claim: Claim) -> None:
    first = run_of(bus, claim, None)
    first._admission.schedule = schedule()
    await first._admission.admit()
    await train(first, bus, claim, [0, 2, 1])
    checkpoint = json.dumps(first._lineage.to_dict())
    await train(first, bus, claim, [5, 3, 8])  # not logged: these are lost with the trainer
    heir = run_of(bus, replace(claim, epoch=claim.epoch + 1), None)
    heir._lineage.become(Lineage.from_dict(json.loads(checkpoint)))
    heir._admission.schedule = schedule()
    await heir._admission.dispatch_again()
    await heir._admission.admit()
    await train(heir, bus, claim, [3, 4, 5])
    worker = await bus.join("w")
    played = {lease.key.group: lease.task_index for lease in await bus.lease(claim.job_id, "w", worker, 1000)}
    assert sorted(played) == list(range(6, 21))
    order = [played[group] for group in range(7, 21)]
    assert order == [schedule().task(group).index for group in range(7, 21)]
    assert [sorted(order[:NUM_TASKS]), sorted(order[NUM_TASKS:])] == [list(range(NUM_TASKS))] * 2  # two whole laps
