"""Each judge against evidence that was forged: nothing is said of what is sound, and each forgery is found."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gspo_core.spec import JobSpec
from tests.chaos import judge_learning, judge_lengths, judge_losses, judge_tasks, judge_users, judge_weights
from tests.chaos.evidence import Version
from tests.chaos.jobs import job_spec
from tests.chaos.made_up import MadeUp
from tests.chaos.model import write_model
from tests.chaos.talk import Talker, write_tokenizer
from tests.chaos.worlds import Fresh, Replayed

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Talker:
    write_tokenizer(directory := tmp_path_factory.mktemp("model"))
    return Talker(directory)


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# Published weights


def test_weights_that_the_logs_do_not_lead_to_are_found_in_every_epoch() -> None:
    job, again = MadeUp(), {step: {WEIGHTS: f"w{step}"} for step in range(5)}
    assert list(judge_learning.weights_differ(job, again)) == []
    for number, place in ((0, (1, 0)), (2, (1, 2)), (5, (3, 3))):  # the first, one of the history, one of a dead epoch
        forged = MadeUp()
        forged.versions[number] = Version(number, place, {WEIGHTS: "others"})
        (problem,) = judge_learning.weights_differ(forged, again)
        assert f"version {number} (epoch {place[0]} step {place[1]}) holds other weights" in problem


def test_the_weights_that_a_job_begins_with_are_judged_too(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    job = MadeUp()
    job.spec = JobSpec.model_validate(job_spec(2, tmp_path, 4, 0, ["Replayed"]))
    job.__dict__ |= {"batches": {}, "newest_checkpoint": None, "forks": {1: (0, 0)}}
    weights, _ = judge_learning.learned_again(job, tmp_path)
    job.__dict__["versions"] = {0: Version(0, (1, 0), weights[0])}
    assert list(judge_learning.weights_differ(job, weights)) == []
    job.versions[0] = Version(0, (1, 0), weights[0] | {"config.json": "another"})
    assert len(list(judge_learning.weights_differ(job, weights))) == 1


def publish(job: MadeUp, number: int, content: str) -> Path:
    path = job.directory / "weights" / f"v{number}" / WEIGHTS
    path.parent.mkdir(parents=True)
    path.write_text(content)
    job.versions[number] = Version(number, job.versions[number].place, {WEIGHTS: sha256(content)})
    return path


def test_a_bit_of_a_published_file_is_found(tmp_path: Path) -> None:
    job = MadeUp(tmp_path)
    path = publish(job, 5, "weights of a dead epoch")
    assert list(judge_weights.weights_on_disk_are_those_published(job)) == []
    path.write_text("weights of a dead epocH")
    (problem,) = judge_weights.weights_on_disk_are_those_published(job)
    assert "another model.safetensors" in problem
    path.unlink()
    (problem,) = judge_weights.weights_on_disk_are_those_published(job)
    assert "lacks ['model.safetensors']" in problem


@pytest.mark.parametrize(
    ("label", "files", "said"),
    [
        ("job/1/2", {WEIGHTS: "w2", "manifest.json": "any"}, None),
        ("job/1/2", {}, None),  # removed while it was read
        ("another/1/2", {WEIGHTS: "others"}, None),
        ("job/1/2", {WEIGHTS: "w1"}, "loaded as version 2 another model.safetensors"),
        ("job/1/2", {WEIGHTS: "w2", "more": "any"}, "loaded as version 2 another more"),
        ("job/2/2", {WEIGHTS: "w2"}, "version 2 is of epoch 2"),
        ("job/4/99", {WEIGHTS: "w2"}, "version 99, which was never published"),
    ],
)
def test_what_an_engine_was_given_is_compared_with_what_was_published(
    label: str, files: dict[str, str], said: str | None
) -> None:
    evidence: Any = SimpleNamespace(loads=[{"label": label, "path": "anywhere", "files": files}])
    found = list(judge_weights.engines_were_given_what_was_published(evidence, MadeUp()))
    assert found == [] if said is None else said in found[0]


# Tasks


def played(talker: Talker, number: int) -> Any:
    ids = talker.codec.render([{"role": "user", "content": f"task {number} abcdef"}])
    branch = SimpleNamespace(token_ids=np.array([*ids, 1]), action_mask=np.array([False] * len(ids) + [True]))
    return SimpleNamespace(key="job:0:0", branches=[branch])


def job_of_tasks(talker: Talker, used: Sequence[tuple[int, int]]) -> MadeUp:
    """Group N has played ``used[N]``: (number that the world says, index that is recorded)."""
    job = MadeUp()
    environments = [
        SimpleNamespace(ref="tests.chaos.worlds:Replayed", weight=1.0),
        SimpleNamespace(ref="tests.chaos.worlds:Fresh", weight=2.0),
    ]
    job.spec = SimpleNamespace(seed=5, environments=environments)  # type: ignore[assignment]
    groups = [
        SimpleNamespace(group=group, task_index=index, trajectories=[played(talker, number)])
        for group, (number, index) in enumerate(used)
    ]
    job.__dict__["batches"] = {(1, 1): SimpleNamespace(groups=groups)}
    return job


def tasks_in_order(count: int) -> list[tuple[int, int]]:
    """As the service's own schedule says."""
    from services.trainer.groups.tasks import TaskSchedule

    worlds = (Replayed, Fresh)
    schedule = TaskSchedule(5, [len(world.tasks) for world in worlds], [1.0, 2.0])
    tasks = [schedule.task(group) for group in range(count)]
    return [(worlds[task.environment].tasks[task.index]["number"], task.index) for task in tasks]


def test_tasks_in_order_are_sound_and_one_that_is_skipped_or_used_twice_is_found(talker: Talker) -> None:
    order = tasks_in_order(60)
    assert list(judge_tasks.tasks_are_used_in_order(job_of_tasks(talker, order), talker)) == []
    skipped = [*order[:30], *order[31:]]
    assert list(judge_tasks.tasks_are_used_in_order(job_of_tasks(talker, skipped), talker))
    twice = [*order[:30], order[29], *order[31:]]
    problems = list(judge_tasks.tasks_are_used_in_order(job_of_tasks(talker, twice), talker))
    assert any("group 30 has task" in problem or "played" in problem for problem in problems)
    mislabelled = [*order[:30], (order[29][0], order[30][1]), *order[31:]]
    (problem,) = judge_tasks.tasks_are_used_in_order(job_of_tasks(talker, mislabelled), talker)
    assert f"played {{{order[29][0]}}}" in problem


# Lengths


def job_of_turns(talker: Talker, rng: random.Random, count: int, keeps: Callable[[float], bool]) -> MadeUp:
    """``keeps`` is asked with the length of each turn as a share of the longest that may follow its prompt."""
    job = MadeUp()
    episodes = list[SimpleNamespace]()
    while len(episodes) < count:
        prompt = [rng.randrange(400) for _ in range(20)]
        possible = talker.possible_lengths(prompt)
        first = rng.choice(sorted(possible))
        if keeps(possible[first] / max(possible.values())):
            ids = np.array([*prompt, *talker.turn(prompt, first)])
            mask = np.arange(len(ids)) >= len(prompt)
            episodes.append(SimpleNamespace(attempt=rng.choice([0, 0, 1]), branches=[_branch(ids, mask)]))
    job.spec.rollout.on_stale = "mask"  # type: ignore[misc]
    job.__dict__["batches"] = {(1, 1): SimpleNamespace(groups=[SimpleNamespace(trajectories=episodes)])}
    return job


def _branch(ids: Any, mask: Any) -> Any:
    return SimpleNamespace(token_ids=ids, action_mask=mask)


def test_the_lengths_that_are_possible_are_those_of_the_turns(talker: Talker) -> None:
    rng = random.Random(3)
    for _ in range(20):
        prompt = [rng.randrange(400) for _ in range(30)]
        possible = talker.possible_lengths(prompt)
        assert possible == {first: len(talker.turn(prompt, first)) for first in possible}
        assert len(possible) > 1


def test_lengths_that_nothing_chose_are_sound(talker: Talker) -> None:
    for seed in range(6):
        evidence: Any = SimpleNamespace(jobs=[job_of_turns(talker, random.Random(seed), 300, lambda _: True)])
        assert list(judge_lengths.lengths_are_not_chosen(evidence, talker)) == []
        shift = judge_lengths.lengths(evidence.jobs, talker, only_again=False)
        assert abs(shift.shift) < shift.noticed / 2  # the bound is far away


@pytest.mark.parametrize("lost", ["long", "short"])
def test_lengths_that_were_chosen_are_found(talker: Talker, lost: str) -> None:
    """Of the longer, or the shorter, turns four in five are lost."""
    rng = random.Random(1)

    def keeps(share: float) -> bool:
        return (share > 0.7) != (lost == "long") or rng.random() < 0.2

    evidence: Any = SimpleNamespace(jobs=[job_of_turns(talker, rng, 300, keeps) for _ in range(4)])
    for job in evidence.jobs:
        job.id = f"job{rng.random()}"
    problems = list(judge_lengths.lengths_are_not_chosen(evidence, talker))
    assert any("of what was trained" in problem for problem in problems), judge_lengths.told(evidence, talker)


def test_a_job_that_drops_what_is_too_old_may_prefer_what_is_short(talker: Talker) -> None:
    job = job_of_turns(talker, random.Random(1), 300, lambda share: share < 0.7)
    job.spec.rollout.on_stale = "drop"  # type: ignore[misc]
    evidence: Any = SimpleNamespace(jobs=[job])
    assert list(judge_lengths.lengths_are_not_chosen(evidence, talker)) == []


# Losses


def losses(job: MadeUp, *samples: dict[str, Any]) -> list[str]:
    evidence: Any = SimpleNamespace(samples=[{"job": "job", **sample} for sample in samples])
    return list(judge_losses.losses_have_their_reason(evidence, job))


def test_losses_with_their_reason_are_sound() -> None:
    job = MadeUp()
    job.batches[2, 3].extra["dropped"] = {"dropped_unreadable": [5], "dropped_partial": [4]}
    job.batches[1, 1].groups[0].trajectories.clear()  # type: ignore[attr-defined]
    job.hits = [{"kind": "turn bit", "group": 5}, *({"kind": "spoil episode", "group": one} for one in (0, 4))]
    letter = {"kind": "dead letter", "group": 4, "reason": "the record cannot be read"}
    assert losses(job, letter, {"kind": "counters", "counters": {"dropped_queue_damaged": 0}}) == []


@pytest.mark.parametrize(
    ("reason", "said"),
    [("dropped_unreadable", "dropped_unreadable"), ("dropped_partial", "dropped_partial"), ("dropped_mismatch", "mis")],
)
def test_a_loss_without_its_reason_is_found(reason: str, said: str) -> None:
    job = MadeUp()
    job.batches[2, 3].extra["dropped"] = {reason: [5]}
    job.hits = [{"kind": "turn bit", "group": 4}, {"kind": "spoil episode", "group": 6}]
    assert said in losses(job)[0]


@pytest.mark.parametrize(("num_kills", "is_explained"), [(3, False), (4, True)])
def test_an_agents_episode_that_is_killed_again_and_again_is_lost_with_a_reason(
    num_kills: int, is_explained: bool
) -> None:
    """The first kill is nobody's fault; two retries are used up by those after it, and one more ends it."""
    job: Any = MadeUp()
    job.batches[2, 3].extra["dropped"] = {"dropped_partial": [5]}
    job.hits = [{"kind": "kill hosts of agents"}] * (num_kills - 1) + [{"kind": "kill hosts in a stream"}]
    job.spec.environments = [None]
    job.spec.episode_limits = lambda _: SimpleNamespace(retries=2)
    assert (losses(job) == []) == is_explained


def test_an_old_group_is_dropped_only_where_the_job_says_so() -> None:
    job = MadeUp()
    assert losses(job) == []
    job.spec.rollout.on_stale = "mask"  # type: ignore[misc]
    assert "dropped_stale without a reason: [5]" in losses(job)[0]


def test_a_missing_episode_a_letter_and_an_emptied_queue_need_a_reason() -> None:
    job = MadeUp()
    job.batches[1, 1].groups[0].trajectories.clear()  # type: ignore[attr-defined]
    assert "of group 0 some are missing" in losses(job)[0]
    letter = {"kind": "dead letter", "group": 4, "reason": "the record of this episode in Redis cannot be read"}
    assert "nobody had spoiled, of the groups [4]" in losses(MadeUp(), letter)[0]
    counted = {"kind": "counters", "counters": {"dropped_queue_damaged": 3}}
    assert "its queue was emptied" in losses(MadeUp(), counted)[0]


# Users


def job_with_times(tmp_path: Path, settings: dict[int, dict[str, Any]]) -> MadeUp:
    """Step N was written down at N seconds; ``settings`` are those that hold from a step on."""
    job, now = MadeUp(tmp_path), {"version": 0, "values": {}}
    for place, batch in job.batches.items():
        now = settings.get(place[1], now)
        extra: Any = batch.extra
        extra["settings"] = now
        path = job.batch_path(place)
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
        os.utime(path, (place[1], place[1]))
    return job


LOWER = {"optimizer": {"lr": 1e-4}}
LOWERED = {"version": 1, "values": {"optimizer.lr": 1e-4}}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({3: LOWERED}, None),  # the step that was under way had the old ones
        ({2: LOWERED}, None),
        ({4: LOWERED}, "step 3 does not have optimizer.lr 0.0001"),
        ({}, "step 3 does not have optimizer.lr 0.0001"),
        ({2: LOWERED, 3: {"version": 0, "values": {}}}, "has the settings 0, a step before it had 1"),
        ({2: {"version": 1, "values": {"optimizer.lr": 1.0}}}, "settings that nobody asked for: ['optimizer.lr']"),
    ],
)
def test_settings_hold_from_the_next_step_on(
    settings: dict[int, dict[str, Any]], said: str | None, tmp_path: Path
) -> None:
    job = job_with_times(tmp_path, settings)
    job.acts = [{"act": act, "at": 1.5, "change": 1, "changes": LOWER} for act in ("change", "changed")]
    found = list(judge_users.settings_are_obeyed(job))
    assert found == [] if said is None else any(said in problem for problem in found), found


@pytest.mark.parametrize(("at", "said"), [(1.3, False), (1.6, False), (1.1, True)])
def test_of_two_changes_at_once_either_may_be_the_last(at: float, said: bool, tmp_path: Path) -> None:
    """The other was answered at 1.2: only where it was asked for and done before is it certain which holds."""
    higher = {"version": 2, "values": {"optimizer.lr": 1.0}}
    job = job_with_times(tmp_path, {2: LOWERED, 3: higher})
    other = {"change": 2, "changes": {"optimizer": {"lr": 1.0}}}
    job.acts = [
        {"act": "change", "at": at, **other},
        *([{"act": "changed", "at": 1.2, **other}] if at < 1.2 else []),
        {"act": "change", "at": 1.4, "change": 1, "changes": LOWER},
        {"act": "changed", "at": 1.5, "change": 1, "changes": LOWER},
    ]
    problems = [one for one in judge_users.settings_are_obeyed(job) if "does not have optimizer.lr 0.0001" in one]
    assert bool(problems) == said


def test_a_step_of_a_job_that_is_held_is_found(tmp_path: Path) -> None:
    job = job_with_times(tmp_path, {})
    job.acts = [{"act": "stands", "at": 2.1}, {"act": "resume", "at": 2.9}]
    assert list(judge_users.who_is_held_stands_still(job)) == []
    job.acts[1]["at"] = 3.5
    (problem,) = judge_users.who_is_held_stands_still(job)
    assert "step 3 was taken 0.90 s after" in problem
    job.acts.pop(1)
    assert list(judge_users.who_is_held_stands_still(job)) == []


def test_a_job_that_never_obeys_a_pause_is_found(tmp_path: Path) -> None:
    job = job_with_times(tmp_path, {})
    paused, resumed = {"act": "pause", "at": 1.5, "answer": "yes"}, {"act": "resume", "at": 2.5}
    job.acts = [paused, resumed]
    assert list(judge_users.who_is_held_stands_still(job)) == []  # step 2 was under way
    resumed["at"] = 3.5
    (problem,) = judge_users.who_is_held_stands_still(job)
    assert "the steps [3] were taken" in problem
    job.acts = [paused]  # it came to its end before anybody let it go
    (problem,) = judge_users.who_is_held_stands_still(job)
    assert "the steps [3, 4] were taken" in problem
    job.acts = [{"act": "resume unheard", "at": 1.4}, paused, resumed]
    assert list(judge_users.who_is_held_stands_still(job)) == []
    job.acts = [paused | {"answer": "no answer: lost"}, resumed]
    assert list(judge_users.who_is_held_stands_still(job)) == []


def test_who_was_given_up_is_cancelled_and_nobody_else(tmp_path: Path) -> None:
    from tests.chaos import judge_lineage

    job = MadeUp()
    job.acts = [{"act": act, "at": 1.0} for act in ("cancel", "cancelled")]
    assert list(judge_lineage.jobs_are_over(job)) == []  # it had come to its end before
    acts, job = job.acts, MadeUp()
    job.acts = acts
    job.logged.remove((4, 4))
    assert "it was to be cancelled" in next(judge_lineage.jobs_are_over(job))
    job.status["status"] = "cancelled"
    assert list(judge_lineage.jobs_are_over(job)) == []
    job.acts = []
    assert "it is cancelled" in next(judge_lineage.jobs_are_over(job))


def test_forged_evidence_is_what_a_run_writes() -> None:
    """The names that the tests above forge are those that the run notes."""
    source = (Path(__file__).parent / "users.py").read_text()
    assert all(
        f'act="{act}"' in source
        for act in ("change", "changed", "pause", "stands", "resume", "resume unheard", "cancelled")
    )
    assert json.loads('{"kind": "turn bit"}')["kind"] in (Path(__file__).parent / "schedule.py").read_text()
