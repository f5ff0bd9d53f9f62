"""Is each task used when the order of the data says so? The order is worked out anew from the job's seed: environments
by their weights, each one's tasks shuffled for every pass.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.chaos import worlds
from tests.chaos.evidence import JobEvidence
from tests.chaos.judge_tokens import first_words
from tests.chaos.players import AGENTS
from tests.chaos.talk import Talker


def tasks_are_used_in_order(job: JobEvidence, talker: Talker) -> Iterator[str]:
    """None is skipped and none is used twice in a pass: group N has the N-th task, and its world played that one."""
    named = [_numbers(one.ref) for one in job.spec.environments]
    last = max((group.group for batch in job.batches.values() for group in batch.groups), default=-1)
    order = _order(job, [len(numbers) for numbers in named], last + 1)
    for (_, step), batch in job.batches.items():
        for group in batch.groups:
            environment, index = order[group.group]
            if group.task_index != index:
                yield f"step {step}: group {group.group} has task {group.task_index}, the order says {index}"
            for trajectory in (one for one in group.trajectories if one.branches):
                played = {number for number, _ in first_words(trajectory, talker)}
                if played != {named[environment][index]}:
                    yield f"step {step}: {trajectory.key} played {played}, its task is {named[environment][index]}"


def _numbers(ref: str) -> list[int]:
    if ref in AGENTS:
        return list(AGENTS[ref])
    world: type[worlds.Replayed] = getattr(worlds, ref.rpartition(":")[2])
    return [task["number"] for task in world.tasks]


def _order(job: JobEvidence, sizes: list[int], count: int) -> list[tuple[int, int]]:
    """(environment, index) of the first ``count`` groups."""
    shares = np.array([one.weight for one in job.spec.environments])
    shares, owed = shares / shares.sum(), np.zeros(len(sizes))
    passes: list[list[int]] = [[] for _ in sizes]
    num_used, order = [0] * len(sizes), []
    for _ in range(count):
        owed += shares
        environment = int(owed.argmax())
        owed[environment] -= 1
        if num_used[environment] == len(passes[environment]):
            lap = num_used[environment] // sizes[environment]
            shuffled = np.random.default_rng((job.spec.seed, environment, lap)).permutation(sizes[environment])
            passes[environment] += shuffled.tolist()
        order.append((environment, passes[environment][num_used[environment]]))
        num_used[environment] += 1
    return order
