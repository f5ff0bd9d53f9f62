"""One sending to several engines, over a real process group: what a member does to the others, and they to it.

The engines are real embedded ones. What each samples is compared with the version that it names.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from gspo_core.versions import WeightsManifest
from services.engines import weight_buckets
from services.engines.sglang import EngineClient
from services.engines.transport import EngineTransport
from services.files.job_dir import JobDir
from services.files.weights import WeightStore
from services.state.store import Claim, Store
from services.trainer.fleet import engines as engines_module
from services.trainer.fleet import joint_sending, weight_transport
from services.trainer.fleet.engines import EnginePool
from services.trainer.fleet.weight_transport import ThroughGroup
from tests.apparatus.warm_python import WarmPython
from tests.services.engines.engine_kit import NUM_VERSIONS, UNHURRIED, EngineProcess, Models, make_model, max_difference
from tests.services.rollout.rollout_kit import until
from tests.services.trainer.trainer_kit import marked

PROMPT = [10, 20, 30, 40, 50]
TOLERANCE = 1e-4
INIT, PAUSE = "/init_weights_update_group", "/pause_generation"
RECEIVE, DISK = "/update_weights_from_distributed", "/update_weights_from_disk"

Before = Callable[[], Awaitable[None]]


@dataclass
class Wire(EngineTransport):
    """Notes each call with the port that it goes to. ``before`` says what happens before one goes, once."""

    calls: list[tuple[int, str]] = field(default_factory=list)
    before: dict[tuple[int, str], Before] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(64)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        call = request.url.port or 0, request.url.path
        self.calls.append(call)
        if happens := self.before.pop(call, None):
            await happens()
        return await super().handle_async_request(request)

    def num(self, path: str) -> int:
        return sum(called == path for _, called in self.calls)


@dataclass
class Fleet:
    models: Models
    wire: Wire
    http: httpx.AsyncClient
    processes: list[EngineProcess]
    pool: EnginePool
    weights: WeightStore
    claim: Claim
    store: Store

    async def publish(self, version: int) -> WeightsManifest:
        def save(directory: Path) -> None:
            shutil.copytree(self.models.paths[version], directory, dirs_exist_ok=True)

        manifest = self.weights.write(version, self.claim.epoch, version, save)
        await self.pool.publish(manifest)
        return manifest

    @property
    def group_name(self) -> str:
        transport = self.pool._transport
        assert isinstance(transport, ThroughGroup)
        assert transport._group is not None
        return transport._group._name

    def port(self, number: int) -> int:
        return int(self.processes[number].url.rpartition(":")[2])

    def label(self, version: int) -> str:
        return f"{self.claim.job_id}/{self.claim.epoch}/{version}"

    async def assert_samples(self, number: int, version: int) -> None:
        client = EngineClient(self.processes[number].url, self.http)
        answer = await client.generate(PROMPT, max_new_tokens=20, temperature=1.0, stop_token_ids=[])
        assert [span.label for span in answer.spans] == [self.label(version)]
        expected = self.models.logprobs(version, PROMPT, answer.output_ids, 1.0)
        assert max_difference(answer.logprobs, expected) < TOLERANCE


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")
    return Models(tuple(make_model(root / f"v{version}", seed=version) for version in range(NUM_VERSIONS)))


@pytest.fixture(scope="module")
def shared(models: Models, warm_python: WarmPython) -> Iterator[list[EngineProcess]]:
    """The last one is replaced where a test ends it."""
    engines = [EngineProcess(models.paths[0], python=warm_python.path, module=UNHURRIED) for _ in range(3)]
    yield engines
    for engine in engines:
        engine.close()


@pytest.fixture
async def fleet(
    models: Models,
    shared: list[EngineProcess],
    warm_python: WarmPython,
    store: Store,
    claim: Claim,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Fleet]:
    monkeypatch.setattr(engines_module, "WATCH_S", 0.1)
    monkeypatch.setattr(engines_module, "RETRY_S", 0.1)
    monkeypatch.setattr(weight_transport, "buckets_in", lambda path: weight_buckets.buckets_in(path, 2**16))
    if shared[-1].process.poll() is not None:
        shared[-1] = EngineProcess(models.paths[0], python=warm_python.path, module=UNHURRIED)
    wire = Wire()
    async with httpx.AsyncClient(transport=wire, trust_env=False) as http:
        for process in shared:
            client = EngineClient(process.url, http)
            await client.pause("abort")
            await client.load_weights(models.paths[0], "default")
            await client.resume()
        weights = WeightStore(JobDir(tmp_path / claim.job_id))
        urls = [process.url for process in shared]

        def client_of(url: str) -> EngineClient:
            return EngineClient(url, http)

        pool = EnginePool(store, claim.job_id, claim.token, weights, urls, client_of, transport=ThroughGroup())
        running = asyncio.create_task(pool.run())
        made = Fleet(models, wire, http, shared, pool, weights, claim, store)
        await pool.wait_for(await made.publish(0), num_engines=3)
        wire.calls.clear()
        yield made
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await pool.release()


async def test_one_broadcast_reaches_all_and_they_met_before_any_was_paused(fleet: Fleet) -> None:
    num_buckets = len(weight_buckets.buckets_in(fleet.models.paths[1], 2**16))
    assert num_buckets > 2
    await fleet.pool.wait_for(await fleet.publish(1), num_engines=3)
    await fleet.pool.wait_for(await fleet.publish(2), num_engines=3)
    for number in range(3):
        await fleet.assert_samples(number, 2)
    assert fleet.wire.num(INIT) in (0, 3), "they meet once, if they were not together before"
    first_pause = next(index for index, call in enumerate(fleet.wire.calls) if call[1] == PAUSE)
    assert all(index < first_pause for index, call in enumerate(fleet.wire.calls) if call[1] == INIT)
    assert fleet.wire.num(RECEIVE) == 2 * 3 * num_buckets
    assert fleet.wire.num(DISK) == 0


async def test_a_member_that_is_killed_while_it_is_sent_to_is_left_out(fleet: Fleet) -> None:
    """The others go on to the new version without being loaded by themselves; nobody has a wrong label."""

    async def kill() -> None:
        fleet.processes[2].process.kill()
        fleet.processes[2].process.wait()

    killed = fleet.processes[2].url
    fleet.wire.before[fleet.port(2), RECEIVE] = kill
    with marked(fleet.store.fleet) as seen:
        manifest = await fleet.publish(1)
        await until(lambda: sorted(one.label for one in fleet.pool.ready()) == [manifest.label] * 2)
        await until(lambda: killed not in fleet.pool.bound())
    assert len(seen) == 3
    assert all("dirty" not in states for url, states in seen.items() if url != killed)
    for number in range(2):
        await fleet.assert_samples(number, 1)
    assert fleet.wire.num(DISK) == 0


async def test_a_member_whose_call_is_cut_is_healed_alone(fleet: Fleet) -> None:
    """By a load from disk, since it finds the folder; the others were sent everything again."""

    async def cut() -> None:
        raise httpx.ReadError("cut")

    fleet.wire.before[fleet.port(1), RECEIVE] = cut
    with marked(fleet.store.fleet) as seen:
        await fleet.pool.wait_for(await fleet.publish(1), num_engines=3)
    assert "dirty" in seen[fleet.processes[1].url]
    assert all("dirty" not in seen[fleet.processes[number].url] for number in (0, 2))
    for number in range(3):
        await fleet.assert_samples(number, 1)
    assert [call for call in fleet.wire.calls if call[1] == DISK] == [(fleet.port(1), DISK)]
    await fleet.pool.wait_for(await fleet.publish(2), num_engines=3)
    for number in range(3):
        await fleet.assert_samples(number, 2)
    assert fleet.wire.num(DISK) == 1, "the next version reaches it with the others"


async def test_nobody_waits_for_a_member_that_pauses_late(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps its version meanwhile, and is sent the new one by itself."""
    monkeypatch.setattr(joint_sending, "_GATHER_S", 0.2)
    others_are_done = asyncio.Event()
    fleet.wire.before[fleet.port(0), PAUSE] = lambda: _wait(others_are_done)
    manifest = await fleet.publish(1)
    late, others = fleet.processes[0].url, [process.url for process in fleet.processes[1:]]

    def holders() -> set[str]:
        return {one.url for one in fleet.pool.ready() if one.label == manifest.label}

    await until(lambda: holders() == set(others))
    for number in (1, 2):
        await fleet.assert_samples(number, 1)
    others_are_done.set()
    await until(lambda: late in holders())
    await fleet.assert_samples(0, 1)
    assert fleet.wire.num(DISK) == 0


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


async def test_a_member_that_left_the_group_meets_the_others_again(fleet: Fleet) -> None:
    """It refuses what it is told of, and answers: nobody is blamed, and nobody is dirty."""
    client = EngineClient(fleet.processes[1].url, fleet.http)

    async def leave() -> None:
        await client.leave_weight_group(fleet.group_name)

    fleet.wire.before[fleet.port(1), RECEIVE] = leave
    with marked(fleet.store.fleet) as seen:
        await fleet.pool.wait_for(await fleet.publish(1), num_engines=3)
    assert len(seen) == 3
    assert all("dirty" not in states for states in seen.values())
    for number in range(3):
        await fleet.assert_samples(number, 1)
    assert fleet.wire.num(DISK) == 0
