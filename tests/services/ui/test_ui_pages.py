"""Every page in a real browser, against a real API with a job that the real parts recorded."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from benchmarks.model_shapes import QWEN3
from gspo_core.chat import load_codec
from gspo_core.codec import encode
from gspo_core.env import load_environment
from gspo_core.types import EpisodeKey
from services.process.ports import free_port
from services.state.fleet_records import EngineRecord, TrainerRecord, WorkerRecord
from services.state.queue import Append, Bus
from services.state.server import RedisServer
from services.state.store import StatusReason, Store
from tests.services.api.api_kit import ApiProcess
from tests.services.api.recorded_job import REF, Player, RecordedJob, record_job, write_model
from tests.services.ui.browser_kit import DEADLINE_MS, MISSING, Visit, visiting

pytestmark = [pytest.mark.browser, pytest.mark.skipif(bool(MISSING), reason=MISSING)]

PAGES = (
    *("#/jobs", "#/jobs/{job}", "#/jobs/{job}/groups", "#/jobs/{job}/groups?status=open", "#/jobs/{job}/versions"),
    *("#/jobs/{job}/events", "#/jobs/{job}/config", "#/groups/{job}/4", "#/groups/{job}/12", "#/episodes/{job}/4/2"),
    *("#/episodes/{job}/12/1", "#/episodes/{job}/12/3", "#/environments", "#/workers", "#/api"),
)


@pytest.fixture(scope="module")
def api(redis_server: RedisServer) -> Iterator[ApiProcess]:
    with ApiProcess(redis_server.url) as api:
        yield api


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
async def job(api: ApiProcess, store: Store, bus: Bus, model_dir: Path) -> RecordedJob:
    api.forget_jobs()
    await store.fleet.register_worker(
        WorkerRecord(id="rollout-0", jobs=(), num_episodes=2, max_episodes=64, counters={})
    )
    await store.fleet.register_engine(EngineRecord(id="http://127.0.0.1:30000", url="http://127.0.0.1:30000"))
    return await record_job(store, bus, api.jobs_dir, model_dir)


@pytest.fixture
async def visit(api: ApiProcess) -> AsyncIterator[Visit]:
    async with visiting(api.url) as visit:
        yield visit
        assert visit.complaints == []


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
async def test_every_page_is_quiet_complete_and_as_wide_as_the_screen(
    api: ApiProcess, job: RecordedJob, width: int, scheme: str
):
    async with visiting(api.url, width=width, scheme=scheme) as visit:
        for place in PAGES:
            await visit.open(place.format(job=job.id))
            await visit.page.wait_for_timeout(250)
            assert visit.complaints == [], place
            assert await visit.page.evaluate("document.documentElement.scrollWidth") <= width, place
            assert await visit.page.evaluate("document.documentElement.dataset.theme") == scheme
            assert "undefined" not in await visit.text("main")
            assert "NaN" not in await visit.text("main")


async def test_the_list_leads_to_a_job_with_its_curves_and_alarms(visit: Visit, job: RecordedJob):
    await visit.open("")
    await (await visit.see("tbody tr.link", "calculator")).click()
    assert job.id in visit.page.url
    await visit.see('[data-chart="Reward"] canvas')
    assert await visit.page.locator("[data-chart] canvas").count() >= 5
    assert "41 % of the tokens" in await visit.text("[data-alarm]")
    assert "lower optimizer.lr" in await visit.text("[data-alarm] .advice")
    assert "0.75" in await visit.text('[data-tile="Held-out reward"]')


async def test_a_new_step_arrives_on_the_page_that_is_open(visit: Visit, job: RecordedJob, store: Store):
    await visit.open(f"#/jobs/{job.id}")
    await visit.see('[data-chart="Reward"] canvas')
    metrics = {"reward/mean": 0.9375, "reward/std": 0.1, "staleness/mean": 1.0, "time/step_s": 2.0}
    await store.metrics.add(job.id, 7, metrics)
    await store.jobs.update_progress(job.id, job.claim.token, 7, 6)
    await store.events.add(job.id, "step", {"step": 7, "version": 6, "epoch": 1, **metrics})
    await visit.see('[data-tile="reward"]', "0.94")
    await visit.see("main", "step 7 of 40")
    await store.events.add(job.id, "alert", {"step": 7, "kind": "new", "message": "something new is wrong"})
    await visit.see("[data-alarm]", "something new is wrong")


async def test_newer_words_of_a_wait_are_shown_although_they_are_no_event(visit: Visit, job: RecordedJob, store: Store):
    await visit.open(f"#/jobs/{job.id}")
    await visit.see('[data-chart="Reward"] canvas')
    words = StatusReason("waiting_for_trajectories", "step 7: 3 of 8 episodes have ended")
    await store.jobs.retell(job.id, job.claim.token, words)
    await visit.see("main", words.message)


async def test_a_job_says_whether_its_learner_fits(visit: Visit, job: RecordedJob, model_dir: Path):
    (model_dir / "config.json").write_text(json.dumps(QWEN3["Qwen3-8B"]))
    await visit.open(f"#/jobs/{job.id}/config")
    await (await visit.see("#fits input")).fill("1xH100")
    await (await visit.see("#fits button")).click()
    assert "ranks of this kind would do" in await visit.text('[data-fits="false"]')
    await visit.open(f"#/jobs/{job.id}/config?gpus=16xH100")  # a link to an answer
    assert await visit.text('[data-fits="true"]') == "It fits 16xH100."
    await visit.see("tbody tr", "forward and backward")
    (model_dir / "config.json").unlink()


async def test_a_job_tells_where_its_time_goes(visit: Visit, job: RecordedJob, store: Store):
    await visit.open(f"#/jobs/{job.id}")
    trainer = await visit.see('[data-split="Time of a step"]')
    assert await trainer.locator('[data-kind="time/wait_s"] b').inner_text() == "0.50 s"
    assert await trainer.locator(".split-bar i").count() == 4
    told = await visit.text('[data-split="Time of an episode"] .split-legend')
    assert " ".join(told.split()) == "engine 1.20 s 50 % environment 0.90 s 38 % queue 0.30 s 13 %"
    await visit.see('[data-chart="Time of a step"] canvas')
    metrics = {"time/wait_s": 4.0, "time/train_s": 1.1, "time/step_s": 5.1, "reward/mean": 0.5}
    await store.metrics.add(job.id, 7, metrics)
    await store.events.add(job.id, "step", {"step": 7, "version": 6, "epoch": 1, **metrics})
    await visit.see('[data-split="Time of a step"] [data-kind="time/wait_s"]', "1.00 s")


async def test_an_episode_tells_where_its_time_went_turn_by_turn(visit: Visit, job: RecordedJob):
    from playwright.async_api import expect

    await visit.open(f"#/episodes/{job.id}/4/2")
    turn = await visit.text('.turn[data-turn="1"] [data-took]')
    assert turn.split() == ["engine", "0.75", "s", "environment", "0.75", "s"]
    assert "queue 0.38 s" in await visit.text('.turn[data-turn="0"] [data-took]')
    falls = visit.page.locator(".falls .fall")
    assert await falls.count() == 4  # three turns and what came after the last one
    widths = [(await falls.nth(place).bounding_box())["width"] for place in range(3)]
    assert widths[1] / widths[0] == pytest.approx(1.5 / 0.875, rel=0.05)
    await falls.nth(2).focus()
    await visit.page.keyboard.press("Enter")
    await expect(visit.page.locator("#turn-0-2 > .meta")).to_be_in_viewport(timeout=DEADLINE_MS)
    await visit.open(f"#/episodes/{job.id}/{job.open_group}/1")
    assert "1.25 s" in await visit.text('[data-split="Where time went"]')


async def test_the_page_goes_on_after_the_api_was_restarted(
    redis_server: RedisServer, job: RecordedJob, store: Store, api: ApiProcess
):
    settings = {"GSPO_API_PORT": str(free_port()), "GSPO_DATA_DIR": api.data_dir}
    with ApiProcess(redis_server.url, **settings) as first:
        url = first.url
        async with visiting(url) as visit:
            await visit.open(f"#/jobs/{job.id}")
            await visit.see('[data-chart="Reward"] canvas')
            first.process.kill()
            first.process.wait()
            await store.events.add(
                job.id, "alert", {"step": 6, "kind": "dark", "message": "told while nobody listened"}
            )
            await visit.see("#eta[data-waiting]")
            with ApiProcess(redis_server.url, **settings) as second:
                assert second.url == url
                await visit.see("[data-alarm]", "told while nobody listened")


async def test_a_group_stands_side_by_side_with_its_failures_in_red(visit: Visit, job: RecordedJob):
    await visit.open(f"#/groups/{job.id}/4")
    await visit.see('[data-member="3"]')
    members = visit.page.locator(".member")
    assert await members.count() == 4
    tops = [(await members.nth(place).bounding_box())["y"] for place in range(4)]
    assert max(tops) - min(tops) < 2
    red = await visit.see('[data-member="2"] .says.error')
    assert "cannot be read" in (await red.inner_text()).lower()
    await visit.page.keyboard.press("ArrowRight")
    await visit.see("h1", "Group 5")
    await visit.page.keyboard.press("u")
    await visit.see("h1", "calculator")


async def test_tokens_are_tinted_by_version_and_tell_their_log_prob(visit: Visit, job: RecordedJob):
    await visit.open(f"#/episodes/{job.id}/4/2")
    await visit.see('.turn[data-turn="2"]')
    assert await visit.page.locator('[data-call="invalid_json"]').count() == 1
    await visit.see('.says.error[data-role="tool"]')
    tint = "one => getComputedStyle(one).backgroundColor"
    old = await (await visit.see('.tok[data-version="2"]')).evaluate(tint)
    new = await (await visit.see('.tok[data-version="3"]')).evaluate(tint)
    assert old != new
    await visit.page.locator(".tok").first.hover()
    shown = await visit.text(".tip")
    assert "log-prob" in shown
    assert "version" in shown
    assert "ratio 0.5" in " ".join(shown.split())
    first = visit.page.locator('.turn[data-turn="1"] .tok').first
    await first.focus()
    await visit.page.keyboard.press("ArrowRight")
    assert await visit.page.evaluate("document.activeElement.dataset.at") == str(
        int(await first.get_attribute("data-at")) + 1
    )
    await (await visit.see("button", "surprise")).click()
    assert await (await visit.see('.tok[data-version="2"]')).evaluate(tint) != old
    await (await visit.see("button", "ratio")).click()
    later = await (await visit.see('.turn[data-turn="1"] .tok')).evaluate(tint)
    assert await (await visit.see('.turn[data-turn="0"] .tok')).evaluate(tint) != later


async def test_an_episode_grows_while_it_runs(visit: Visit, job: RecordedJob, bus: Bus, model_dir: Path):
    await visit.open(f"#/episodes/{job.id}/{job.open_group}/1")
    await visit.see('.turn[data-turn="0"]')
    assert await visit.page.locator('.turn[data-turn="1"]').count() == 0
    token = await bus.join("rollout-1")
    await bus.fail(EpisodeKey(job.id, job.open_group, 1), await _holder(bus, job), "given back by the test")
    lease = next(one for one in await bus.lease(job.id, "rollout-1", token, 4) if one.key.member == 1)
    player = Player(load_codec(model_dir), load_environment(REF))
    expression = await player.expression(job.open_group)
    call = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "' + expression + '"}}\n</tool_call>'
    rest = (await player.play(lease.key, job.open_group, [call, "77"], [6, 6]))[1:]
    await bus.append(
        job.id, token, [Append(one.key, lease.attempt, one.index, encode(one), one.is_final, 6) for one in rest]
    )
    await visit.see('.turn[data-turn="1"] .says', "77")
    await visit.see(".pill", "done")


async def _holder(bus: Bus, job: RecordedJob) -> str:
    held = await bus._functions.redis.zrange(f"gspo:{{{job.id}}}:held", 0, -1)
    return str(held[0].decode().split("/")[0])


async def test_what_a_policy_writes_is_text_and_never_markup(
    visit: Visit, job: RecordedJob, bus: Bus, store: Store, model_dir: Path
):
    hostile = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
    await bus.dispatch(job.id, job.claim.token, 90, size=1, split="train", task_index=0)
    token = await bus.join("rollout-2")
    lease = next(one for one in await bus.lease(job.id, "rollout-2", token, 9) if one.key.group == 90)
    player = Player(load_codec(model_dir), load_environment(REF))
    segments = await player.play(lease.key, 0, [hostile], [6])
    await bus.append(job.id, token, [Append(lease.key, 0, s.index, encode(s), s.is_final, 6) for s in segments])
    await visit.open(f"#/episodes/{job.id}/90/0")
    await visit.see(".says.policy", "onerror")
    assert await visit.page.locator("main img, main script").count() == 0
    assert "taken" not in await visit.page.title()


async def test_what_users_workers_and_environments_write_is_text_on_every_page(
    api: ApiProcess, store: Store, bus: Bus, model_dir: Path
):
    """In every place that a caller, a process or an environment fills."""
    hostile = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
    api.forget_jobs()
    fleet = store.fleet
    await fleet.register_trainer(TrainerRecord(id=f"trainer {hostile}", host=hostile, device=hostile))
    await fleet.register_worker(
        WorkerRecord(id=f"worker {hostile}", num_episodes=1, max_episodes=2, counters={hostile: 1})
    )
    await fleet.register_engine(
        EngineRecord(id=f"engine {hostile}", url=hostile, model_type=hostile, weight_version=hostile)
    )
    job = await record_job(store, bus, api.jobs_dir, model_dir, num_steps=2, name=hostile)
    await store.events.add(job.id, "alert", {"step": 1, "kind": hostile, "message": hostile, "advice": hostile})
    await store.events.add(job.id, "env.health", {"healthy": False, "worker": hostile, "error": hostile})
    await store.events.add(job.id, hostile, {"message": hostile})
    async with visiting(api.url) as visit:
        for place in (*PAGES, f"#/jobs/{hostile}", f"#/environments/{hostile}", f"#/jobs?status={hostile}"):
            await visit.page.goto(f"{api.url}/ui/{place.format(job=job.id)}")
            await visit.page.wait_for_selector("main h1, main .empty", timeout=DEADLINE_MS)
            await visit.page.wait_for_timeout(250)
            assert await visit.page.locator("main img, main script").count() == 0, place
            assert "taken" not in (await visit.page.title()).replace(hostile, ""), place
        await visit.open(f"#/jobs/{job.id}")
        assert hostile in await visit.text("h1")
        await visit.see("[data-alarm]", "onerror")


async def test_addresses_that_lead_nowhere_lead_to_the_jobs(visit: Visit, job: RecordedJob):
    for place in ("#/jobs/%E0%A4%A", "#/nowhere", "#/episodes/x/y/z"):
        await visit.page.goto(f"{visit.url}/ui/{place}")
        await visit.see("tbody tr.link", "calculator")


async def test_an_answer_that_no_page_expects_is_told_and_leaves_a_way_on(api: ApiProcess, job: RecordedJob):
    async with visiting(api.url) as visit:
        await visit.page.route("**/v1/workers", lambda route: route.fulfill(json={"data": [None]}))
        await visit.page.goto(f"{api.url}/ui/#/workers")
        await visit.see('[role=alert][data-code="page_failed"] button', "Try again")
        await visit.page.unroute("**/v1/workers")
        await (await visit.see("[role=alert] button", "Try again")).click()
        await visit.see("h1", "Workers and engines")
        await visit.page.route("**/v1/workers", lambda route: route.fulfill(body='{"data": ['))
        await visit.open("#/jobs")
        await visit.page.goto(f"{api.url}/ui/#/workers")
        await visit.see('[role=alert][data-code="unreachable"]')


async def test_pausing_and_resuming_from_the_page(visit: Visit, job: RecordedJob, store: Store):
    await visit.open(f"#/jobs/{job.id}")
    await (await visit.see("button", "Pause")).click()
    await (await visit.see("button", "Resume")).wait_for()
    assert (await store.jobs.get(job.id)).desired_state == "paused"
    await (await visit.see("button", "Resume")).click()
    await (await visit.see("button", "Pause")).wait_for()
    assert (await store.jobs.get(job.id)).desired_state == "running"


async def test_keys_lead_everywhere(visit: Visit, job: RecordedJob):
    await visit.open("#/jobs")
    await visit.see("tbody tr.link")
    for key, heading in (("w", "Workers and engines"), ("e", "Environments"), ("a", "API"), ("j", "Jobs")):
        await visit.page.keyboard.press("g")
        await visit.page.keyboard.press(key)
        await visit.see("h1", heading)
    before = await visit.page.evaluate("document.documentElement.dataset.theme")
    await visit.page.keyboard.press("t")
    assert await visit.page.evaluate("document.documentElement.dataset.theme") != before
    await visit.page.keyboard.press("?")
    await visit.see("dialog[open]", "Keyboard")
    await visit.page.keyboard.press("Escape")
    await visit.page.locator("body").focus()
    await visit.see("tbody tr.link a")
    for _ in range(12):
        await visit.page.keyboard.press("Tab")
        if await visit.page.evaluate("document.activeElement.closest('tbody') !== null"):
            break
    await visit.page.keyboard.press("Enter")
    await visit.see("h1", "calculator")


async def test_without_jobs_the_page_says_how_to_make_one(visit: Visit, api: ApiProcess, store: Store):
    api.forget_jobs()
    await visit.open("#/jobs")
    assert "gspo submit" in await visit.text(".empty")


async def test_what_is_not_there_is_said_with_a_way_on(api: ApiProcess, store: Store):
    async with visiting(api.url) as visit:
        await visit.open("#/jobs/job_nothing")
        assert "there is no job" in await visit.text("[role=alert]")
        await visit.see("[role=alert] button", "Try again")


async def test_a_service_with_keys_asks_for_one(redis_server: RedisServer, job: RecordedJob, api: ApiProcess):
    with ApiProcess(redis_server.url, GSPO_API_KEYS="the-right-key", GSPO_DATA_DIR=api.data_dir) as guarded:
        async with visiting(guarded.url) as visit:
            await visit.page.goto(f"{guarded.url}/ui/")
            await (await visit.see("dialog[open] input")).fill("a-wrong-key")
            await visit.page.keyboard.press("Enter")
            await visit.see("dialog[open]", "not known")
            await (await visit.see("dialog[open] input")).fill("the-right-key")
            await visit.page.keyboard.press("Enter")
            await visit.see("tbody tr.link", "calculator")
            assert "the-right-key" not in visit.page.url
        assert not any("the-right-key" in line for line in guarded.log())


def test_the_headers_let_nothing_in_from_elsewhere(api: ApiProcess):
    import httpx

    answer = httpx.get(f"{api.url}/ui/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert httpx.get(f"{api.url}/ui/../app.py").status_code == 404
    assert httpx.get(f"{api.url}/ui/%2e%2e/app.py").status_code == 404
