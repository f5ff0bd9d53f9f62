"""The page of workers, engines and trainers in a real browser: who lives, how busy they are, asking one to leave."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from services.state.fleet_records import EngineRecord, TrainerRecord, WorkerRecord
from services.state.server import RedisServer
from services.state.store import Store
from tests.services.api.api_kit import ApiProcess
from tests.services.ui.browser_kit import MISSING, Visit, visiting
from tests.services.ui.test_ui_environments import rollout_worker

pytestmark = [pytest.mark.browser, pytest.mark.skipif(bool(MISSING), reason=MISSING)]

ENGINE = "http://127.0.0.1:30000"


@pytest.fixture
def api(redis_server: RedisServer, store: Store) -> Iterator[ApiProcess]:
    with ApiProcess(redis_server.url) as api:
        yield api


@pytest.fixture
async def visit(api: ApiProcess) -> AsyncIterator[Visit]:
    async with visiting(api.url) as visit:
        yield visit
        assert visit.complaints == []


async def _register(store: Store, *, num_episodes: int = 3) -> None:
    counters = {"episodes/finished": 12, "tokens/sampled": 3456, "time/engine_s": 30.0, "time/env_s": 10.0}
    held: dict[str, Any] = {"max_episodes": 64, "engine_requests": {ENGINE: num_episodes}}
    await store.fleet.register_worker(
        WorkerRecord(id="rollout-0", num_episodes=num_episodes, counters=counters, **held)
    )
    await store.fleet.register_engine(
        EngineRecord(id=ENGINE, url=ENGINE, weight_version="job_x/1/7", model_type="qwen3")
    )
    await store.fleet.register_trainer(TrainerRecord(id="trainer-0", device="cpu"))


async def test_load_and_versions_are_told_and_go_on(visit: Visit, store: Store) -> None:
    await _register(store)
    await visit.open("#/workers")
    engine = '[data-part="Engines"] tbody tr'
    assert (await visit.text(engine)).split() == [ENGINE, "alive", "none", "7", "3", "qwen3", "Drain"]
    await visit.see('[data-part="Rollout workers"] tbody tr', "3 / 64")
    assert "75 %" in await visit.text('[data-part="Rollout workers"] [data-kind="engine_s"]:has(b)')
    await _register(store, num_episodes=9)
    await visit.see('[data-part="Rollout workers"] tbody tr', "9 / 64")
    await visit.see(engine, "9")


async def test_all_that_may_be_asked_to_leave_have_a_button(visit: Visit, store: Store) -> None:
    await _register(store)
    await visit.open("#/workers")
    await visit.see('button[aria-label="drain rollout-0"]')
    for part in ("Trainers", "Engines"):
        assert await visit.page.locator(f'[data-part="{part}"] button').count() == 1


async def test_a_worker_is_drained_with_the_keyboard(
    visit: Visit, api: ApiProcess, redis_server: RedisServer, store: Store
) -> None:
    with rollout_worker(redis_server.url, api.jobs_dir.parent) as worker:
        visit.page.on("dialog", lambda dialog: dialog.accept())
        await visit.open("#/workers")
        button = await visit.see('button[aria-label^="drain rollout-"]')
        await button.focus()
        await visit.page.wait_for_timeout(3000)  # it is drawn anew meanwhile, and the keyboard stays where it was
        await visit.page.keyboard.press("Enter")
        await visit.see("main", "was asked to leave")
        await visit.see('[data-state="draining"]')
        assert worker.wait(60) == 0


async def test_what_is_shown_stays_while_the_service_is_away(redis_server: RedisServer, store: Store) -> None:
    await _register(store)
    with ApiProcess(redis_server.url) as api:
        async with visiting(api.url) as visit:
            await visit.open("#/workers")
            await visit.see('[data-part="Engines"] tbody tr')
            api.process.kill()
            await visit.see("#health", "away")
            assert await visit.page.locator('[data-part="Engines"] tbody tr').count() == 1


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
async def test_the_page_is_quiet_and_as_wide_as_the_screen(
    api: ApiProcess, store: Store, width: int, scheme: str
) -> None:
    async with visiting(api.url, width=width, scheme=scheme) as visit:
        await visit.open("#/workers")
        assert "gspo up" in await visit.text(".empty")
        await _register(store)
        await visit.see('[data-part="Trainers"] tbody tr', "trainer-0")
        assert await visit.stays_as_wide_as_the_screen()
        for text in ("undefined", "NaN", "[object"):
            assert text not in await visit.text("main")
        assert visit.complaints == []
