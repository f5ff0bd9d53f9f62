"""Episodes of agents as trees, in a real browser: what the gateway recorded of requests stands beside the turns."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gspo_core.chat import HermesCodec, load_codec
from gspo_core.messages import Message
from gspo_core.types import EpisodeKey, Group, Outcome, Repeated, Segment, Split, StopReason, Trajectory
from services.files.batch_log import BatchLog
from services.files.job_dir import JobDir
from services.state.queue import Bus
from services.state.server import RedisServer
from services.state.store import Store
from tests.services.api.api_kit import ApiProcess
from tests.services.api.recorded_job import RecordedJob, record_job, write_model
from tests.services.gateway.gateway_kit import BabblingPolicy, Bench, request, said, take, user
from tests.services.rollout.rollout_kit import Speech
from tests.services.ui.browser_kit import DEADLINE_MS, MISSING, Visit, visiting

pytestmark = [pytest.mark.browser, pytest.mark.skipif(bool(MISSING), reason=MISSING)]

GROUP, STEP, NUM_SAMPLES = 100, 7, 60
HI = user("what is 2 + 2?")
CHAT: dict[str, str] = {"dialect": "chat_completions", "model": "gpt-4o"}


@pytest.fixture(scope="module")
def api(redis_server: RedisServer) -> Iterator[ApiProcess]:
    with ApiProcess(redis_server.url) as api:
        yield api


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
async def job(api: ApiProcess, store: Store, bus: Bus, model_dir: Path) -> RecordedJob:
    """Its last step trained a group of agents: one line, a tree with every mark, and very many branches."""
    api.forget_jobs()
    job = await record_job(store, bus, api.jobs_dir, model_dir)
    codec = load_codec(model_dir)
    assert isinstance(codec, HermesCodec)
    played = [await a_line(codec), await a_tree(codec), await many_branches(codec)]
    members = [
        Trajectory(tuple(replace(one, key=EpisodeKey(job.id, GROUP, member)) for one in segments))
        for member, segments in enumerate(played)
    ]
    group = Group(job.id, GROUP, Split.TRAIN, 0, len(members), tuple(members))
    BatchLog(JobDir(api.jobs_dir / job.id)).write(job.claim.epoch, STEP, [group], {})
    await store.jobs.update_progress(job.id, job.claim.token, STEP, STEP - 1)
    return job


def bench(codec: HermesCodec, *speeches: str) -> Bench:
    say = Speech(codec).say
    return Bench(codec, policy=BabblingPolicy(codec, random.Random(0), [say(text) for text in speeches]))


async def ask(one: Bench, *messages: Message, **fields: Any) -> Any:
    return await take(await one.episode.ask(request(*messages, **(CHAT | fields))))


def ended(one: Bench) -> list[Segment]:
    return [*one.records.segments(), one.tree.close(Outcome(StopReason.COMPLETED, 1.0))]


async def a_line(codec: HermesCodec) -> list[Segment]:
    one = bench(codec, "4", "8")
    first = await ask(one, HI)
    await ask(one, HI, said(first), user("what is 4 + 4?"))
    return ended(one)


async def a_tree(codec: HermesCodec) -> list[Segment]:
    """Turns: 0, 1 behind it, another answer to the same (2), a sub-agent (3), one that nobody had (4), a fork (5)."""
    one = bench(codec, "4", "8", "9", "2 + 2", "16", "5")
    first = await ask(one, HI)
    await ask(one, HI, said(first), user("what is 4 + 4?"), repeat_key="a")
    await ask(one, HI, said(first), user("what is 4 + 4?"), repeat_key="a")
    await ask(one, HI, said(first), user("what is 4 + 4?"))
    helper = user("write a sum")
    await ask(one, {"role": "system", "content": "you help"}, helper, dialect="messages", model="claude-sonnet-4-5")
    lost = await one.episode.ask(request(user("what is 8 + 8?"), **CHAT))
    async for _ in lost:
        pass
    lost.dropped()
    await ask(one, HI, said(first), user("what is 2 + 3?"))
    one.tree.untrained_turns, one.tree.repeated = (4,), (Repeated(1, 1),)
    return ended(one)


async def many_branches(codec: HermesCodec) -> list[Segment]:
    one = bench(codec, *(str(number) for number in range(NUM_SAMPLES)), "8")
    answers = [await ask(one, HI) for _ in range(NUM_SAMPLES)]
    await ask(one, HI, said(answers[7]), user("what is 4 + 4?"))
    return ended(one)


@pytest.fixture
async def visit(api: ApiProcess) -> AsyncIterator[Visit]:
    async with visiting(api.url) as visit:
        yield visit
        assert visit.complaints == []


async def test_requests_stand_beside_the_turns_of_a_tree(visit: Visit, job: RecordedJob) -> None:
    from playwright.async_api import expect

    await visit.open(f"#/episodes/{job.id}/{GROUP}/1")
    assert await (await visit.see(".tree")).get_attribute("data-branches") == "5"
    lines = [await visit.text(f'[data-node="{turn}"]') for turn in range(6)]
    reasons = ["resampled" in lines[2], "sub agent" in lines[3], "edited history" in lines[5]]
    assert reasons == [True, True, True]
    assert "given again" in lines[1]
    assert "not trained" in lines[4]
    assert "1 of 3 messages new" in lines[1]
    titles = [await visit.page.locator(f'[data-node="{turn}"]').get_attribute("title") for turn in (0, 3)]
    assert titles[0] == "asked as chat completions for gpt-4o, 1 of 1 message new"
    assert titles[1].startswith("asked as messages for claude-sonnet-4-5")
    assert await visit.page.locator("[data-dot].lost").count() == 1
    # Every turn but the first ones of conversations of their own goes on from another.
    assert await visit.page.locator(".tree path").count() == 3
    await visit.page.locator('[data-node="5"]').focus()
    await visit.page.keyboard.press("Enter")
    await expect(visit.page.locator("[id$='-5'].turn > .meta")).to_be_in_viewport(timeout=DEADLINE_MS)
    turn = await visit.text("[id$='-5'].turn")
    assert "edited history from turn 0" in turn
    assert "tokens as in a branch before" in turn
    # What another branch shows already is not told again.
    assert "2 + 3" in turn
    assert await visit.page.locator("[id$='-5'].turn .says", has_text="what is 2 + 2?").count() == 0


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")])
async def test_trees_of_one_and_of_very_many_branches_fit(
    api: ApiProcess, job: RecordedJob, width: int, scheme: str
) -> None:
    async with visiting(api.url, width=width, scheme=scheme) as visit:
        for member, branches in ((0, 1), (1, 5), (2, NUM_SAMPLES)):
            await visit.open(f"#/episodes/{job.id}/{GROUP}/{member}")
            assert await (await visit.see(".tree")).get_attribute("data-branches") == str(branches)
            assert await visit.stays_as_wide_as_the_screen()
            assert visit.complaints == []
        # Samples that end at once share a lane.
        assert await visit.page.evaluate("document.querySelector('.tree svg').clientWidth") < 80


async def test_an_episode_of_one_history_without_requests_has_no_tree(visit: Visit, job: RecordedJob) -> None:
    await visit.open(f"#/episodes/{job.id}/4/2")
    await visit.see(".timeline .turn")
    assert await visit.page.locator(".tree").count() == 0
