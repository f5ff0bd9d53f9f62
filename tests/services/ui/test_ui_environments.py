"""The pages about environments in a real browser, with a real rollout worker that is asked for what only it knows."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.process.children import die_with_parent
from services.state.server import RedisServer
from services.state.store import Store
from tests.services.api.api_kit import ApiProcess
from tests.services.ui.browser_kit import MISSING, Visit, visiting

pytestmark = [pytest.mark.browser, pytest.mark.skipif(bool(MISSING), reason=MISSING)]

CALCULATOR = {"type": "reference", "ref": "environments.calculator:Calculator"}
NOTHING = {"type": "reference", "ref": "environments.calculator:Nothing"}
ANSWER = '[data-part="trial"] .outcome'


@contextmanager
def rollout_worker(redis_url: str, data_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("GSPO_")}
    worker = subprocess.Popen(
        [sys.executable, "-m", "services.rollout"],
        env=own | {"GSPO_REDIS_URL": redis_url, "GSPO_DATA_DIR": str(data_dir)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=die_with_parent(),
    )
    try:
        yield worker
    finally:
        worker.kill()
        worker.wait()


def register(api: ApiProcess, name: str, source: dict[str, Any]) -> None:
    httpx.post(f"{api.url}/v1/environments", json={"name": name, "source": source}).raise_for_status()


@pytest.fixture
def api(redis_server: RedisServer, store: Store) -> Iterator[ApiProcess]:
    with ApiProcess(redis_server.url) as api:
        yield api


@pytest.fixture
def worker(redis_server: RedisServer, api: ApiProcess) -> Iterator[subprocess.Popen[bytes]]:
    with rollout_worker(redis_server.url, api.jobs_dir.parent) as worker:
        yield worker


@pytest.fixture
async def visit(api: ApiProcess) -> AsyncIterator[Visit]:
    async with visiting(api.url) as visit:
        yield visit
        assert visit.complaints == []


async def test_without_any_the_page_says_how_to_register_one(visit: Visit) -> None:
    await visit.open("#/environments")
    assert "/v1/environments" in await visit.text(".empty")


async def test_the_list_shows_what_examinations_find_as_they_find_it(
    visit: Visit, api: ApiProcess, worker: subprocess.Popen[bytes]
) -> None:
    register(api, "sums", CALCULATOR)
    await visit.open("#/environments")
    await visit.see('tr:has-text("sums") [data-status="ready"]')
    register(api, "broken", NOTHING)
    await visit.see('tr:has-text("broken") [data-status="invalid"]')
    assert "has no 'Nothing'" in await visit.text('tr:has-text("broken") .failures')
    assert "environments.calculator:Calculator" in await visit.text('tr:has-text("sums")')
    link = await visit.see('a:has-text("sums")')
    await link.focus()
    await visit.page.wait_for_timeout(3500)  # it is drawn anew meanwhile, and the keyboard stays where it was
    await visit.page.keyboard.press("Enter")
    await visit.see("h1", "sums")
    await visit.page.keyboard.press("u")
    await visit.see("h1", "Environments")


async def test_tools_are_readable_and_tasks_come_in_pages(
    visit: Visit, api: ApiProcess, worker: subprocess.Popen[bytes]
) -> None:
    register(api, "sums", CALCULATOR)
    await visit.open("#/environments/sums@1")
    tool = await visit.see('[data-tool="calculate"]')
    for said in ("Compute an expression.", "expression", "string", "yes"):
        assert said in await tool.inner_text()
    await visit.see('[data-part="tasks"]', "1 to 10 of 2000")
    first = await visit.text('[data-part="tasks"] tbody tr:first-child')
    await visit.page.keyboard.press("ArrowRight")
    await visit.see('[data-part="tasks"]', "11 to 20 of 2000")
    assert await visit.text('[data-part="tasks"] tbody tr:first-child') != first
    back = await visit.see('button[aria-label="earlier tasks"]')
    await back.focus()
    await visit.page.keyboard.press("Enter")
    await visit.see('[data-part="tasks"]', "1 to 10 of 2000")
    await (await visit.see("button", "held out")).click()
    await visit.see('[data-part="tasks"]', "1 to 10 of 200")


async def test_an_episode_is_played_by_hand(visit: Visit, api: ApiProcess, worker: subprocess.Popen[bytes]) -> None:
    register(api, "sums", CALCULATOR)
    await visit.open("#/environments/sums@1")
    await (await visit.see('button[aria-label="try task 3"]')).click()
    asked = await visit.text('[data-part="trial"] .chosen dd')
    assert await visit.page.get_by_label("task", exact=True).input_value() == "3"
    answer = str(eval(asked))
    await visit.page.get_by_label("expression of calculate").fill(asked)
    await visit.page.locator(".turn-form textarea[aria-label='what the policy says']").nth(1).fill(answer)
    await visit.page.get_by_role("button", name="Play", exact=True).click()
    await visit.see('[data-reward="1"]')
    assert answer in await visit.text(f'{ANSWER} [data-role="tool"]')


async def test_a_failed_call_is_red_and_what_was_written_stays_text(
    visit: Visit, api: ApiProcess, worker: subprocess.Popen[bytes]
) -> None:
    hostile = "<img src=x onerror=\"document.title='taken'\">"
    register(api, "sums", CALCULATOR)
    await visit.open("#/environments/sums@1")
    await (await visit.see('textarea[aria-label="expression of calculate"]')).fill("import os")
    await visit.page.locator(".turn-form textarea[aria-label='what the policy says']").nth(1).fill(hostile)
    await visit.page.get_by_role("button", name="Play", exact=True).click()
    await visit.see('[data-reward="0"]')
    assert "ValueError" in await visit.text(f"{ANSWER} .says.error")
    await visit.see(f'{ANSWER} [data-role="policy"]', "onerror")
    assert await visit.page.locator("main img").count() == 0
    await (await visit.see("button", "Let the oracle play")).click()
    await visit.see('[data-reward="1"]')


async def test_an_unfit_one_says_why_and_is_examined_again(
    visit: Visit, api: ApiProcess, worker: subprocess.Popen[bytes]
) -> None:
    register(api, "broken", NOTHING)
    await visit.open("#/environments/broken@1")
    assert "has no 'Nothing'" in await visit.text("[data-failure]")
    await visit.see('[data-code="environment_invalid"]')
    await (await visit.see("button", "Examine again")).click()
    await visit.see('[data-checks="failed"]', "has no 'Nothing'")
    visit.complaints[:] = [one for one in visit.complaints if "422" not in one]  # chromium tells each refusal


async def test_without_a_worker_it_says_to_start_one(visit: Visit, api: ApiProcess) -> None:
    register(api, "sums", CALCULATOR)
    await visit.open("#/environments/sums@1")
    assert "services.rollout" in await visit.text('[data-code="no_worker"]')
    await visit.see('[data-status="validating"]')
    visit.complaints[:] = [one for one in visit.complaints if "503" not in one]


@pytest.mark.parametrize(("width", "scheme"), [(1280, "dark"), (390, "light")])
async def test_the_pages_are_quiet_and_as_wide_as_the_screen(
    api: ApiProcess, worker: subprocess.Popen[bytes], width: int, scheme: str
) -> None:
    register(api, "sums", CALCULATOR)
    register(api, "broken", NOTHING)
    async with visiting(api.url, width=width, scheme=scheme) as visit:
        await visit.open("#/environments")
        await visit.see('[data-status="invalid"]')
        assert await visit.stays_as_wide_as_the_screen()
        await visit.open("#/environments/sums@1")
        await visit.see('[data-part="tasks"] tbody tr')
        await (await visit.see("button", "Let the oracle play")).click()
        await visit.see('[data-reward="1"]')
        assert await visit.stays_as_wide_as_the_screen()
        for text in ("undefined", "NaN", "[object"):
            assert text not in await visit.text("main")
        assert visit.complaints == []
