"""The oracle's judgement of a history that was made up: nothing is said of a sound one, and each flaw is found.

What it makes of the real thing built wrongly is shown by ``test_chaos_mutants.py``, which takes minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.chaos import judge_lineage, judge_tokens
from tests.chaos.evidence import JobEvidence, Version
from tests.chaos.schedule import AT_LEAST, WEIGHTS, plan

STEPS = 4


def batch(groups: list[int], *, dropped: dict[str, list[int]], num_dispatched: int, ages: dict[str, int]) -> Any:
    made = [SimpleNamespace(group=number) for number in groups]
    extra = {"dropped": dropped, "num_dispatched": num_dispatched, "staleness": ages}
    return SimpleNamespace(groups=made, extra=extra)


class MadeUp(JobEvidence):
    """Two epochs: the second goes on from step 2 of the first, which had logged a third step that is void."""

    def __init__(self) -> None:
        self.id = "job"
        rollout = SimpleNamespace(on_stale="drop", staleness_cap=1, max_staleness=1)
        self.spec = SimpleNamespace(steps=STEPS, groups_per_step=2, rollout=rollout)  # type: ignore[assignment]
        given: dict[str, Any] = self.__dict__
        given["status"] = {"status": "succeeded"}
        given["forks"] = {1: (0, 0), 2: (1, 2)}
        given["logged"] = {(1, 1), (1, 2), (1, 3), (2, 3), (2, 4)}
        given["batches"] = {
            (1, 1): batch([0, 1], dropped={}, num_dispatched=4, ages={"0": 0}),
            (1, 2): batch([2, 3], dropped={}, num_dispatched=6, ages={"0": 1, "1": 0}),
            (2, 3): batch([4, 6], dropped={"dropped_stale": [5]}, num_dispatched=9, ages={"1": 1, "2": 0}),
            (2, 4): batch([7, 8], dropped={}, num_dispatched=9, ages={"4": 0}),
        }
        places = {0: (1, 0), 1: (1, 1), 2: (1, 2), 3: (2, 2), 4: (2, 3), 5: (2, 4)}
        given["versions"] = {number: Version(number, place, {}) for number, place in places.items()}


CHECKS: list[Callable[[JobEvidence], Iterator[str]]] = [
    judge_lineage.jobs_are_over,
    judge_lineage.steps_are_whole,
    judge_lineage.groups_are_settled_once,
    judge_lineage.versions_go_forward,
    judge_lineage.epochs_keep_what_was_published,
    judge_lineage.nothing_is_too_old,
    judge_lineage.admission_is_paced,
]


def test_a_sound_history_is_sound() -> None:
    job = MadeUp()
    assert job.lineage == [(1, 1), (1, 2), (2, 3), (2, 4)]
    assert [list(check(job)) for check in CHECKS] == [[] for _ in CHECKS]


def fail_the_job(job: MadeUp) -> None:
    job.status["status"] = "failed"


def lose_a_log(job: MadeUp) -> None:
    job.logged.remove((1, 2))


def train_a_group_twice(job: MadeUp) -> None:
    job.batches[2, 4].groups[0].group = 2  # type: ignore[misc]


def lose_a_group(job: MadeUp) -> None:
    job.batches[2, 3].extra["dropped"].clear()  # type: ignore[attr-defined]


def drop_for_no_known_reason(job: MadeUp) -> None:
    extra: Any = job.batches[2, 3].extra
    extra["dropped"] = {"dropped_somehow": [5]}


def publish_from_the_past(job: MadeUp) -> None:
    job.versions[5] = Version(5, (1, 2), {})


def publish_what_is_void(job: MadeUp) -> None:
    job.versions[3] = Version(3, (1, 3), {})


def take_a_token_for_younger(job: MadeUp) -> None:
    extra: Any = job.batches[1, 2].extra
    extra["staleness"]["0"] = 0


def train_what_is_too_old(job: MadeUp) -> None:
    extra: Any = job.batches[2, 4].extra
    extra["staleness"] = {"1": 2}


def start_too_many(job: MadeUp) -> None:
    extra: Any = job.batches[1, 1].extra
    extra["num_dispatched"] = 5


@pytest.mark.parametrize(
    ("flaw", "said"),
    [
        (fail_the_job, "it is failed"),
        (lose_a_log, "the steps of its lineage"),
        (train_a_group_twice, "trained twice: [2]"),
        (lose_a_group, "neither trained nor dropped: [5]"),
        (drop_for_no_known_reason, "unknown reasons"),
        (publish_from_the_past, "came after one of epoch"),
        (publish_what_is_void, "is no part of the lineage"),
        (publish_what_is_void, "although step 3 was published"),
        (take_a_token_for_younger, "it is 1"),
        (train_what_is_too_old, "2 steps old"),
        (start_too_many, "at most 4 may be"),
    ],
)
def test_a_flaw_is_found(flaw: Callable[[MadeUp], None], said: str) -> None:
    job = MadeUp()
    flaw(job)
    found = [problem for check in CHECKS for problem in check(job)]
    assert any(said in problem for problem in found), found


@pytest.mark.parametrize(
    ("world", "attempt", "acts", "found"),
    [
        ("Fresh", 0, ["aaaaaa 1", "aaaaaa 2"], 0),
        ("Fresh", 1, ["aaaaaa 1", "aaaaaa 1"], 1),
        ("Kept", 0, ["aaaaaa 1", "aaaaaa 1"], 1),
        ("Kept", 1, ["aaaaaa 1", "aaaaaa 1"], 0),  # the second attempt began where the world stood
        ("Kept", 1, ["aaaaaa 1"] * 3, 1),
        ("Kept", 0, ["bbbbbb 1", "bbbbbb 1"], 0),  # never trained: nobody knows how many attempts it had
    ],
)
def test_an_act_is_found_once_for_each_attempt(
    world: str, attempt: int, acts: list[str], found: int, tmp_path: Path
) -> None:
    (tmp_path / "ledger-0").write_text("".join(f"{act}\n" for act in acts))
    job, prompt = MadeUp(), [ord(character) for character in "task 3 aaaaaa"]
    branch = SimpleNamespace(token_ids=np.array([*prompt, 65]), action_mask=np.array([False] * len(prompt) + [True]))
    group = SimpleNamespace(trajectories=[SimpleNamespace(branches=[branch], attempt=attempt)])
    job.__dict__["batches"] = {(1, 1): SimpleNamespace(groups=[group])}
    environment = SimpleNamespace(ref=f"tests.chaos.worlds:{world}", config={"ledger": "/elsewhere/ledger-0"})
    job.spec.environments = [environment]  # type: ignore[misc,list-item]
    tokenizer = SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)))
    talker: Any = SimpleNamespace(codec=SimpleNamespace(tokenizer=tokenizer))
    evidence: Any = SimpleNamespace(work=tmp_path)
    assert len(list(judge_tokens.nothing_acted_twice(evidence, job, talker))) == found


def test_a_plan_follows_from_its_seed_and_holds_every_kind() -> None:
    faults = plan(7, 320, 180.0)
    assert faults == plan(7, 320, 180.0)
    assert faults != plan(8, 320, 180.0)
    assert len(faults) == 320
    assert {fault.kind for fault in faults} == set(WEIGHTS)
    assert min(sum(fault.kind == kind for fault in faults) for kind in WEIGHTS) >= AT_LEAST
    assert faults[-1].at_s <= 180.0 + 1e-6
    assert all(before.at_s <= after.at_s for before, after in pairwise(faults))
    assert "disk full" not in {fault.kind for fault in plan(7, 320, 180.0, without={"disk full"})}
