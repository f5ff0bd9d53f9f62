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
from tests.chaos.made_up import MadeUp
from tests.chaos.schedule import AT_LEAST, WEIGHTS, plan

CHECKS: list[Callable[[JobEvidence], Iterator[str]]] = [
    judge_lineage.jobs_are_over,
    judge_lineage.steps_are_whole,
    judge_lineage.groups_are_settled_once,
    judge_lineage.versions_go_forward,
    judge_lineage.epochs_keep_what_was_published,
    judge_lineage.nothing_is_too_old,
    judge_lineage.nothing_of_a_dead_epoch_is_trained,
    judge_lineage.admission_is_paced,
]


def test_a_sound_history_is_sound() -> None:
    job = MadeUp()
    assert job.lineage == [(1, 1), (1, 2), (2, 3), (4, 4)]
    assert [list(check(job)) for check in CHECKS] == [[] for _ in CHECKS]


def fail_the_job(job: MadeUp) -> None:
    job.status["status"] = "failed"


def lose_a_log(job: MadeUp) -> None:
    job.logged.remove((1, 2))


def train_a_group_twice(job: MadeUp) -> None:
    job.batches[4, 4].groups[0].group = 2  # type: ignore[misc]


def lose_a_group(job: MadeUp) -> None:
    job.batches[2, 3].extra["dropped"].clear()


def drop_for_no_known_reason(job: MadeUp) -> None:
    extra: Any = job.batches[2, 3].extra
    extra["dropped"] = {"dropped_somehow": [5]}


def publish_from_the_past(job: MadeUp) -> None:
    job.versions[7] = Version(7, (1, 2), {})


def publish_what_is_void(job: MadeUp) -> None:
    job.versions[3] = Version(3, (1, 3), {})


def publish_what_a_dead_epoch_takes_with_it(job: MadeUp) -> None:
    job.versions[5] = Version(5, (3, 4), {})


def log_other_versions(job: MadeUp) -> None:
    extra: Any = job.batches[4, 4].extra
    extra["staleness"] = {"4": 0}


def take_a_token_for_younger(job: MadeUp) -> None:
    extra: Any = job.batches[1, 2].extra
    extra["staleness"]["0"] = 0


def train_what_is_too_old(job: MadeUp) -> None:
    _holds_what_is_too_old(job)


def _holds_what_is_too_old(job: MadeUp, num_actions: int = 1) -> None:
    batch: Any = job.batches[4, 4]
    batch.extra["staleness"]["1"] = 2
    batch.groups[0].trajectories[0].segments.append(SimpleNamespace(version=1, num_actions=num_actions))


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
        (publish_what_a_dead_epoch_takes_with_it, "version 5 (epoch 3 step 4) was published and is no part"),
        (publish_what_a_dead_epoch_takes_with_it, "trained on version 5, which epoch 3 published and took with it"),
        (log_other_versions, "holds tokens of the versions [4, 5] and its log speaks of [4]"),
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


def test_an_end_of_which_nothing_was_sampled_is_as_old_as_it_likes() -> None:
    job = MadeUp()
    _holds_what_is_too_old(job, num_actions=0)
    assert list(judge_lineage.nothing_is_too_old(job)) == []


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
    job.spec.environments = (environment,)  # type: ignore[misc,assignment]
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
