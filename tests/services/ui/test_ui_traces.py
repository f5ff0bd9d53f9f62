"""What keys that just talk have said, in a real browser: listed, shown as a tree, redacted, erased."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gspo_core.chat import HermesCodec, load_codec
from gspo_core.codec import encode
from gspo_core.types import EpisodeKey
from services.state.functions import Functions
from services.state.queue import Bus
from services.state.server import RedisServer
from services.state.store import Store
from services.state.talks import TalkKeyRecord, Talks, TrafficRetention
from tests.services.api.api_kit import ApiProcess
from tests.services.api.recorded_job import RecordedJob, record_job, write_model
from tests.services.ui.browser_kit import MISSING, Visit, visiting
from tests.services.ui.test_ui_trees import a_tree

pytestmark = [pytest.mark.browser, pytest.mark.skipif(bool(MISSING), reason=MISSING)]

KEEP = TrafficRetention(1 << 24, 30.0)
KEY = TalkKeyRecord("0123456789ab", "site", "2026-11-01T00:00:00Z", None, 100, None, None)


@pytest.fixture(scope="module")
def api(redis_server: RedisServer) -> Iterator[ApiProcess]:
    with ApiProcess(redis_server.url) as api:
        yield api


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
async def job(api: ApiProcess, store: Store, bus: Bus, model_dir: Path) -> RecordedJob:
    """Ann's conversation is trace 7; bob's, redacted, is trace 8."""
    api.forget_jobs()
    job = await record_job(store, bus, api.jobs_dir, model_dir)
    codec = load_codec(model_dir)
    assert isinstance(codec, HermesCodec)
    talks = Talks(Functions(store._functions.redis))
    await talks.make(job.id, KEY)
    told = [one for one in await a_tree(codec) if not one.is_final]
    payloads = [encode(replace(one, key=EpisodeKey(job.id, 7, 0))) for one in told]
    await talks.record(job.id, KEY.id, 7, "ann", payloads, tokens=9, s=0.5, keep=KEEP)
    redacted = {"turn": 0, "branch": 0, "read": "who is [NAME]?", "said": "[NAME] is away", "num_tokens": 9}
    redacted |= {"num_sampled": 4, "versions": [3], "kind": "redacted"}
    await talks.record(job.id, KEY.id, 8, "bob", [json.dumps(redacted).encode()], tokens=4, s=0.5, keep=KEEP)
    return job


@pytest.fixture
async def visit(api: ApiProcess) -> AsyncIterator[Visit]:
    async with visiting(api.url) as visit:
        yield visit
        assert visit.complaints == []


async def test_traces_are_listed_and_selected_by_user(visit: Visit, job: RecordedJob) -> None:
    await visit.open(f"#/jobs/{job.id}")
    await (await visit.see("a", "Traces")).click()
    assert await (await visit.see("tbody tr", "#8")).inner_text()
    rows = await visit.page.locator("section.card").first.locator("tbody tr").all_inner_texts()
    assert [("ann" in text, "bob" in text, "site" in text) for text in rows] == [
        (False, True, True),
        (True, False, True),
    ]
    assert "2 of 100" not in await visit.text("main")
    assert "0 of 100" in await visit.text("main")
    await visit.page.fill("input[name=user]", "ann")
    await visit.page.click("form button")
    await visit.page.wait_for_url(f"**/jobs/{job.id}/traces?user=ann")
    await visit.page.locator("tbody tr", has_text="bob").first.wait_for(state="detached")
    assert await visit.stays_as_wide_as_the_screen()


async def test_a_trace_is_shown_turn_by_turn_and_erased(visit: Visit, job: RecordedJob) -> None:
    await visit.open(f"#/traces/{job.id}/7")
    assert await visit.text("h1") == "Trace 7"
    assert await visit.page.locator("section.turn").count() > 2
    await visit.see("section.card", "Requests")
    assert "never" in await visit.text("main")
    await visit.page.click("[data-focus=tint-surprise]")
    await visit.see("[data-focus=tint-surprise][aria-pressed=true]")
    visit.page.on("dialog", lambda dialog: dialog.accept())
    await visit.page.click("button.danger")
    await visit.page.wait_for_url(f"**/jobs/{job.id}/traces")
    await visit.see("tbody tr", "bob")
    assert await visit.page.locator("tbody tr", has_text="ann").count() == 0


async def test_a_redacted_trace_shows_what_was_kept(visit: Visit, job: RecordedJob) -> None:
    await visit.open(f"#/traces/{job.id}/8")
    text = await visit.text("main")
    assert "who is [NAME]?" in text
    assert "[NAME] is away" in text
    assert await visit.page.locator("[data-focus=tint-version]").count() == 0
