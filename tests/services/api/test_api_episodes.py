"""Groups, episodes and what else a job leaves behind, over HTTP, of a job that the real parts recorded."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from gspo_core.chat import load_codec, load_tokenizer
from gspo_core.codec import decode, encode
from gspo_core.env import load_environment
from gspo_core.log.transcript import token_texts
from gspo_core.position import Position
from gspo_core.spec import JobSpec
from gspo_core.types import EpisodeKey, Group, Segment, Split, Trajectory
from services.api.routes.episodes import DetailQuery, follow_episode, get_episode
from services.api.routes.telemetry import SHOWN
from services.files.batch_log import BatchLog, LoggedBatch
from services.files.checkpoints import CheckpointStore
from services.files.job_dir import JobDir
from services.state.fleet_records import WorkerRecord
from services.state.jobs import JobStatus
from services.state.queue import Append, Bus, GroupView
from services.state.store import Store
from tests.patience import HANG_S
from tests.services.api.api_kit import application, error_of, http_to, parse_frames
from tests.services.api.recorded_job import GROUP_SIZE, REF, Player, RecordedJob, record_job, replies_of, write_model

DEPLOY = Path(__file__).parents[3] / "deploy"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
async def job(store: Store, bus: Bus, tmp_path: Path, model_dir: Path) -> RecordedJob:
    return await record_job(store, bus, tmp_path, model_dir)


@pytest.fixture
async def http(store: Store, tmp_path: Path, job: RecordedJob) -> AsyncIterator[httpx.AsyncClient]:
    async with application(store, jobs_dir=tmp_path) as app, http_to(app) as http:
        yield http


async def data(http: httpx.AsyncClient, path: str) -> list[dict[str, Any]]:
    answer = await http.get(path)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["data"]
    return found


async def test_trained_groups_come_newest_step_first_page_by_page(http: httpx.AsyncClient, job: RecordedJob):
    seen: list[dict[str, Any]] = []
    after = ""
    while True:
        answer = (await http.get(f"/v1/jobs/{job.id}/groups?limit=5{after}")).json()
        seen += answer["data"]
        if not answer["has_more"]:
            break
        after = f"&after={answer['last_id']}"
    assert [(one["step"], one["group"]) for one in seen] == [
        (step, 2 * (step - 1) + place) for step in range(6, 0, -1) for place in (0, 1)
    ]
    assert all(len(one["episodes"]) == one["size"] == GROUP_SIZE for one in seen)
    assert await data(http, f"/v1/jobs/{job.id}/groups?step=3") == seen[6:8]
    refused = await http.get(f"/v1/jobs/{job.id}/groups?after=nothing")
    assert error_of(refused)["code"] == "invalid_cursor"


async def test_open_groups_are_of_no_step(http: httpx.AsyncClient, job: RecordedJob):
    refused = await http.get(f"/v1/jobs/{job.id}/groups?status=open&step=3")
    assert (refused.status_code, error_of(refused)["param"]) == (422, "step")


async def test_a_tokenizer_that_cannot_be_read_hides_no_episode(
    store: Store, bus: Bus, tmp_path: Path, model_dir: Path
):
    model = shutil.copytree(model_dir, tmp_path / "model")
    job = await record_job(store, bus, tmp_path / "jobs", model, num_steps=1)
    async with application(store, jobs_dir=tmp_path / "jobs") as app, http_to(app) as http:
        for content in ("", "{}", "[1]", '{"version": "1.0"}'):
            (model / "tokenizer.json").write_text(content)
            shown = await http.get(f"/v1/episodes/{job.id}/0/0")
            assert shown.status_code == 200, shown.text
            assert "only token ids are" in shown.json()["note"]


async def test_a_group_shows_rewards_advantages_and_versions_side_by_side(http: httpx.AsyncClient, job: RecordedJob):
    group = (await http.get(f"/v1/groups/{job.id}/4")).json()
    assert (group["status"], group["step"], group["id"]) == ("trained", 3, f"{job.id}/4")
    rewards = [one["reward"] for one in group["episodes"]]
    assert group["reward_mean"] == sum(rewards) / 4
    for one in group["episodes"]:
        better = one["reward"] - group["reward_mean"]
        assert (one["advantage"] > 0) == (better > 0)
        assert (one["advantage"] < 0) == (better < 0)
    assert {tuple(one["versions"]) for one in group["episodes"]} >= {(2, 3), (2,)}


async def test_an_episode_is_read_turn_by_turn_from_its_tokens(http: httpx.AsyncClient, job: RecordedJob):
    episode = (await http.get(f"/v1/episodes/{job.id}/4/2?include=tokens")).json()
    broken, call, answer = episode["turns"]
    assert [one["role"] for one in broken["messages"]] == ["system", "user"]
    assert "calculate" in broken["messages"][0]["text"]
    assert broken["calls"][0]["status"] == "invalid_json"
    assert (call["calls"][0]["name"], call["calls"][0]["status"]) == ("calculate", "ok")
    assert call["messages"][0]["role"] == "tool"
    assert "invalid_json" in call["messages"][0]["text"]
    assert answer["messages"] == [{"role": "tool", "text": str(eval(call["calls"][0]["arguments"]["expression"]))}]
    assert answer["complete"]
    assert (broken["versions"], call["versions"]) == ([2], [3])
    tokens = episode["tokens"]
    assert {len(column) for column in tokens.values()} == {episode["num_tokens"]}
    said = [
        text
        for text, is_sampled, turn in zip(tokens["text"], tokens["sampled"], tokens["turn"], strict=True)
        if is_sampled and turn == 2
    ]
    assert "".join(said).startswith(answer["text"])
    assert all(logprob == 0 for logprob, mask in zip(tokens["logprob"], tokens["sampled"], strict=True) if not mask)
    assert sum(tokens["sampled"]) == episode["num_actions"]
    ratios = list(zip(tokens["ratio"], tokens["sampled"], tokens["turn"], strict=True))
    assert all(ratio == pytest.approx(2.0 if turn else 0.5) for ratio, is_sampled, turn in ratios if is_sampled)
    assert all(ratio is None for ratio, is_sampled, _ in ratios if not is_sampled)
    assert broken["logprob_mean"] == pytest.approx(
        sum(tokens["logprob"][: broken["end_token"]]) / broken["num_actions"], abs=1e-4
    )


async def test_a_call_of_an_agents_is_of_no_unknown_tool(store: Store, bus: Bus, tmp_path: Path, model_dir: Path):
    """It names its tools in each request, and no record of its job has them."""
    agents = await record_job(store, bus, tmp_path, model_dir, num_steps=2, is_agents=True)
    async with application(store, jobs_dir=tmp_path) as app, http_to(app) as http:
        for group in (0, agents.open_group):
            episode = (await http.get(f"/v1/episodes/{agents.id}/{group}/0")).json()
            assert [call["status"] for turn in episode["turns"] for call in turn["calls"]] == ["ok"]


async def test_each_turn_says_where_its_time_went(http: httpx.AsyncClient, job: RecordedJob):
    episode = (await http.get(f"/v1/episodes/{job.id}/4/2")).json()
    first, second, _ = [turn["timings"] for turn in episode["turns"]]
    assert first == {"engine_s": 0.5, "env_s": 0.0, "queue_s": 0.375}
    assert second == {"engine_s": 0.75, "env_s": 0.75, "queue_s": 0.0}
    assert episode["closing"] == {"engine_s": 0.0, "env_s": 0.125, "queue_s": 0.0}
    parts = [turn["timings"] for turn in episode["turns"]] + [episode["closing"]]
    for name in ("engine_s", "env_s", "queue_s"):
        assert sum(part[name] for part in parts) == episode["timings"][name]
    open_one = (await http.get(f"/v1/episodes/{job.id}/{job.open_group}/1")).json()
    assert open_one["turns"][0]["timings"] == {"engine_s": 0.5, "env_s": 0.0, "queue_s": 0.375}
    assert open_one["closing"] is None


async def test_without_asking_for_tokens_there_are_none(http: httpx.AsyncClient, job: RecordedJob):
    assert (await http.get(f"/v1/episodes/{job.id}/0/0")).json()["tokens"] is None


async def test_open_groups_and_their_episodes_are_seen_while_they_run(http: httpx.AsyncClient, job: RecordedJob):
    (group,) = await data(http, f"/v1/jobs/{job.id}/groups?status=open")
    assert (group["group"], group["status"]) == (job.open_group, "open")
    assert [one["status"] for one in group["episodes"]] == ["done", "running", "queued", "queued"]
    assert group["episodes"][1]["worker"] == "rollout-0"
    shown = (await http.get(f"/v1/groups/{job.id}/{job.open_group}")).json()
    assert shown["episodes"][0]["reward"] == shown["reward_mean"] == 1.0
    running = (await http.get(f"/v1/episodes/{job.id}/{job.open_group}/1")).json()
    assert [turn["calls"][0]["name"] for turn in running["turns"]] == ["calculate"]
    assert running["stop_reason"] is None
    assert running["timings"] == {"engine_s": 1.25, "env_s": 0.5, "queue_s": 0.0, "store_s": 0.125}
    assert group["episodes"][1]["timings"] == running["timings"]
    queued = (await http.get(f"/v1/episodes/{job.id}/{job.open_group}/3")).json()
    assert (queued["status"], queued["turns"]) == ("queued", [])


async def test_a_group_moves_from_the_queue_to_the_batch_log_under_one_address(
    http: httpx.AsyncClient, job: RecordedJob, bus: Bus
):
    address = f"/v1/groups/{job.id}/{job.open_group}"
    assert (await http.get(address)).json()["status"] == "open"
    await bus.commit(job.id, job.claim.token, 7, [job.open_group], reason="dropped_stale")
    gone = await http.get(address)
    assert (gone.status_code, error_of(gone)["code"]) == (404, "group_not_found")


async def test_episodes_are_found_by_reward_stop_reason_and_version(http: httpx.AsyncClient, job: RecordedJob):
    base = f"/v1/jobs/{job.id}/episodes?limit=100"
    everyone = await data(http, base)
    assert len(everyone) == 48
    losers = await data(http, f"{base}&max_reward=0.5")
    assert losers == [one for one in everyone if one["reward"] <= 0.5]
    assert 0 < len(losers) < 48
    assert await data(http, f"{base}&min_reward=1") == [one for one in everyone if one["reward"] >= 1]
    assert await data(http, f"{base}&version=3") == [one for one in everyone if 3 in one["versions"]]
    assert await data(http, f"{base}&stop_reason=cancelled") == []


async def test_what_a_dead_epoch_logged_beyond_its_fork_is_not_shown(
    http: httpx.AsyncClient, job: RecordedJob, tmp_path: Path
):
    log = BatchLog(JobDir(tmp_path / job.id))
    groups = log.read(job.claim.epoch, 6).groups
    log.write(job.claim.epoch - 1, 9, groups, {})
    log.write(job.claim.epoch - 1, 5, groups, {})
    unknown = await http.get(f"/v1/jobs/{job.id}/groups?step=5")
    assert (unknown.status_code, error_of(unknown)["code"]) == (404, "batch_log_damaged")
    CheckpointStore(JobDir(tmp_path / job.id)).begin_epoch(job.claim.epoch, Position(job.claim.epoch - 1, 0))
    steps = [one["step"] for one in await data(http, f"/v1/jobs/{job.id}/groups?limit=100")]
    assert steps == [6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1]
    assert {one["epoch"] for one in await data(http, f"/v1/jobs/{job.id}/groups?step=5")} == {job.claim.epoch}


async def test_a_damaged_log_is_told_as_such(http: httpx.AsyncClient, job: RecordedJob, tmp_path: Path):
    path = BatchLog(JobDir(tmp_path / job.id)).path(job.claim.epoch, 6)
    content = bytearray(path.read_bytes())
    content[-40] ^= 1
    path.write_bytes(content)
    answer = await http.get(f"/v1/jobs/{job.id}/groups?step=6")
    assert (answer.status_code, error_of(answer)["code"]) == (404, "batch_log_damaged")


async def test_a_damaged_log_hides_no_other(http: httpx.AsyncClient, job: RecordedJob, tmp_path: Path):
    path = BatchLog(JobDir(tmp_path / job.id)).path(job.claim.epoch, 4)
    path.write_bytes(path.read_bytes()[:-40])
    assert [one["step"] for one in await data(http, f"/v1/jobs/{job.id}/groups?limit=100")] == [
        *(6, 6, 5, 5, 3, 3, 2, 2, 1, 1),
    ]
    assert len(await data(http, f"/v1/jobs/{job.id}/episodes?limit=100")) == 5 * 2 * GROUP_SIZE


async def test_a_log_that_is_removed_while_it_is_read_breaks_nothing(
    http: httpx.AsyncClient, job: RecordedJob, monkeypatch: pytest.MonkeyPatch
):
    read = BatchLog.read

    def read_and_lose(self: BatchLog, epoch: int, step: int) -> LoggedBatch:
        found = read(self, epoch, step)
        self.path(epoch, step).unlink()
        return found

    monkeypatch.setattr(BatchLog, "read", read_and_lose)
    assert len(await data(http, f"/v1/jobs/{job.id}/groups?limit=100")) == 12


@pytest.mark.parametrize("name", ["min_reward", "max_reward"])
@pytest.mark.parametrize("value", ["nan", "inf", "-Infinity"])
async def test_only_finite_rewards_are_searched_for(http: httpx.AsyncClient, job: RecordedJob, name: str, value: str):
    answer = await http.get(f"/v1/jobs/{job.id}/episodes?{name}={value}")
    assert (answer.status_code, error_of(answer)["param"]) == (422, name)


async def test_without_the_files_of_its_model_an_episode_is_shown_as_ids(
    store: Store, bus: Bus, tmp_path: Path, model_dir: Path
):
    away = tmp_path / "away"
    away.symlink_to(model_dir)
    job = await record_job(store, bus, tmp_path / "jobs", away, num_steps=1)
    away.unlink()
    async with application(store, jobs_dir=tmp_path / "jobs") as app, http_to(app) as http:
        episode = (await http.get(f"/v1/episodes/{job.id}/0/0?include=tokens")).json()
    assert "token ids" in episode["note"]
    assert episode["tokens"]["text"] == []
    assert len(episode["tokens"]["id"]) == episode["num_tokens"]
    assert episode["turns"][0]["text"] is None


@pytest.mark.parametrize("path", ["groups/{}/999", "episodes/{}/999/0", "episodes/{}/0/9", "groups/job_x/0"])
async def test_what_is_not_there_is_not_found(http: httpx.AsyncClient, job: RecordedJob, path: str):
    assert (await http.get("/v1/" + path.format(job.id))).status_code == 404


async def test_versions_and_environments_of_a_job(http: httpx.AsyncClient, job: RecordedJob):
    versions = await data(http, f"/v1/jobs/{job.id}/versions")
    assert [one["version"] for one in versions] == [6, 5, 4, 3, 2, 1, 0]
    assert (versions[0]["parent"], versions[-1]["parent"], versions[0]["step"]) == (5, None, 6)
    assert versions[0]["id"] == f"{job.id}/{job.claim.epoch}/6"
    page = (await http.get(f"/v1/jobs/{job.id}/versions?limit=2&after={versions[1]['id']}")).json()
    assert [one["version"] for one in page["data"]] == [4, 3]
    assert page["has_more"]
    (environment,) = await data(http, f"/v1/jobs/{job.id}/environments")
    assert environment["description"]["num_tasks"]["train"] == 2000
    assert await data(http, f"/v1/jobs/{job.id}/checkpoints") == []


async def test_metrics_as_csv_and_put_together_for_a_picture(http: httpx.AsyncClient, job: RecordedJob):
    path = f"/v1/jobs/{job.id}/metrics?names=reward/mean,staleness/mean"
    rows = await data(http, path)
    text = (await http.get(path, headers={"Accept": "text/csv"})).text.splitlines()
    assert text[0] == "step,reward/mean,staleness/mean"
    assert [float(line.split(",")[1]) for line in text[1:]] == [row["reward/mean"] for row in rows]
    points = await data(http, path + "&max_points=3")
    assert [(one["step"], one["count"]) for one in points] == [(2, 2), (5, 3), (6, 1)]
    pair = [row["reward/mean"] for row in rows[:2]]
    assert points[0]["reward/mean"] == sum(pair) / 2
    assert (points[0]["low"]["reward/mean"], points[0]["high"]["reward/mean"]) == (min(pair), max(pair))


async def test_the_newest_of_the_points_for_a_picture_is_the_newest_step_itself(
    http: httpx.AsyncClient, job: RecordedJob
):
    path = f"/v1/jobs/{job.id}/metrics?names=reward/mean,staleness/mean"
    rows = await data(http, path)
    for most in range(2, len(rows) + 2):
        points = await data(http, f"{path}&max_points={most}")
        assert len(points) == min(most, len(rows))
        assert sum(one["count"] for one in points) == len(rows)
        assert points[-1] | rows[-1] == points[-1]
    (whole,) = await data(http, f"{path}&max_points=1")
    assert (whole["step"], whole["count"]) == (6, 6)


async def test_events_of_some_types(http: httpx.AsyncClient, job: RecordedJob):
    found = await data(http, f"/v1/jobs/{job.id}/events?types=alert,evaluation&limit=1000")
    assert [one["type"] for one in found] == ["evaluation", "alert"]


async def test_prometheus_is_told_what_is_there(http: httpx.AsyncClient, store: Store, job: RecordedJob):
    text = (await http.get("/metrics")).text
    assert 'gspo_jobs{status="running"} 1.0' in text
    assert f'gspo_job_step{{job_id="{job.id}"}} 6.0' in text
    assert f'gspo_job_groups{{fate="in_flight",job_id="{job.id}"}} 1.0' in text
    assert f'gspo_job_staleness_mean{{job_id="{job.id}"}} 1.7' in text
    wanted = JobSpec.model_validate_json((await store.jobs.get(job.id)).spec).groups_per_step
    assert f'gspo_ready_groups_deficit{{job_id="{job.id}"}} {wanted}.0' in text  # none is ready
    # The trainer waited half a second, and episodes spent half of their time in engines.
    assert f'gspo_engine_seconds_short{{job_id="{job.id}"}} 0.25' in text
    assert "calculator" not in text


async def test_engines_are_short_of_nothing_where_no_step_tells_of_its_episodes(
    http: httpx.AsyncClient, store: Store, job: RecordedJob
):
    await store.metrics.add(job.id, 7, {"reward/mean": 0.5, "time/wait_s": 3.0})
    await store.jobs.update_progress(job.id, job.claim.token, 7, 7)
    text = (await http.get("/metrics")).text
    assert "gspo_job_step" in text
    assert "gspo_engine_seconds_short{" not in text


async def test_prometheus_is_told_what_workers_do_and_where_time_goes(http: httpx.AsyncClient, store: Store):
    counters = {"episodes/finished": 7, "time/engine_s": 12.5, "time/env_s": 0.25}
    await store.fleet.register_worker(WorkerRecord(id="rollout-secret-host-1", num_episodes=3, counters=counters))
    text = (await http.get("/metrics")).text
    (worker,) = set(re.findall(r'gspo_rollout_episodes{worker="(\w+)"} 3.0', text))
    assert f'gspo_rollout_total{{kind="episodes/finished",worker="{worker}"}} 7.0' in text
    assert f'gspo_rollout_seconds_total{{where="engine",worker="{worker}"}} 12.5' in text
    assert "secret-host" not in text


async def test_prometheus_is_told_who_plays_and_what_gateways_hold(http: httpx.AsyncClient, store: Store):
    await store.jobs.create(json.dumps({"environments": [{"ref": "a.py:run", "agent": {}}]}))
    claim = await store.jobs.claim("trainer")
    assert claim is not None
    await store.jobs.set_status(claim.job_id, JobStatus.RUNNING, token=claim.token)
    counters = {"turns/asked": 9, "turns/repeated": 2, "answers/delivered": 3, "answers/undelivered": 1}
    await store.fleet.register_worker(WorkerRecord(id="gateway-1", kind="gateway", counters=counters))
    text = (await http.get("/metrics")).text
    assert 'gspo_jobs_under_way{player="gateway"} 1.0' in text
    assert 'gspo_jobs_under_way{player="rollout"} 1.0' in text
    assert re.search(r'gspo_gateway_open_requests{worker="\w+"} 7.0', text)


async def test_alarms_and_graphs_ask_for_labels_that_are_there(http: httpx.AsyncClient, store: Store, job: RecordedJob):
    """And none of ours is one that Prometheus writes itself: it would move ours away, and all jobs be one."""
    await store.fleet.register_worker(
        WorkerRecord(id="w-1", num_episodes=3, counters={"time/env_s": 0.25, "episodes/finished": 1})
    )
    await store.fleet.register_worker(WorkerRecord(id="g-1", kind="gateway"))
    await data(http, "/v1/jobs")
    families = text_string_to_metric_families((await http.get("/metrics")).text)
    exported = {sample.name: set(sample.labels) for family in families for sample in family.samples}
    exported |= {f"gspo_job_{name.replace('/', '_')}": {"job_id"} for name in SHOWN}
    ours = {name: labels for name, labels in exported.items() if name.startswith("gspo_")}
    assert not [name for name, labels in ours.items() if labels & {"job", "instance"}]
    board = json.loads((DEPLOY / "grafana" / "dashboards" / "gspo.json").read_text())
    rules = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"][0]["rules"]
    asked = [rule["expr"] + str(rule["annotations"]) for rule in rules if "gspo_" in rule["expr"]]
    asked += [one["expr"] + one["legendFormat"] for panel in board["panels"] for one in panel["targets"]]
    asked += [one["query"]["query"] for one in board["templating"]["list"]]
    assert len(asked) >= 25
    for text in asked:
        names = set(re.findall(r"gspo_\w+", text))
        assert names <= ours.keys(), text
        labels = set().union(*(ours[name] for name in names))
        for pattern in (
            r"(\w+) ?(?:=~|!=|!~|=)\"",
            r"\{\{ ?\$labels\.(\w+)",
            r"\{\{(\w+)\}\}",
            r"label_values\(\w+, (\w+)",
        ):
            assert set(re.findall(pattern, text)) <= labels, text
        for group in re.findall(r"by \(([^)]*)\)", text):
            assert set(group.split(", ")) <= labels, text


async def test_capabilities_name_what_is_not_there_yet(http: httpx.AsyncClient):
    shown = (await http.get("/v1/capabilities")).json()
    assert "gspo" in shown["objectives"]
    assert shown["features"].pop("environment_upload") is False
    assert all(shown["features"].values())


def test_the_texts_of_tokens_join_to_the_whole_text(model_dir: Path):
    tokenizer = load_tokenizer(model_dir)
    text = "It is 42 — naïve 日本 🙂."
    ids = tokenizer.encode(text)
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids) > 12
    assert "".join(texts) == text


# Export


async def test_an_export_holds_every_trained_episode_once_as_it_is_shown(http: httpx.AsyncClient, job: RecordedJob):
    answer = await http.get(f"/v1/jobs/{job.id}/episodes.jsonl")
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.split("\n")[:-1]]
    assert len(lines) == len({one["id"] for one in lines}) == 6 * 2 * GROUP_SIZE
    assert [one["step"] for one in lines] == sorted(one["step"] for one in lines)
    shown = (await http.get(f"/v1/episodes/{lines[17]['id']}")).json()
    assert lines[17] == shown
    assert shown["tokens"] is None
    some = (await http.get(f"/v1/jobs/{job.id}/episodes.jsonl?from_step=3&to_step=4&include=tokens")).text.splitlines()
    assert {json.loads(line)["step"] for line in some} == {3, 4}
    tokens = json.loads(some[0])["tokens"]
    assert len(tokens["logprob"]) == len(tokens["version"]) == len(tokens["id"]) > 0


@pytest.mark.parametrize("path", ["groups/{}/{}", "episodes/{}/{}/0", "episodes/{}/{}/0/events"])
async def test_an_episode_that_is_trained_while_it_is_read_has_its_turns_and_its_reward(
    store: Store, bus: Bus, job: RecordedJob, tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
):
    """The trainer commits its group between the two reads of a look."""
    segments = tuple(map(decode, await bus.read_episode(EpisodeKey(job.id, job.open_group, 0))))
    group = Group(job.id, job.open_group, Split.TRAIN, 0, GROUP_SIZE, (Trajectory(segments),))
    async with application(store, jobs_dir=tmp_path) as app, http_to(app) as http:
        looking = app.state.context.bus
        see = looking.groups

        async def see_and_commit(*args: Any, **options: Any) -> list[GroupView]:
            found: list[GroupView] = await see(*args, **options)
            if found:
                BatchLog(JobDir(tmp_path / job.id)).write(job.claim.epoch, job.num_steps + 1, [group], {})
                await bus.commit(job.id, job.claim.token, job.num_steps + 1, [job.open_group])
            return found

        monkeypatch.setattr(looking, "groups", see_and_commit)
        shown = (await http.get("/v1/" + path.format(job.id, job.open_group))).json()
    if "events" in path:
        *turns, outcome = shown["data"]
        found = (outcome["data"]["status"], outcome["data"]["reward"], len(turns))
    else:
        episode = shown["episodes"][0] if "episodes" in shown else shown
        found = (episode["status"], episode["reward"], episode["num_turns"])
    assert found == ("trained", Trajectory(segments).reward, 2)


# Live


def blocks(text: str) -> list[dict[str, str]]:
    return [one for one in parse_frames(text.split("\n")) if "event" in one]


async def test_a_trained_episode_is_told_to_its_end_from_any_position(http: httpx.AsyncClient, job: RecordedJob):
    url, headers = f"/v1/episodes/{job.id}/2/2/events", {"Accept": "text/event-stream"}
    whole = blocks((await http.get(url, headers=headers)).text)
    shown = (await http.get(f"/v1/episodes/{job.id}/2/2")).json()
    assert [json.loads(one["data"]) for one in whole if one["event"] == "turn"] == shown["turns"]
    assert [one["event"] for one in whole[-2:]] == ["outcome", "end"]
    assert json.loads(whole[-2]["data"])["reward"] == shown["reward"]
    for number, one in enumerate(whole[:-2]):
        rest = blocks((await http.get(url, headers=headers | {"Last-Event-ID": one["id"]})).text)
        assert rest == whole[number + 1 :]
    listed = (await http.get(url)).json()["data"]
    assert [one["type"] for one in listed] == [one["event"] for one in whole[:-1]]
    refused = await http.get(url, headers=headers | {"Last-Event-ID": "x"})
    assert error_of(refused)["code"] == "invalid_cursor"


async def test_an_episode_is_followed_while_it_is_played_and_when_it_starts_again(
    store: Store, bus: Bus, job: RecordedJob, tmp_path: Path, model_dir: Path
):
    """Segment after segment is appended by a worker; each is seen before the next one is there."""
    group = job.open_group + 1
    await bus.dispatch(job.id, job.claim.token, group, size=1, split=Split.TRAIN, task_index=0)
    token = await bus.join("rollout-1")
    held = [lease for lease in await bus.lease(job.id, "rollout-1", token, 10) if lease.key.group == group]
    player = Player(load_codec(model_dir), load_environment(REF))
    replies = replies_of(await player.expression(0), 2, 1.0, random.Random(0))
    segments = await player.play(held[0].key, 0, replies, [6] * len(replies))
    key = held[0].key

    async def append(segment: Segment, attempt: int = 0) -> None:
        sent = dataclasses.replace(segment, attempt=attempt)
        await bus.append(job.id, token, [Append(key, attempt, sent.index, encode(sent), sent.is_final, sent.version)])

    async with application(store, jobs_dir=tmp_path) as app:
        context = app.state.context
        request = {"job": job.id, "group": group, "member": 0, "context": context, "accept": "text/event-stream"}
        answer = await follow_episode(**request, last_event_id=None)
        stream = answer.body_iterator
        seen: list[dict[str, str]] = []

        async def until(kind: str, count: int) -> None:
            async with asyncio.timeout(HANG_S):
                while sum(one["event"] == kind for one in seen) < count:
                    seen.extend(blocks((await anext(stream)).decode()))

        await append(segments[0])
        await until("turn", 1)
        await bus.restart(key, token, 1)
        await until("attempt", 1)
        for number, segment in enumerate(segments[:-1]):
            await append(segment, attempt=1)
            await until("turn", 2 + number)
        await append(segments[-1], attempt=1)
        await until("end", 1)
        shown = (await get_episode(job.id, group, 0, DetailQuery(), context)).turns
        cut = await follow_episode(**request, last_event_id=seen[0]["id"])
        rest = [one async for part in cut.body_iterator for one in blocks(part.decode())]
    assert [one["event"] for one in seen] == ["turn", "attempt", *["turn"] * len(replies), "outcome", "end"]
    assert [json.loads(one["data"]) for one in seen[2:-2]] == json.loads(json.dumps(shown))
    assert rest == seen[1:]


async def test_branches_that_grow_at_the_same_time_are_told_as_they_arrive(
    store: Store, bus: Bus, job: RecordedJob, tmp_path: Path, model_dir: Path
):
    group = job.open_group + 1
    await bus.dispatch(job.id, job.claim.token, group, size=1, split=Split.TRAIN, task_index=0)
    token = await bus.join("rollout-1")
    (key,) = [lease.key for lease in await bus.lease(job.id, "rollout-1", token, 10) if lease.key.group == group]
    player = Player(load_codec(model_dir), load_environment(REF))
    first, *_ = await player.play(key, 0, ["1"], [6])
    places = [(0, 0), (1, 1), (0, 2), (1, 1), (0, 3)]
    grown = [dataclasses.replace(first, index=n, branch=b, turn=t) for n, (b, t) in enumerate(places)]
    seen: list[dict[str, str]] = []
    async with application(store, jobs_dir=tmp_path) as app:
        context = app.state.context
        request = {"job": job.id, "group": group, "member": 0, "context": context, "accept": "text/event-stream"}
        stream = (await follow_episode(**request, last_event_id=None)).body_iterator
        for number, one in enumerate(grown, 1):
            await bus.append(job.id, token, [Append(key, 0, one.index, encode(one), one.is_final, one.version)])
            async with asyncio.timeout(HANG_S):
                while len(seen) < number:
                    seen.extend(blocks((await anext(stream)).decode()))
        for place in range(len(seen)):
            cut = (await follow_episode(**request, last_event_id=seen[place]["id"])).body_iterator
            rest: list[dict[str, str]] = []
            # The second turn has grown since it was told first: it comes once, where it is now.
            expected = [one["id"] for number, one in enumerate(seen) if number > place and number != 1]
            async with asyncio.timeout(HANG_S):
                while len(rest) < len(expected):
                    rest.extend(blocks((await anext(cut)).decode()))
            assert [one["id"] for one in rest] == expected
    assert [one["event"] for one in seen] == ["turn"] * len(places)
    assert [json.loads(one["data"])["turn"] for one in seen] == [turn for _, turn in places]
    assert [one["id"] for one in seen] == [f"0-{first.num_tokens * number}" for number in range(1, len(places) + 1)]
