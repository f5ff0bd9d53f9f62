"""What an agent's episode holds in memory: its tokens and a line for each turn, not the requests that it answered."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import random
import tracemalloc
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import pytest

from gspo_core.chat import HermesCodec
from gspo_core.messages import Message, ToolSchema
from services.episodes.policy import Sampled
from services.gateway.agent.plan import LONG_BYTES
from services.gateway.dialects.turns import Refusal, TurnRequest
from tests.services.gateway.gateway_kit import ADD, BabblingPolicy, Bench, read, request, said, take, user
from tests.services.rollout.rollout_kit import answer_of, until

NUM_TURNS = 200
NUM_TOOLS = 60
MIB = 1 << 20
# A request with these tools, read once, has nearly 1 MiB.
BOUND_BYTES = 5 * MIB
# A thread gets a copy of the ids, of four bytes each. In a list of numbers each takes eight, and forty where it is none
# of the few that Python has at hand.
MOST_BYTES_AN_ID = 6


@dataclass
class Laconic:
    """Says the same, and remembers nothing."""

    codec: HermesCodec

    async def sample(
        self,
        input_ids: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float,
        stop_token_ids: Collection[int],
        prefer_engine: str = "",
        sampling_seed: int | None = None,
    ) -> Sampled:
        ids = [*self.codec.tokenizer.encode("I see."), self.codec.stop_ids[0]]
        return answer_of(ids, [-0.5] * len(ids), [(0, 0, len(ids))], "engine-0")


def tools_of_a_coding_agent() -> list[ToolSchema]:
    """About 1 kB each, and read from a request anew."""
    properties = {f"argument_{number}": {"type": "string", "description": "x" * 100} for number in range(8)}
    tools = [
        {"type": "function", "function": {"name": f"tool_{number}", "parameters": {"properties": properties}}}
        for number in range(NUM_TOOLS)
    ]
    return json.loads(json.dumps(tools))


def lives(bench: Bench) -> list[int]:
    """The turns that are held as somebody waits for them."""
    return sorted(bench.episode._live)


async def test_a_turn_is_let_go_once_its_answer_is_delivered_and_is_read_again_from_the_tape(codec: HermesCodec):
    bench = Bench(codec)
    bench.policy.speeches = [bench.speech.call("add", amount=2)]
    ask = request(user("2 and 3?"), tools=(ADD,))
    delivery = await bench.episode.ask(ask)
    first = await read(delivery)
    assert lives(bench) == [0]
    await delivery.delivered()
    assert lives(bench) == []
    again = await bench.episode.ask(replace(ask, is_retry=True))
    assert lives(bench) == [0]
    assert await take(again) == first
    assert (len(bench.policy.served), lives(bench)) == (1, [])


async def test_a_turn_that_nobody_waits_for_is_sampled_to_its_end_and_then_let_go(codec: HermesCodec):
    gate = asyncio.Event()
    bench = Bench(codec, policy=BabblingPolicy(codec, random.Random(0), gate=gate))
    bench.policy.speeches = [bench.speech.say("Five.")]
    ask = request(user("2 and 3?"))
    delivery = await bench.episode.ask(ask)
    delivery.dropped()
    assert lives(bench) == [0]
    gate.set()
    await until(lambda: not lives(bench))
    again = await bench.episode.ask(ask)  # nobody had it
    assert (await take(again)).text == "Five."
    assert len(bench.policy.served) == 1


async def test_a_turn_given_to_two_clients_is_held_until_both_are_done(codec: HermesCodec):
    bench = Bench(codec)
    bench.policy.speeches = [bench.speech.say("Five.")]
    ask = request(user("2 and 3?"), repeat_key="once")
    first, second = await bench.episode.ask(ask), await bench.episode.ask(ask)
    await take(first)
    assert lives(bench) == [0]
    second.dropped()
    assert lives(bench) == []


async def test_a_failed_attempt_lets_go_of_all_its_turns(codec: HermesCodec):
    gate = asyncio.Event()
    bench = Bench(codec, policy=BabblingPolicy(codec, random.Random(0), gate=gate))
    waited, left = [await bench.episode.ask(request(user(text))) for text in ("one", "two")]
    left.dropped()
    await bench.episode.abandon()
    assert lives(bench) == [0]
    with pytest.raises(Refusal):
        await waited.whole()
    assert lives(bench) == []


async def test_two_hundred_turns_with_sixty_tools_leave_little_behind(codec: HermesCodec):
    bench = Bench(codec, policy=Laconic(codec), context_tokens=1_000_000)
    messages: list[Message] = [user("begin")]

    async def turn() -> None:
        tools = tuple(tools_of_a_coding_agent())
        digest = hashlib.sha256(json.dumps([messages, tools]).encode()).hexdigest()
        ask = TurnRequest(tuple(json.loads(json.dumps(messages))), tools, digest=digest)
        answer = await take(await bench.episode.ask(ask))
        messages.extend([said(answer), user("go on")])

    await turn()
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(NUM_TURNS):
            await turn()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(bench.episode.history.entries) == NUM_TURNS + 1
    assert after - before < BOUND_BYTES


async def test_a_turn_behind_a_long_history_makes_no_number_of_each_id(codec: HermesCodec):
    bench = Bench(codec, policy=Laconic(codec), context_tokens=1_000_000, limits={"max_episode_tokens": 1_000_000})
    text = user("word " * (LONG_BYTES // 5))
    answer = await take(await bench.episode.ask(request(text)))
    ask = request(text, said(answer), user("go on"))
    num_ids = len(bench.tree.turns[0].branch.ids)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        assert await bench.episode._plan.encoded(ask) is not None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_ids > LONG_BYTES // 2
    assert peak - before < MOST_BYTES_AN_ID * num_ids
