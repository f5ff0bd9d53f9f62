"""A seed decides what is sampled: requests over HTTP, turns as they are stored, and the embedded engine behind them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from gspo_core.chat import HermesCodec
from gspo_core.messages import Message
from gspo_core.types import EpisodeKey, Segment, Split
from gspo_core.versions import WeightFile, WeightsManifest
from services.engines.kinds import open_engines
from services.engines.protocol import Engine
from services.episodes.keys import Keys
from services.episodes.metering import Counters, Meter, Timings
from services.episodes.policy import Policy, Sampled
from services.episodes.snapshots import TreeSnapshot
from services.episodes.tree import TokenTree
from services.gateway.agent.episode import AgentEpisode
from services.gateway.agent.plan import sampling_seed
from services.gateway.dialects.turns import TurnRequest
from services.state.queue import LeasedEpisode
from services.state.retry import Backoff, Retrier
from services.state.store import Claim, Store
from services.workers.engines import EngineTable, JobEngines
from tests.apparatus.warm_python import WarmPython
from tests.services.engines.engine_kit import EngineProcess, Models, max_difference
from tests.services.gateway.agent_kit import SECRET, EpisodeRouter
from tests.services.gateway.fake_turns import serving
from tests.services.gateway.gateway_kit import HeldRecords, quick_order, quick_setting, user
from tests.services.gateway.speakers import SPEAKERS, Speaker
from tests.services.rollout.rollout_kit import until, write_model

HI = user("Hello, who are you?")
NOW = 1_700_000_000.0
# Long enough that two samples are never equal by chance.
NUM_TOKENS = 40
# The order of float32 additions only.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("seeded")
    return Models(tuple(write_model(root / f"v{version}", seed=version, stop_bias=-20.0) for version in range(2)))


@pytest.fixture(scope="module")
def process(models: Models, warm_python: WarmPython) -> Iterator[EngineProcess]:
    engine = EngineProcess(models.paths[0], python=warm_python.path)
    yield engine
    engine.close()


@dataclass
class Interrupting:
    """The policy as it is, and something that happens before one of its pieces."""

    policy: Policy
    before: int = -1
    happening: Callable[[], Any] | None = None
    num_pieces: int = 0

    async def sample(self, input_ids: Sequence[int], **asked: Any) -> Sampled:
        if self.num_pieces == self.before and self.happening is not None:
            await self.happening()
        self.num_pieces += 1
        return await self.policy.sample(input_ids, **asked)


@dataclass
class Place:
    """One engine with version 0 of a job."""

    job: str
    engine: Engine
    policy: Policy
    codec: HermesCodec
    models: Models
    door: EpisodeRouter = field(default_factory=lambda: EpisodeRouter(Keys(SECRET), now=lambda: NOW))
    num_episodes: int = 0

    def label(self, version: int) -> str:
        return f"{self.job}/1/{version}"

    async def switch(self, version: int) -> None:
        await self.engine.pause("retract")
        await self.engine.load_weights(self.models.paths[version], self.label(version))
        await self.engine.resume()

    def conversation(self, records: HeldRecords | None = None, policy: Any = None, **rollout: Any) -> Conversation:
        """A fresh one; with ``records`` it goes on from what another gateway has stored."""
        if records is None:
            self.num_episodes += 1
        key = EpisodeKey(self.job, self.num_episodes, 0)
        lease = LeasedEpisode(key, 0, 0, Split.TRAIN, 0, 0, 1)
        order = quick_order(lease=lease, rollout={"group_size": 2, **rollout})
        return Conversation(self, order, records or HeldRecords(), policy or self.policy)


@dataclass
class Conversation:
    place: Place
    order: Any
    records: HeldRecords
    policy: Policy

    def __post_init__(self) -> None:
        setting = quick_setting(self.records, self.place.codec, self.policy)
        tree = TokenTree(self.order.key, 0, self.order.temperature)
        meter = Meter(Timings(), setting.counters, setting.clock)
        self.counters = setting.counters
        self.episode = AgentEpisode(setting, self.order, tree, meter, lambda: NOW)
        if self.records.payloads and self.records.snapshot is not None:
            kept = TreeSnapshot.together([self.records.snapshot.data, *self.records.snapshot.parts])
            assert kept is not None
            self.episode.restore(self.records.segments(), kept, begins_again=False)

    async def ask(
        self,
        *messages: Message,
        seed: int | None = None,
        speaker: Speaker = SPEAKERS["chat"],
        retry: int = 0,
        num_tokens: int = NUM_TOKENS,
    ) -> Any:
        """Over HTTP, whole."""
        body = speaker.body(messages, max_tokens=num_tokens)
        if seed is not None:
            body = speaker.with_option(body, "seed", seed)
        async with serving(cast(Any, self.place.door)) as gateway:
            with self.place.door.open(self.episode) as key:
                headers = {**speaker.headers, "x-stainless-retry-count": str(retry)}
                headers |= {name: f"Bearer {key}" for name in headers if name.lower() == "authorization"}
                headers |= {name: key for name in headers if name.lower() in ("x-api-key", "x-goog-api-key")}
                return await gateway.http.post(speaker.url(body), json=body, headers=headers)

    async def sampled(self, *messages: Message, **asked: Any) -> list[int]:
        """The ids of the turn that answers."""
        before = set(self.turns())
        answer = await self.ask(*messages, **asked)
        assert answer.status_code == 200, answer.text
        (new,) = set(self.turns()) - before
        return self.turns()[new]

    def turns(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for segment in self.records.segments():
            found.setdefault(segment.turn, []).extend(segment.token_ids[segment.action_mask].tolist())
        return found


@pytest.fixture
async def place(
    process: EngineProcess, models: Models, codec: HermesCodec, store: Store, claim: Claim
) -> AsyncIterator[Place]:
    job, counters = claim.job_id, Counters()
    for version in range(2):
        assert await store.versions.next(job, claim.token) == version
        files = (WeightFile("model.safetensors", 1, "0" * 64),)
        await store.versions.publish(job, claim.token, WeightsManifest(job, version, 1, version, files))
    retrier = Retrier(counters, random.Random(0), Backoff(first_s=0.001, max_s=0.01))
    async with open_engines() as connect:
        table = EngineTable(store.fleet, [process.url], connect, time.monotonic, retrier)
        engines = JobEngines(
            table,
            store.versions,
            job,
            max_staleness=1,
            vocab_size=codec.tokenizer.vocab_size,
            retrier=retrier,
            counters=counters,
            clock=time.monotonic,
            leaving=asyncio.Event(),
        )
        made = Place(job, connect(process.url), engines, codec, models)
        await made.switch(0)
        watching = [asyncio.create_task(table.watch()), asyncio.create_task(engines.watch())]
        await until(lambda: len(engines.usable()) == 1)
        yield made
        for task in watching:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def are_true(models: Models, record: Sequence[Segment]) -> bool:
    """Whether each log-prob is that of the token under the weights that the segment names."""
    behind: list[int] = []
    for segment in record:
        ids = segment.token_ids.tolist()
        num_read = segment.num_tokens - segment.num_actions
        behind += ids[:num_read]
        expected = models.logprobs(segment.version, behind, ids[num_read:], segment.temperature)
        if max_difference(segment.behavior_logprobs[num_read:].tolist(), expected) >= TOLERANCE:
            return False
        behind += ids[num_read:]
    return True


@pytest.mark.parametrize("speaker", SPEAKERS.values(), ids=SPEAKERS)
async def test_the_same_request_with_the_same_seed_draws_the_same_tokens_in_a_fresh_conversation(
    place: Place, speaker: Speaker
) -> None:
    first, second, other, free = [place.conversation() for _ in range(4)]
    drawn = await first.sampled(HI, seed=7, speaker=speaker)
    assert await second.sampled(HI, seed=7, speaker=speaker) == drawn
    assert await other.sampled(HI, seed=8, speaker=speaker) != drawn
    assert await free.sampled(HI, speaker=speaker) != drawn
    assert len(drawn) == NUM_TOKENS
    assert all(are_true(place.models, one.records.segments()) for one in (first, second, other, free))


async def test_without_a_seed_chance_decides(place: Place) -> None:
    assert await place.conversation().sampled(HI) != await place.conversation().sampled(HI)


async def test_a_seed_is_not_said_to_be_ignored_and_must_be_a_number(place: Place) -> None:
    conversation = place.conversation()
    assert "x-gspo-ignored" not in (await conversation.ask(HI, seed=-(2**63))).headers
    refused = await conversation.ask(HI, seed=cast(int, "seven"))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "seed")


async def test_an_answer_in_pieces_is_the_answer_at_once(place: Place) -> None:
    whole, pieces, others = place.conversation(), place.conversation(chunk_tokens=3), place.conversation(chunk_tokens=7)
    drawn = await whole.sampled(HI, seed=7)
    assert await pieces.sampled(HI, seed=7) == drawn
    assert await others.sampled(HI, seed=7) == drawn
    assert [len(one.records.payloads) for one in (whole, pieces, others)] == [1, 14, 6]
    assert are_true(place.models, pieces.records.segments())


async def test_another_gateway_goes_on_with_the_same_tokens(place: Place) -> None:
    drawn = await place.conversation().sampled(HI, seed=7)
    killed = place.conversation(chunk_tokens=5)
    killed.records.calls_left = 6  # two writes and a half: turns and segments are checked one by one
    lost = await killed.ask(HI, seed=7)
    assert lost.status_code == 503
    stored = killed.turns()[0]
    assert 0 < len(stored) < NUM_TOKENS
    killed.records.calls_left = None
    taken_over = place.conversation(killed.records)
    answer = await taken_over.ask(HI, seed=7, retry=1)
    assert answer.status_code == 200
    assert taken_over.turns() == {0: drawn}
    assert are_true(place.models, taken_over.records.segments())


async def test_new_weights_in_mid_answer_sample_their_own_tokens_from_there_on(place: Place) -> None:
    drawn = await place.conversation().sampled(HI, seed=7)
    policy = Interrupting(place.policy, before=4, happening=lambda: place.switch(1))
    switched = place.conversation(chunk_tokens=5, policy=policy)
    found = await switched.sampled(HI, seed=7)
    assert found[:20] == drawn[:20]
    assert found[20:] != drawn[20:]
    record = switched.records.segments()
    assert [(one.version, one.num_actions) for one in record] == [(0, 5)] * 4 + [(1, 5)] * 4
    assert are_true(place.models, record)


async def test_an_equal_request_with_the_same_seed_is_a_branch_with_the_same_tokens(place: Place) -> None:
    conversation = place.conversation()
    drawn = await conversation.sampled(HI, seed=7)
    assert await conversation.sampled(HI, seed=7) == drawn
    assert await conversation.sampled(HI, seed=9) != drawn
    assert conversation.counters.snapshot()["drift/forks_resampled"] == 2
    assert len({one.branch for one in conversation.records.segments()}) == 3


def test_one_seed_is_another_number_in_another_turn_and_none_is_none() -> None:
    tree = TokenTree(EpisodeKey("job", 0, 0), 0, 1.0)
    turns = [tree.begin(0, [1, 2, 3]), tree.begin(1, [1, 2, 3]), tree.begin(2, [1, 2, 4]), tree.begin(3, [1, 2])]
    first, equal, other, shorter = (sampling_seed(TurnRequest((), seed=7), turn) for turn in turns)
    assert first == equal
    assert len({first, other, shorter, sampling_seed(TurnRequest((), seed=8), turns[0])}) == 4
    assert first is not None
    assert 0 <= first < 2**31
    assert sampling_seed(TurnRequest(()), turns[0]) is None
