"""Jobs on recorded episodes over HTTP: what is asked is checked against what is there, and brought beforehand."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from gspo_core.cli import main
from gspo_core.codec import decode, encode
from gspo_core.log.batches import LoggedBatch
from gspo_core.replay.past import Past
from gspo_core.types import EpisodeKey
from services.files.batch_log import BatchLog
from services.files.job_dir import JobDir
from services.state.functions import Functions
from services.state.jobs import JobStatus
from services.state.store import Store
from services.state.talks import TalkKeyRecord, Talks, TrafficRetention
from tests.core.learner_support import write_model
from tests.core.past_kit import GROUPS, MadePast, make_past, spec_of
from tests.core.segments import episode as segments_of
from tests.services.api.api_kit import application, error_of, http_to
from tests.services.api.recorded_job import write_model as with_tokenizer

FIRST = f"{GROUPS * 2}/0"
"""An episode of the third step."""
PARTS = {"objective.advantage": {"scale": "batch_std", "part_weights": {"right": 1.0}}}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadePast:
    model = write_model(tmp_path_factory.mktemp("model"))
    shutil.copy(with_tokenizer(tmp_path_factory.mktemp("tokenizer") / "model") / "tokenizer.json", model)
    return make_past(tmp_path_factory.mktemp("jobs") / "job_made", spec_of(model), trains=False)


@pytest.fixture
async def http(store: Store, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with application(store, jobs_dir=tmp_path / "jobs") as app, http_to(app) as http:
        yield http


@pytest.fixture
async def job(http: httpx.AsyncClient, store: Store, tmp_path: Path, made: MadePast) -> str:
    """A job that took six steps, with what they left."""
    job = (await store.jobs.create(made.spec)).id
    await store.jobs.claim("trainer")
    claim_token = (await store._functions.redis.hget(f"gspo:{{{job}}}:trainer", "token") or b"").decode()
    for status in (JobStatus.RUNNING, JobStatus.SUCCEEDED):
        await store.jobs.set_status(job, status, token=claim_token)
    shutil.copytree(made.folder, tmp_path / "jobs" / job, dirs_exist_ok=True)
    return job


def recording_of(tmp_path: Path, job: str) -> list[LoggedBatch]:
    log = BatchLog(JobDir(tmp_path / "jobs" / job).recorded)
    return [log.read(*at) for at in log.steps()]


async def test_a_job_on_recorded_episodes_is_brought_them(http: httpx.AsyncClient, job: str, tmp_path: Path) -> None:
    body = {"first": 3, "last": 4, "rewards": {FIRST: 0.125}, "set": {"optimizer.lr": 1e-4}, "name": "again"}
    plan = await http.post(f"/v1/jobs/{job}/retrain?dry_run=true", json=body)
    assert plan.status_code == 200, plan.text
    assert plan.json() == {"object": "retrain.plan", "job": job, "first": 3, "last": 4, "steps": 2, "rewards": 1}
    answer = await http.post(f"/v1/jobs/{job}/retrain", json=body)
    assert answer.status_code == 201, answer.text
    found = answer.json()
    digest = found["recorded"].pop("rewards")
    assert len(digest) == 64
    assert found["recorded"] == {"job": job, "first": 3, "last": 4, "traces": False}
    assert (found["name"], found["steps"], found["status"], found["parent"]) == ("again", 2, "queued", None)
    past, batches = Past(tmp_path / "jobs" / job), recording_of(tmp_path, found["id"])
    assert [one.step for one in batches] == [1, 2]
    assert [one.extra["recorded"] for one in batches] == [[1, 3], [1, 4]]
    changed, *rest = batches[0].trajectories
    was = past.batch(3).trajectories
    assert (f"{changed.key.group}/{changed.key.member}", changed.reward) == (FIRST, 0.125)
    assert [encode(one) for one in changed.segments[:-1]] == [encode(one) for one in was[0].segments[:-1]]
    assert [one.segments for one in rest] == [one.segments for one in was[1:]]
    listed = (await http.get(f"/v1/jobs?parent={job}")).json()["data"]
    assert [one["id"] for one in listed] == [found["id"]]


async def test_a_submitted_job_names_another_jobs_episodes(
    http: httpx.AsyncClient, job: str, made: MadePast, tmp_path: Path
) -> None:
    """As many steps as there are batches, where it does not say."""
    spec = made.spec.model_dump(mode="json") | {"recorded": {"job": job, "first": 2}}
    del spec["steps"]
    plan = await http.post("/v1/jobs", json=spec, params={"dry_run": True})
    assert (plan.status_code, plan.json()["config"]["steps"]) == (200, 5)
    headers = {"Idempotency-Key": "k"}
    answers = [await http.post("/v1/jobs", json=spec, headers=headers) for _ in range(2)]
    assert {one.status_code for one in answers} == {201}, answers[0].text
    first, second = (one.json() for one in answers)
    assert first["id"] == second["id"]
    assert (first["steps"], first["recorded"]["first"], first["recorded"]["last"]) == (5, 2, 6)
    assert len(recording_of(tmp_path, first["id"])) == 5


async def test_a_repeated_request_makes_one_job(http: httpx.AsyncClient, job: str) -> None:
    headers = {"Idempotency-Key": "retrain-1"}
    answers = [await http.post(f"/v1/jobs/{job}/retrain", json={}, headers=headers) for _ in range(3)]
    assert len({one.json()["id"] for one in answers}) == 1


async def test_a_repetition_is_known_when_the_other_job_has_gone_further(
    http: httpx.AsyncClient, store: Store, job: str, tmp_path: Path
) -> None:
    """Beyond the time that answers are kept for: then the job itself is compared."""
    headers = {"Idempotency-Key": "k"}
    newest = JobDir(tmp_path / "jobs" / job).batch(Past(tmp_path / "jobs" / job).batches[6])
    later = newest.rename(tmp_path / "later")
    first = await http.post(f"/v1/jobs/{job}/retrain", json={}, headers=headers)
    later.rename(newest)
    redis = store._functions.redis
    await redis.delete(*[key async for key in redis.scan_iter("*replies*")])
    again = await http.post(f"/v1/jobs/{job}/retrain", json={}, headers=headers)
    assert (again.status_code, again.headers.get("Idempotent-Replayed")) == (201, "true"), again.text
    assert first.json()["steps"] == again.json()["steps"] == 5
    assert first.json()["id"] == again.json()["id"]


@pytest.mark.parametrize(
    "other", [{"recorded": {"first": 3}}, {"recorded": {"last": 5}}, {"recorded": None}, {"steps": 2}]
)
async def test_another_request_under_the_same_key_is_refused(
    http: httpx.AsyncClient, store: Store, job: str, made: MadePast, tmp_path: Path, other: dict[str, Any]
) -> None:
    headers, at = {"Idempotency-Key": "k"}, {"job": job, "first": 2}
    spec = made.spec.model_dump(mode="json") | {"recorded": at, "steps": 3}
    first = await http.post("/v1/jobs", json=spec, headers=headers)
    assert first.status_code == 201, first.text
    if other.get("recorded", {}) is None:  # the same steps of another job
        copy = (await store.jobs.create(made.spec)).id
        shutil.copytree(made.folder, tmp_path / "jobs" / copy, dirs_exist_ok=True)
        other = {"recorded": {"job": copy}}
    changed = spec | other | {"recorded": at | other.get("recorded", {})}
    refused = await http.post("/v1/jobs", json=changed, headers=headers)
    assert (refused.status_code, error_of(refused)["code"]) == (409, "idempotency_conflict")
    again = await http.post("/v1/jobs", json=spec, headers=headers)
    assert (again.status_code, again.headers["Idempotent-Replayed"]) == (201, "true")
    assert again.json()["id"] == first.json()["id"]


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"first": 7}, 409, "kept are the batch logs of 1-6"),
        ({"first": 5, "last": 4}, 409, "steps 5 to 4"),
        ({"set": {"steps": 7}}, 422, "7 are more than the 6 batches"),
        ({"set": {"optimizer.lrr": 1}}, 422, "optimizer.lrr is not a setting"),
        ({"rewards": {"999/0": 1.0}}, 422, "there is no episode 999/0"),
        ({"last": 2, "rewards": {FIRST: 1.0}}, 422, f"there is no episode {FIRST}"),
        ({"rewards": {"x": 1.0}}, 422, "x names no episode"),
        ({"rewards": {f"{'1' * 5000}/0": 1.0}}, 422, "names no episode"),
        ({"rewards": {FIRST: 2e15}}, 422, "less than or equal to 1000000000000000"),
        ({"traces": [{"1": -2e15}]}, 422, "greater than or equal to -1000000000000000"),
        ({"rewards": {FIRST: 1.0}, "set": PARTS}, 422, "only parts of rewards are compared"),
        ({"traces": [{"1": 1.0}], "set": PARTS}, 422, "only parts of rewards are compared"),
        ({"traces": [{"1": 1.0}], "first": 1}, 422, "stand in place of episodes"),
        ({"traces": [{"1": 1.0}]}, 422, "no conversation 1 is kept"),
        ({"set": {"evaluation.every": 2}}, 422, "plays none"),
    ],
)
async def test_what_cannot_be_is_refused_and_nothing_is_made(
    http: httpx.AsyncClient, job: str, body: dict[str, object], status: int, said: str
) -> None:
    for asked in ("retrain?dry_run=true", "retrain"):
        answer = await http.post(f"/v1/jobs/{job}/{asked}", json=body)
        assert answer.status_code == status, answer.text
        assert said in error_of(answer)["message"]
    assert len((await http.get("/v1/jobs")).json()["data"]) == 1


@pytest.mark.parametrize(
    ("recorded", "said"),
    [
        ({"rewards": "0" * 64}, "come with POST /v1/jobs/{id}/retrain"),
        ({"traces": True}, "come with POST /v1/jobs/{id}/retrain"),
        ({"job": "job_nowhere"}, "job_nowhere"),
    ],
)
async def test_a_specification_holds_no_rewards(
    http: httpx.AsyncClient, job: str, made: MadePast, recorded: dict[str, object], said: str
) -> None:
    spec = made.spec.model_dump(mode="json") | {"recorded": {"job": job} | recorded}
    for query in ({"dry_run": True}, {}):
        answer = await http.post("/v1/jobs", json=spec, params=query)
        assert answer.status_code in (404, 422), query
        assert said in error_of(answer)["message"]


async def test_a_fork_may_be_fed_with_other_rewards(
    http: httpx.AsyncClient, job: str, made: MadePast, tmp_path: Path
) -> None:
    body = {"step": 2, "same_batches": True, "rewards": {FIRST: 0.125}}
    answer = await http.post(f"/v1/jobs/{job}/fork", json=body)
    assert answer.status_code == 201, answer.text
    origin = Past(JobDir(tmp_path / "jobs" / answer.json()["id"]).origin.path)
    assert origin.batch(3).trajectories[0].reward == 0.125
    for query in ({"dry_run": True}, {}):
        weighted = await http.post(f"/v1/jobs/{job}/fork", json={**body, "set": PARTS}, params=query)
        assert "set objective.advantage.part_weights to null" in error_of(weighted)["message"], query
    refused = await http.post(f"/v1/jobs/{job}/fork", json={**body, "same_batches": False})
    assert "set same_batches" in error_of(refused)["message"]
    for absent in ({"step": 3}, {"without": [FIRST]}, {"without": [FIRST.partition("/")[0]]}, {"last": 2}):
        for query in ({"dry_run": True}, {}):
            not_there = await http.post(f"/v1/jobs/{job}/fork", json={**body, **absent}, params=query)
            assert f"there is no episode {FIRST}" in error_of(not_there)["message"], (absent, query)
    held = made.spec.model_dump(mode="json") | {"steps": 9}
    held |= {"parent": {"job": job, "step": 2, "same_batches": True, "rewards": "0" * 64}}
    for query in ({"dry_run": True}, {}):
        answer = await http.post("/v1/jobs", json=held, params=query)
        assert "come with POST /v1/jobs/{id}/fork" in error_of(answer)["message"], query


async def record_trace(store: Store, job: str, key: str, trace: int, payloads: list[bytes]) -> None:
    talks = Talks(Functions(store._functions.redis))
    await talks.record(job, key, trace, "ann", payloads, tokens=1, s=0.0, keep=TrafficRetention(1 << 20, 1e6))


async def test_conversations_of_keys_are_trained_in_the_groups_that_are_given(
    http: httpx.AsyncClient, job: str, store: Store, tmp_path: Path
) -> None:
    talker, said = "0" * 12, {}
    record = TalkKeyRecord(talker, "", "", expires_at=None, max_turns=None, max_tokens=None, max_seconds=None)
    await Talks(Functions(store._functions.redis)).make(job, record)
    for trace in (11, 12, 13):
        key = EpisodeKey(job, trace, 0)
        *pieces, last = segments_of(key, [4, 8])
        said[trace] = [*pieces, replace(last, outcome=None)]
        await record_trace(store, job, talker, trace, [encode(one) for one in said[trace]])
    body = {"traces": [{"11": 1.0, "13": 0.0}, {"12": 0.5}], "set": {"groups_per_step": 1}}
    answer = await http.post(f"/v1/jobs/{job}/retrain", json=body)
    assert answer.status_code == 201, answer.text
    assert (answer.json()["steps"], answer.json()["recorded"]["traces"]) == (2, True)
    first, second = recording_of(tmp_path, answer.json()["id"])
    assert [one.reward for one in first.trajectories] == [1.0, 0.0]
    assert [one.reward for one in second.trajectories] == [0.5]
    kept = [decode(encode(replace(one, key=said[11][0].key))) for one in first.trajectories[0].segments[:-1]]
    assert kept == said[11]
    assert first.extra["staleness"] == {"0": 0, "1": 0, "2": 0}
    redacted = json.dumps({"kind": "redacted", "turn": 0}).encode()
    await record_trace(store, job, talker, 14, [redacted])
    refused = await http.post(f"/v1/jobs/{job}/retrain", json={"traces": [{"14": 1.0}]})
    assert "was redacted" in error_of(refused)["message"]


def test_the_command_line_reads_rewards_and_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rewards.json"
    file.write_text('{"1/0": "high"}')
    assert main(["retrain", "job", "--rewards", str(file)]) == 1
    assert "GROUP/MEMBER" in capsys.readouterr().err
    assert main(["retrain", "job", "--traces", str(file)]) == 1
    assert "a list of groups" in capsys.readouterr().err
    assert main(["fork", "job", "--rewards", str(tmp_path / "none.json")]) == 1
    assert "none.json" in capsys.readouterr().err


async def test_it_goes_on_no_further_than_its_episodes(http: httpx.AsyncClient, job: str, store: Store) -> None:
    made = (await http.post(f"/v1/jobs/{job}/retrain", json={"last": 2})).json()["id"]
    await store.jobs.set_desired_state(made, "cancelled")
    answer = await http.post(f"/v1/jobs/{made}/resume?steps=3")
    assert answer.status_code == 422, answer.text
    assert "3 are more than the 2 batches that are recorded" in error_of(answer)["message"]
