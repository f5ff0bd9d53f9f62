"""Trajectories that are pushed over HTTP: checked, appended under a token of their own, and trained like any other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from gspo_core.codec import decode
from gspo_core.position import Position
from gspo_core.staleness import shared_step
from gspo_core.types import EpisodeKey, Split
from gspo_core.versions import WeightFile, WeightsManifest
from services.api.submission.trajectories import shared_steps
from services.state.jobs import WentBack
from services.state.queue import Append, Bus
from services.state.store import Claim, JobStatus, Store
from services.state.versions import Version
from services.trainer.groups.intake import Intake
from tests.core.learner_support import write_model
from tests.core.test_model_files import SOUND, write_files
from tests.patience import HANG_S
from tests.services.api.api_kit import SPEC, application, error_of, http_to
from tests.services.trainer.loop_kit import (
    ACTIONS,
    NUM_TURNS,
    STOP_ID,
    Loop,
    a_loop,
    fingerprint,
    loop_spec,
    observation_of,
    plain_loop,
    prompt_of,
    reward_of,
    saved,
)

DEADLINE_S = HANG_S
VOCABULARY = 50


@pytest.fixture
async def http(store: Store, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with application(store, jobs_dir=tmp_path / "jobs") as app, http_to(app) as http:
        yield http


@pytest.fixture
async def claim(store: Store, bus: Bus, http: httpx.AsyncClient, tmp_path: Path) -> Claim:
    """A running job with versions 0, 29 and 30 of as many steps, an open group of three and an evaluation."""
    (tmp_path / "model").mkdir()
    write_files(tmp_path / "model", SOUND | {"vocab_size": VOCABULARY})
    spec = SPEC | {"model": str(tmp_path / "model"), "limits": {"max_context_tokens": 64}}
    answer = await http.post("/v1/jobs", json=spec)
    assert answer.status_code == 201, answer.text
    claim = await store.jobs.claim("trainer")
    assert claim is not None
    await store.jobs.set_status(claim.job_id, JobStatus.RUNNING, token=claim.token)
    for version in (0, 29, 30):
        number = await store.versions.next(claim.job_id, claim.token, at_least=version)
        manifest = WeightsManifest(claim.job_id, number, 1, number, (WeightFile("w", 1, "0" * 64),))
        await store.versions.publish(claim.job_id, claim.token, manifest)
    await bus.dispatch(claim.job_id, claim.token, 7, size=3, split=Split.TRAIN, task_index=4)
    await bus.dispatch(claim.job_id, claim.token, 8, size=1, split=Split.EVAL, task_index=0)
    return claim


async def test_age_is_counted_in_the_history_that_is_trained(
    http: httpx.AsyncClient, store: Store, bus: Bus, claim: Claim
):
    """The job went back from step 30 to step 0."""
    job, cap = claim.job_id, 4
    await store.jobs.set_status(job, JobStatus.SUCCEEDED, token=claim.token)
    record = await store.jobs.get(job)
    back = WentBack(record.epoch + 1, Position(1, 0))
    settings = {"steps": 200, "rollout.staleness_cap": cap}
    await store.jobs.reopen(record, epoch=record.epoch + 1, settings=settings, went_back=back)
    again = await store.jobs.claim("another")
    assert again is not None
    await store.jobs.set_status(job, JobStatus.RUNNING, token=again.token)
    for step in range(cap + 2):
        number = await store.versions.next(job, again.token)
        manifest = WeightsManifest(job, number, again.epoch, step, (WeightFile("w", 1, "0" * 64),))
        await store.versions.publish(job, again.token, manifest)
        if step == 0:
            await bus.dispatch(job, again.token, 9, size=5, split=Split.TRAIN, task_index=0)
            first = number
            items = [item(group=9, member=n, policy_versions=v) for n, v in enumerate((number, 0, 30))]
            assert await push(http, again, *items) == ["accepted"] * 3
    items = [item(group=9, member=3, policy_versions=v) for v in (first, 0, 29, 30, first + 1)]
    assert await push(http, again, *items) == ["stale"] * 4 + ["accepted"]


def item(**changes: Any) -> dict[str, Any]:
    """Two prompt tokens, three of the policy, one of a tool, one of the policy."""
    given: dict[str, Any] = {
        "group": 7,
        "member": 0,
        "token_ids": [1, 2, 10, 11, 12, 3, 13],
        "mask": [False, False, True, True, True, False, True],
        "logprobs": [0, 0, -0.5, -0.25, -1.5, 0, -2.0],
        "policy_versions": 30,
        "reward": 1.0,
    }
    return given | changes


async def push(http: httpx.AsyncClient, claim: Claim, *items: dict[str, Any]) -> list[str]:
    answer = await http.post(f"/v1/jobs/{claim.job_id}/trajectories", json={"trajectories": items})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert [one["index"] for one in body["data"]] == list(range(len(items)))
    assert body["num_accepted"] == sum(one["accepted"] for one in body["data"])
    return ["accepted" if one["accepted"] else one["reason"] for one in body["data"]]


async def test_a_pushed_group_reaches_the_trainers_intake_as_it_was_pushed(
    http: httpx.AsyncClient, bus: Bus, claim: Claim
):
    versions = [30, 30, 29, 29, 30, 30, 30]
    pushed = [item(member=n, policy_versions=versions, reward=float(n), metrics={"seconds": 1.5}) for n in range(3)]
    assert await push(http, claim, *pushed) == ["accepted"] * 3
    intake = Intake(bus, claim.job_id)
    reading = asyncio.create_task(intake.run())
    async with asyncio.timeout(DEADLINE_S):
        (group,) = await intake.wait_for(Split.TRAIN, 1)
    reading.cancel()
    assert (group.group, group.task_index, list(group.rewards)) == (7, 4, [0.0, 1.0, 2.0])
    for trajectory in group:
        (branch,) = trajectory.branches
        assert branch.token_ids.tolist() == pushed[0]["token_ids"]
        assert branch.action_mask.tolist() == pushed[0]["mask"]
        assert branch.behavior_logprobs.tolist() == pushed[0]["logprobs"]
        assert [(one.version, one.turn, one.token_ids.tolist()) for one in trajectory.segments] == [
            (29, 0, [1, 2, 10, 11]),
            (30, 0, [12]),
            (30, 1, [3, 13]),
        ]
        assert {one.engine_id for one in trajectory.segments} == {"pushed:local"}
        assert trajectory.segments[-1].outcome.metrics == {"seconds": 1.5}
    assert await bus._redis.hlen("gspo:{service}:lease_tokens") == 0  # and nothing of it is left over


async def test_each_bad_item_is_refused_for_its_own_reason_and_the_good_ones_are_taken(
    http: httpx.AsyncClient, bus: Bus, claim: Claim
):
    bad = {
        "length_mismatch": item(logprobs=[0.0]),
        "unknown_version": item(policy_versions=28),
        "stale": item(policy_versions=0),
        "unknown_token": item(token_ids=[1, 2, 10, 11, VOCABULARY, 3, 13]),
        "invalid_logprob": item(logprobs=[0, 0, 0.1, -1, -1, 0, -1]),
        "too_long": item(token_ids=[1] * 65, mask=[True] * 65, logprobs=[-1.0] * 65),
        "no_action": item(mask=[False] * 7, logprobs=[0] * 7),
        "no_prefix": item(mask=[True] * 7, logprobs=[-1.0] * 7),
        "invalid_outcome": item(stop_reason="env_error"),
        "non_finite": item(logprobs=[0, 0, -1e300, -1, -1, 0, -1]),
        "gap": item(num_before=3),
        "not_open": item(group=9),
    }
    failed = item(member=1, stop_reason="env_error", reward=None)
    answers = await push(http, claim, item(), *(one | {"member": 2} for one in bad.values()), failed, item())
    assert answers == ["accepted", *bad, "accepted", "duplicate"]
    assert await push(http, claim, item(group=8), item(member=3)) == ["not_open", "not_open"]
    assert await push(http, claim, item(member=2)) == ["accepted"]
    assert [(one.group, one.dead) for one in await bus.ready_groups(claim.job_id)] == [(7, ())]
    metrics = (await http.get("/metrics")).text
    assert 'gspo_pushed_trajectories_total{fate="accepted"} 3.0' in metrics
    assert 'gspo_pushed_trajectories_total{fate="stale"} 1.0' in metrics


@pytest.mark.parametrize("beyond", [{"reward": 2e15}, {"metrics": {"n": -2e15}}, {"reward_parts": {"p": 1e200}}])
async def test_no_number_is_larger_than_that_of_an_environment(
    http: httpx.AsyncClient, bus: Bus, claim: Claim, beyond: dict[str, Any]
):
    assert await push(http, claim, item(**beyond), item()) == ["invalid_outcome", "accepted"]


async def test_an_episode_comes_in_pieces_and_no_piece_counts_twice(http: httpx.AsyncClient, bus: Bus, claim: Claim):
    whole = item(policy_versions=[30] * 7)
    columns = ("token_ids", "mask", "logprobs", "policy_versions")

    def piece(start: int, end: int, **changes: Any) -> dict[str, Any]:
        cut = {name: whole[name][start:end] for name in columns}
        return whole | cut | {"num_before": start, "reward": None} | changes

    first, second, end = piece(0, 4), piece(4, 7), piece(7, 7, reward=0.5)
    assert await push(http, claim, first) == ["accepted"]
    assert await push(http, claim, first, end) == ["duplicate", "gap"]
    assert await push(http, claim, second, end, end) == ["accepted", "accepted", "duplicate"]
    segments = [decode(payload) for payload in await bus.read_episode(EpisodeKey(claim.job_id, 7, 0))]
    assert [token for one in segments for token in one.token_ids.tolist()] == whole["token_ids"]
    assert [one.turn for one in segments] == [0, 0, 1, 1]
    assert segments[-1].outcome.reward == 0.5


async def test_workers_and_pushes_never_share_an_episode(http: httpx.AsyncClient, bus: Bus, claim: Claim):
    token = await bus.join("worker")
    (lease,) = await bus.lease(claim.job_id, "worker", token, 1)
    assert lease.key.group == 7
    mine = item(member=lease.key.member)
    assert await push(http, claim, mine) == ["held"]
    await bus.hand_back(claim.job_id, token, [lease.key])
    assert await push(http, claim, mine) == ["accepted"]
    others = await bus.lease(claim.job_id, "worker", token, 10)
    assert lease.key not in [one.key for one in others]


async def test_what_is_taken_by_name_is_fenced_like_every_lease(bus: Bus, claim: Claim, http: httpx.AsyncClient):
    key = EpisodeKey(claim.job_id, 7, 1)
    token = await bus.join("push-a")
    assert [one.key for one in await bus.take(claim.job_id, "push-a", token, [key])] == [key]
    assert [one.key for one in await bus.take(claim.job_id, "push-a", token, [key])] == [key]  # a resend
    assert await bus.take(claim.job_id, "push-b", await bus.join("push-b"), [key]) == []
    assert await push(http, claim, item(member=1)) == ["held"]
    impatient = Bus(bus._redis, lease_s=0.05)
    async with asyncio.timeout(DEADLINE_S):
        while not await impatient.reap(claim.job_id):  # nobody beats for it
            await asyncio.sleep(0.02)
    assert await push(http, claim, item(member=1)) == ["accepted"]
    with pytest.raises(Exception, match="lease"):
        await bus.append(claim.job_id, token, [Append(key, 0, 0, b"late", False)])


async def test_a_job_that_does_not_run_takes_nothing_and_a_body_that_is_none_is_422(
    http: httpx.AsyncClient, store: Store, claim: Claim
):
    path = f"/v1/jobs/{claim.job_id}/trajectories"
    for body in ({}, {"trajectories": []}, {"trajectories": [{}]}, {"trajectories": [item(token_ids=["x"])]}):
        assert (await http.post(path, json=body)).status_code == 422
    answer = await http.post(path, json={"trajectories": [item(token_ids=[-1])]})
    assert error_of(answer)["param"] == "trajectories[0].token_ids[0]"
    await store.jobs.set_status(claim.job_id, JobStatus.FAILED, token=claim.token)
    assert await push(http, claim, item(), item()) == ["job_not_running"] * 2


async def test_an_environment_that_nobody_here_can_load_is_described_once(
    http: httpx.AsyncClient, store: Store, claim: Claim
):
    path = f"/v1/jobs/{claim.job_id}/environments/0/description"
    first = await http.post(path, json={"num_tasks": {"train": 5}})
    second = await http.post(path, json={"num_tasks": {"train": 9}})
    assert first.json()["description"] == second.json()["description"] == {"num_tasks": {"train": 5, "eval": 0}}
    assert await store.environments.get(claim.job_id, 0) == {"num_tasks": {"train": 5, "eval": 0}}
    answer = await http.post(path.replace("/0/", "/1/"), json={"num_tasks": {"train": 5}})
    assert (answer.status_code, error_of(answer)["code"]) == (404, "environment_not_found")


# A real training loop


async def play_outside(loop: Loop) -> None:
    """A user's own rollout code: it looks for open groups, plays their tasks, and pushes what came of it."""
    async with application(loop.store, jobs_dir=loop.job_dir.parent) as app, http_to(app) as http:
        http.timeout = httpx.Timeout(DEADLINE_S)
        begun: set[tuple[int, int]] = set()
        while True:
            listed = await http.get(f"/v1/jobs/{loop.job}/groups?status=open&limit=100")
            for group in listed.json()["data"]:
                for member in range(group["size"]):
                    if group["split"] == "train" and (group["group"], member) not in begun:
                        begun.add((group["group"], member))
                        await play_one(loop, http, group["group"], group["task_index"], member)
            await asyncio.sleep(0.01)


async def play_one(loop: Loop, http: httpx.AsyncClient, group: int, task: int, member: int) -> None:
    history, actions, num_before = list[int](), list[int](), 0
    for turn in range(NUM_TURNS):
        said = prompt_of(task, group, member) if turn == 0 else observation_of(turn)
        history += said
        answer = await loop.client().generate(
            history, max_new_tokens=ACTIONS, temperature=1.0, stop_token_ids=[STOP_ID]
        )
        versions = [int(span.label.rpartition("/")[2]) for span in answer.spans for _ in range(span.start, span.end)]
        history += answer.output_ids
        actions += answer.output_ids
        piece = {
            "group": group,
            "member": member,
            "num_before": num_before,
            "token_ids": [*said, *answer.output_ids],
            "mask": [False] * len(said) + [True] * len(answer.output_ids),
            "logprobs": [0.0] * len(said) + answer.logprobs,
            "policy_versions": [versions[0]] * len(said) + versions,
            "reward": reward_of(actions) if turn == NUM_TURNS - 1 else None,
        }
        num_before += len(piece["token_ids"])
        # Whoever sends twice is trained once. The last piece of a group may be trained before it comes again.
        for expected in ({None}, {"duplicate", "not_open"}):
            pushed = await http.post(f"/v1/jobs/{loop.job}/trajectories", json={"trajectories": [piece]})
            (one,) = pushed.json()["data"]
            assert one["reason"] in expected, one
    loop.played[group] += 1


async def test_a_job_that_is_only_pushed_to_learns_what_a_plain_loop_learns(
    redis_client: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Bit for bit: the real trainer on the real queue, and no rollout worker anywhere."""
    monkeypatch.setattr(Loop, "play", play_outside)
    spec = loop_spec(write_model(tmp_path / "model"), steps=2)
    async with a_loop(redis_client, tmp_path / "jobs", spec, monkeypatch) as loop:
        over = asyncio.Event()
        worker = loop.worker()
        serving = asyncio.create_task(worker.run(over))
        async with asyncio.timeout(DEADLINE_S):
            while not (job := await loop.store.jobs.get(loop.job)).status.is_terminal and not serving.done():
                await asyncio.sleep(0.02)
            over.set()
            await serving
        assert (str(job.status), job.step) == ("succeeded", 2)
        counts = await loop.bus.counters(loop.job)
        assert counts["trained"] == 2 * spec.groups_per_step
        assert fingerprint(saved(loop)) == fingerprint(plain_loop(spec, tmp_path))


@given(st.data())
def test_the_shared_steps_of_many_versions_are_those_of_each(data: st.DataObject) -> None:
    table = [Version(1, 1, 0, None)]
    forks = dict[int, Position]()
    while len(table) < data.draw(st.integers(1, 25)):
        last = table[-1]
        if not data.draw(st.booleans()):
            table.append(Version(last.version + 1, last.epoch, last.step + 1, last.version))
            continue
        parent = data.draw(st.sampled_from(table))
        table.append(Version(last.version + 1, last.epoch + 1, parent.step, parent.version))
        forks[last.epoch + 1] = Position(parent.epoch, parent.step)
    newest = Position(table[-1].epoch, table[-1].step)
    assert shared_steps(table) == {
        one.version: shared_step(Position(one.epoch, one.step), newest, forks) for one in table
    }
