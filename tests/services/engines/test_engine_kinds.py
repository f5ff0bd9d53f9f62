"""A second kind of engine is one line in the registry; an address of an unknown kind costs nothing but itself."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Collection

import pytest

from gspo_core.versions import WeightFile, WeightsManifest
from services.engines import kinds
from services.engines.kinds import open_engines
from services.engines.protocol import (
    Engine,
    EngineInfo,
    EngineLoad,
    EngineProtocolError,
    EngineUnavailable,
    Generation,
    LabelledSpan,
    NoSuchKind,
    info_calls,
    info_within,
)
from services.engines.sglang import EngineClient
from services.episodes.metering import Counters
from services.episodes.policy import Span
from services.state.fleet_records import EngineRecord, EngineReport, EngineState
from services.state.retry import Retrier
from services.workers.engines import EngineTable, JobEngines

LABEL = "job_a/1/0"


class Parrot:
    """An engine in this process that repeats its prompt: as much of one as a rollout worker uses."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def info(self) -> EngineInfo:
        if "silent" in self.url:
            raise EngineUnavailable(self.url)
        return EngineInfo(LABEL)

    async def load(self) -> EngineLoad:
        return EngineLoad(0, 0, 0, 0.0)

    async def generate(self, input_ids: list[int], *, max_new_tokens: int, **_: object) -> Generation:
        ids = list(input_ids)[:max_new_tokens]
        return Generation(ids, [-1.0] * len(ids), (LabelledSpan(LABEL, 0, len(ids)),))


@pytest.fixture
def parrots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "KINDS", {**kinds.KINDS, "parrot": lambda: lambda address, *_: Parrot(address)})


async def test_an_address_without_a_kind_is_of_the_default_one() -> None:
    async with open_engines() as connect:
        engine: Engine = connect("http://127.0.0.1:1/")
        assert isinstance(engine, EngineClient)
        assert engine.url == "http://127.0.0.1:1"


@pytest.mark.parametrize("address", ["nothing+http://e", "sglang+http://e", "+http://e"])
async def test_an_unknown_kind_is_refused_by_name(address: str) -> None:
    async with open_engines() as connect:
        with pytest.raises(NoSuchKind, match="kind of engine"):
            connect(address)


@pytest.mark.usefixtures("parrots")
async def test_an_address_that_names_a_kind_is_connected_by_it_and_keeps_its_name() -> None:
    async with open_engines() as connect:
        engine = connect("parrot+http://e")
        assert isinstance(engine, Parrot)
        asked = info_calls([engine], 1.0)
        assert [(url, await ask()) for url, ask in asked.items()] == [("parrot+http://e", EngineInfo(LABEL))]
        assert await info_within(connect("parrot+http://silent"), 1.0) is None


class Store:
    """Three engines: one of the second kind, one of a kind that nothing here knows, and a silent one."""

    async def engines(self) -> list[EngineRecord]:
        urls = ["parrot+http://e", "of-tomorrow+http://e", "parrot+http://silent"]
        return [EngineRecord(id=url, url=url, job="job_a", report=EngineReport(EngineState.READY)) for url in urls]

    async def current(self, job: str) -> WeightsManifest | None:
        return WeightsManifest(job, 0, 1, 0, (WeightFile("model.safetensors", 1, "0" * 64),))

    async def manifests(self, job: str, numbers: Collection[int]) -> list[WeightsManifest]:
        raise AssertionError("the engine holds the current version")


@pytest.mark.usefixtures("parrots")
async def test_a_worker_samples_with_another_kind_and_leaves_out_what_it_does_not_know() -> None:
    counters, store = Counters(), Store()
    retrier = Retrier(counters, random.Random(0))
    async with open_engines() as connect:
        table = EngineTable(store, (), connect, time.monotonic, retrier)
        engines = JobEngines(
            table,
            store,
            "job_a",
            max_staleness=1,
            vocab_size=10,
            retrier=retrier,
            counters=counters,
            clock=time.monotonic,
            leaving=asyncio.Event(),
        )
        for _ in range(2):
            await table.refresh()
            await engines.refresh()
        answer = await engines.sample([7, 8, 9], max_new_tokens=2, temperature=1.0, stop_token_ids=[])
    assert (answer.ids, answer.engine_id, answer.spans) == ([7, 8], "parrot+http://e", (Span(0, 2, 0),))
    assert table.num_requests().keys() == {"parrot+http://e", "parrot+http://silent"}


@pytest.mark.parametrize("spans", [[], [(0, 1)], [(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 4)], [(0, 3), (3, 1)]])
def test_spans_that_do_not_tile_the_tokens_are_refused_whatever_the_kind(spans: list[tuple[int, int]]) -> None:
    with pytest.raises(EngineProtocolError, match="spans"):
        Generation([1, 2, 3], [-1.0] * 3, tuple(LabelledSpan(LABEL, *span) for span in spans))


def test_a_log_prob_for_every_token() -> None:
    with pytest.raises(EngineProtocolError, match="3 sampled tokens with 2"):
        Generation([1, 2, 3], [-1.0] * 2, (LabelledSpan(LABEL, 0, 3),))
