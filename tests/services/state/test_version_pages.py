"""A page of versions says what the whole table says, and fetches few of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_core.spec import JobSpec
from gspo_core.versions import WeightFile, WeightsManifest
from services.state.store import Claim, Store
from services.state.versions import VersionTable


async def publish(store: Store, claim: Claim, epoch: int, step: int) -> None:
    version = await store.versions.next(claim.job_id, claim.token)
    files = (WeightFile("model.safetensors", 1, "0" * 64),)
    await store.versions.publish(claim.job_id, claim.token, WeightsManifest(claim.job_id, version, epoch, step, files))


@pytest.fixture
async def claim(store: Store) -> Claim:
    """Three epochs: the second forked off after step 4, the third after step 6."""
    fields = {"model": "m", "environments": [{"ref": "a:B"}]}
    await store.jobs.create(JobSpec.model_validate(fields))
    claim = await store.jobs.claim("trainer")
    assert claim is not None
    for epoch, steps in ((1, range(7)), (2, range(4, 9)), (3, range(6, 300))):
        for step in steps:
            await publish(store, claim, epoch, step)
    return claim


async def test_pages_are_the_table_from_its_end(store: Store, claim: Claim) -> None:
    table = [one async for one in _rows(store.versions, claim.job_id)]
    assert table == list(reversed(await store.versions.table(claim.job_id)))
    assert [one.parent for one in table if one.step in (4, 6)][:5] == [9, 8, 4, 5, 3]


async def _rows(versions: VersionTable, job: str):
    below = None
    while found := await versions.newest(job, 7, below=below):
        for row, manifest in found:
            assert (row.version, row.step) == (manifest.version, manifest.step)
            yield row
        below = found[-1][0].version


async def test_a_page_fetches_few_manifests(store: Store, claim: Claim, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[int] = []
    original = VersionTable.manifests

    async def counted(self: VersionTable, job: str, numbers: list[int]) -> list[WeightsManifest]:
        fetched.extend(numbers)
        return await original(self, job, numbers)

    monkeypatch.setattr(VersionTable, "manifests", counted)
    assert len(await store.versions.newest(claim.job_id, 20, below=200)) == 20
    assert len(fetched) == 21


async def test_of_the_numbers_asked_for_those_are_told_that_are_published(store: Store, claim: Claim) -> None:
    highest = max(one.version for one in await store.versions.table(claim.job_id))
    found = await store.versions.manifests(claim.job_id, {3, highest, highest + 1, 1700000})
    assert {one.version: one.step for one in found} == {3: 3, highest: 299}


async def test_a_job_without_versions_has_an_empty_page(store: Store, tmp_path: Path) -> None:
    assert await store.versions.newest("job_none", 5) == []
