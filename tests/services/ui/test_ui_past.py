"""Replays and families of jobs in a real browser: steps are really trained again."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gspo_core.log import layout
from gspo_core.spec import JobSpec, ParentSpec
from services.state.jobs import JobStatus
from services.state.server import RedisServer
from services.state.store import Store
from tests.core.learner_support import write_model
from tests.core.past_kit import GROUPS, MadePast, make_past, spec_of
from tests.services.api.api_kit import ApiProcess
from tests.services.ui.browser_kit import DEADLINE_MS, MISSING, Visit, visiting

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
    pytest.mark.timeout(600),
]

STEP = 4
GROUP = (STEP - 1) * GROUPS
# Starting torch on a busy machine.
TRAINED_MS = 10 * DEADLINE_MS


@pytest.fixture(scope="module")
def api(redis_server: RedisServer) -> Iterator[ApiProcess]:
    with ApiProcess(redis_server.url) as api:
        yield api


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadePast:
    """In the directory of the job whose name its logs carry."""
    model = write_model(tmp_path_factory.mktemp("model"))
    return make_past(tmp_path_factory.mktemp("jobs") / "job_made", spec_of(model))


@dataclass(frozen=True)
class Family:
    parent: str
    child: str
    grandchild: str


async def a_job(store: Store, spec: JobSpec, name: str, start: int, level: float) -> str:
    spec = spec.model_copy(update={"name": name})
    job = (await store.jobs.create(spec)).id
    claim = await store.jobs.claim("trainer")
    assert claim is not None
    await store.jobs.set_status(job, JobStatus.RUNNING, token=claim.token)
    for step in range(start + 1, 7):
        await store.metrics.add(job, step, {"reward/mean": level + 0.1 * step, "gspo/loss": 0.01 * step})
    await store.jobs.update_progress(job, claim.token, 6, 6)
    await store.jobs.set_status(job, JobStatus.SUCCEEDED, token=claim.token)
    return job


@pytest.fixture
async def family(api: ApiProcess, store: Store, made: MadePast) -> Family:
    """A job with what it left, its fork, and a fork of that."""
    api.forget_jobs()
    parent = await a_job(store, made.spec, "first", 0, 0.0)
    child = await a_job(store, forked(made.spec, parent, 3), "slower", 3, 0.2)
    grandchild = await a_job(store, forked(made.spec, child, 5), "slowest", 5, 0.4)
    folder = api.jobs_dir / parent
    shutil.copytree(made.folder, folder, dirs_exist_ok=True)
    for path in (folder / layout.BATCHES).iterdir():
        relabel(path, parent)
    return Family(parent, child, grandchild)


def forked(spec: JobSpec, parent: str, step: int) -> JobSpec:
    return spec.model_copy(update={"parent": ParentSpec(job=parent, step=step)})


def relabel(path: Path, job: str) -> None:
    """As if the episodes had been played for this job: the pages ask for them by name."""
    from dataclasses import replace

    from gspo_core.log.batches import decode_batch, encode_batch
    from gspo_core.types import EpisodeKey, Group, Trajectory

    batch = decode_batch(path.read_bytes())

    def of(episode: Trajectory) -> Trajectory:
        key = EpisodeKey(job, episode.key.group, episode.key.member)
        return Trajectory(tuple(replace(one, key=key) for one in episode.segments))

    groups = [
        Group(job, one.group, one.split, one.task_index, one.size, tuple(of(episode) for episode in one))
        for one in batch.groups
    ]
    path.write_bytes(b"".join(encode_batch(batch.position, groups, batch.extra)))


@pytest.fixture
async def visit(api: ApiProcess) -> AsyncIterator[Visit]:
    async with visiting(api.url) as visit:
        yield visit
        assert visit.complaints == []


async def test_a_step_is_replayed_otherwise_from_the_page_of_its_episode(visit: Visit, family: Family) -> None:
    await visit.open(f"#/episodes/{family.parent}/{GROUP}/1")
    await (await visit.see("main a", "replay it")).click()
    await visit.see("form.question")
    form = visit.page.locator("form.question")
    assert await form.locator("[name=first]").input_value() == str(STEP)
    assert await form.locator("[name=single]").input_value() == f"{GROUP}/1"
    await form.locator("[name=set]").fill("optimizer.lr=2e-3")
    await form.locator("[name=influence]").check()
    await visit.page.get_by_role("button", name="What does it take?").click()
    takes = await visit.see("[data-takes]")
    assert await takes.get_attribute("data-takes") == str(1 + 2 + GROUPS)
    await visit.page.get_by_role("button", name="Replay", exact=True).click()
    await visit.page.locator('[data-tile="same"]').wait_for(timeout=TRAINED_MS)

    assert "bit for bit" in await visit.text('[data-tile="same"]')
    assert 50 < float((await visit.text('[data-tile="share"] .value')).removesuffix(" %")) < 200
    assert 0.5 < float(await visit.text('[data-tile="cosine"] .value')) < 1
    assert await visit.page.locator(".influences li").count() == GROUPS
    widths = [await one.get_attribute("aria-valuenow") for one in await visit.page.locator(".influences .bar").all()]
    assert widths[0] == "100"
    await check_tokens(visit)

    await visit.page.goto(f"{visit.url}/ui/#/jobs/{family.parent}/replay")
    await (await visit.see("tbody tr.link", "optimizer.lr=0.002")).click()
    await visit.see('[data-tile="same"]')
    await visit.page.get_by_role("button", name="Remove", exact=True).click()
    await visit.see("main .empty", "Nothing was asked yet")


async def check_tokens(visit: Visit) -> None:
    """The shares stand over the tokens of their episode, and add up to what the answer says of it."""
    await visit.see(".turn .tok")
    assert await visit.page.locator('[data-focus="tint-share"]').get_attribute("aria-pressed") == "true"
    tokens = visit.page.locator(".turn .tok")
    total = 0.0
    for place in range(await tokens.count()):
        await tokens.nth(place).focus()
        told = (await visit.text(".tip dl")).split("\n")
        total += float(told[told.index("share of the loss") + 1])
    loss = float(await visit.text('[data-tile="loss"] .value'))
    assert total == pytest.approx(loss, abs=2e-3 * max(1.0, abs(loss)))
    tints = await tokens.evaluate_all("all => new Set(all.map(one => one.style.getPropertyValue('--tint'))).size")
    assert tints > 1


async def test_shares_are_not_laid_over_an_episode_that_was_played_since(
    visit: Visit, api: ApiProcess, family: Family
) -> None:
    """A job that went back plays its groups again under their numbers."""
    branch = {"turn": [0, 0], "token": [7, 7], "loss": [0.1, 0.2], "ratio": [1, 1], "weight": [1, 1]}
    branch |= {"advantage": [1, 1], "gated_by": [[], []], "clipped": [False, False], "kept": [True, True]}
    branch |= {"position": [1, 2], "version": [3, 3], "staleness": [0, 0]}
    branch |= {"behavior_logprob": [-1, -1], "policy_logprob": [-1, -1]}
    single = {"step": STEP, "episode": f"{family.parent}/{GROUP}/1", "stop_reason": "completed", "reward": 1.0}
    single |= {"reward_parts": {}, "advantage": 1.0, "loss": 0.3, "step_loss": 0.3, "sum_of_shares": 0.3}
    answer = {
        "model": "m",
        "start": "the base model",
        "num_replayed": 3,
        "is_same": True,
        "steps": [],
        "influences": [],
    }
    answer |= {"otherwise": None, "losses_otherwise": [], "single": {**single, "branches": [branch]}}
    put_replay(api.jobs_dir / family.parent, "c" * 16, {"single": f"{GROUP}/1"}, answer)
    await visit.open(f"#/replays/{family.parent}/{'c' * 16}")
    assert "taken again since" in await visit.text("[data-why]")
    assert await visit.page.locator(".turn .tok").count() == 0


def put_replay(job: Path, name: str, question: dict[str, Any], answer: dict[str, Any] | None) -> None:
    folder = job / layout.REPLAYS
    folder.mkdir(exist_ok=True)
    asked = {"first": STEP, "last": STEP, "set": {}, "without": [], "single": None, "influence": False} | question
    plan = {"from_checkpoint": None, "replayed_steps": 3, "trained_steps": 4}
    record = {"question": asked, "plan": plan, "created_at": "2026-01-01T00:00:00.000Z"}
    (folder / f"{name}.json").write_text(json.dumps(record))
    if answer is not None:
        told = {"answer": answer, "finished_at": record["created_at"], "format": 1}
        (folder / f"{name}.answer.json").write_text(json.dumps(told))


async def test_what_cannot_be_asked_is_told_beside_the_form(api: ApiProcess, family: Family) -> None:
    async with visiting(api.url) as visit:
        await visit.open(f"#/jobs/{family.parent}/replay?first=99")
        await visit.page.get_by_role("button", name="What does it take?").click()
        assert "step 99 is not kept" in await visit.text('[data-code="step_not_kept"]')


async def test_a_family_stands_in_one_tree_and_one_chart(visit: Visit, family: Family) -> None:
    await visit.open(f"#/jobs/{family.child}")
    await visit.page.get_by_role("link", name="Family").click()
    await visit.see('[data-chart="Family"] canvas')
    lines = visit.page.locator(".family li")
    assert [await one.get_attribute("data-job") for one in await lines.all()] == list(vars(family).values())
    depths = [await one.evaluate("one => one.style.getPropertyValue('--depth')") for one in await lines.all()]
    assert depths == ["0", "1", "2"]
    assert await visit.page.locator(".family [aria-current]").get_attribute("data-job") == family.child
    assert "after step 3" in await lines.nth(1).inner_text()
    names = await visit.page.locator(".u-legend .u-label").all_inner_texts()
    assert names == ["step", "first", "slower", "slowest"]
    await visit.page.get_by_label("Metric").select_option("gspo/loss")
    await visit.see(".family li", "0.06")


# Of each column of the canvas: the colours of the theme that are in it.
COLUMNS = """canvas => {
  const style = getComputedStyle(document.documentElement);
  const hex = ["--c1", "--c2", "--c3", "--c4"].map((name) => style.getPropertyValue(name).trim());
  const palette = hex.map((one) => [1, 3, 5].map((at) => parseInt(one.slice(at, at + 2), 16)));
  const { data, width, height } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const found = [];
  for (let x = 0; x < width; x += 1) {
    const seen = new Set();
    for (let y = 0; y < height; y += 1) {
      const at = 4 * (y * width + x);
      if (data[at + 3] < 200) continue;
      palette.forEach((one, number) => {
        if (one.every((value, part) => Math.abs(value - data[at + part]) < 12)) seen.add(number);
      });
    }
    found.push([...seen]);
  }
  return found;
}"""


@pytest.mark.parametrize(("starts", "least"), [((0, 1, 1), 0.25), ((0, 1, 1, 1), 0.2), ((0, 1, 2, 3), 0.15)])
async def test_jobs_with_the_same_curve_are_all_seen_in_the_chart(
    visit: Visit, api: ApiProcess, store: Store, made: MadePast, starts: tuple[int, ...], least: float
) -> None:
    """Forks that are fed their parent's batches have its rewards."""
    api.forget_jobs()
    parent = await a_job(store, made.spec, "first", 0, 0.0)
    for start in starts[1:]:
        await a_job(store, forked(made.spec, parent, start), f"from {start}", start, 0.0)
    await visit.open(f"#/jobs/{parent}/family")
    canvas = await visit.see('[data-chart="Family"] canvas')
    columns = await canvas.evaluate(COLUMNS)
    drawn = [place for place, seen in enumerate(columns) if seen]
    step = (drawn[-1] - drawn[0]) / 5  # the first of six is at the left edge
    together = columns[int(drawn[0] + step * max(starts)) : drawn[-1]]
    shares = [sum(number in seen for seen in together) / len(together) for number in range(len(starts))]
    assert min(shares) > least, shares


async def test_a_job_without_relatives_says_how_to_get_some(
    visit: Visit, api: ApiProcess, store: Store, made: MadePast
) -> None:
    api.forget_jobs()
    alone = await a_job(store, made.spec, "alone", 0, 0.0)
    await visit.open(f"#/jobs/{alone}/family")
    assert f"gspo fork {alone}@6" in await visit.text(".empty pre")


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
async def test_the_pages_fit_and_complain_of_nothing(api: ApiProcess, family: Family, width: int, scheme: str) -> None:
    answer = {
        "model": "m",
        "start": "the base model",
        "num_replayed": 3,
        "is_same": True,
        "steps": [],
        "otherwise": None,
    }
    answer |= {"losses_otherwise": [], "influences": [], "single": None}
    put_replay(api.jobs_dir / family.parent, "a" * 16, {}, None)
    put_replay(api.jobs_dir / family.parent, "b" * 16, {}, answer)
    async with visiting(api.url, width=width, scheme=scheme) as visit:
        for place in ("jobs/{0}/replay", "jobs/{0}/family", "replays/{0}/" + "a" * 16, "replays/{0}/" + "b" * 16):
            await visit.open(f"#/{place.format(family.parent)}")
            await visit.page.wait_for_load_state("networkidle")
            assert await visit.stays_as_wide_as_the_screen(), place
            assert visit.complaints == []
            text = await visit.text("main")
            assert "undefined" not in text
            assert "NaN" not in text
