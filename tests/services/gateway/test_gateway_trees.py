"""Any tree of requests, with retries, lost answers and gateways that die: what is stored is what was sampled."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gspo_core.chat import HermesCodec
from gspo_core.messages import Message
from services.episodes.reading import read as read_turn
from services.episodes.snapshots import TreeSnapshot
from services.gateway.dialects.turns import AUTO, Answer, Refusal, ToolChoice, TurnRequest
from tests.services.gateway.gateway_kit import (
    ADD,
    BabblingPolicy,
    Bench,
    HeldRecords,
    judge,
    read,
    request,
    result,
    said,
    user,
)

CHOICES = {
    "must_call": ToolChoice("required"),
    "must_add": ToolChoice("required", "add"),
    "no_calls": ToolChoice("none"),
}
MOVES = ("go_on", "resample", "edit", "sub_agent", "compact", "other_tools", "speak_for_it", *CHOICES)
Move = tuple[str, int, bool]


@dataclass
class Agent:
    """Keeps every conversation that it ever had, and asks for more of any of them."""

    codec: HermesCodec
    policy: BabblingPolicy
    records: HeldRecords = field(default_factory=HeldRecords)
    heard: dict[str, tuple[TurnRequest, Answer]] = field(default_factory=dict)
    conversations: list[list[Message]] = field(default_factory=lambda: [[user("begin")]])
    num_lives: int = 0
    sure: set[str] = field(default_factory=set)
    """Answers whose delivery was written down by a gateway that lived."""

    def __post_init__(self) -> None:
        self.bench = self._born()

    def _born(self) -> Bench:
        self.records.calls_left = None
        bench = Bench(self.codec, self.records, self.policy, rollout={"group_size": 2, "chunk_tokens": 5})
        kept = self.records.snapshot
        if kept is not None:
            tree = TreeSnapshot.together([kept.data, *kept.parts])
            assert tree is not None
            assert tree.covers(self.records.segments())
            bench.episode.restore(self.records.segments(), tree, begins_again=False)
        self.num_lives += 1
        return bench

    async def play(self, rounds: Sequence[tuple[Sequence[Move], int | None]]) -> None:
        """Each round asks all its moves at once; the gateway dies after so many writes, if a number is given."""
        for moves, writes in rounds:
            self.records.calls_left = writes
            asks = [self._ask(move) for move in moves]
            await asyncio.gather(
                *(self._until_heard(ask, is_lost=move[2]) for ask, move in zip(asks, moves, strict=True))
            )
        await self.bench.episode.seal()

    async def _until_heard(self, ask: TurnRequest, *, is_lost: bool) -> None:
        while True:
            bench = self.bench
            try:
                delivery = await bench.episode.ask(ask)
                answer = await read(delivery)
            except Refusal as refusal:
                if not refusal.may_retry:
                    raise
                await self._be_brought_back(bench)
                ask = request(
                    *ask.messages, tools=ask.tools, choice=ask.choice, is_retry=True, max_tokens=ask.max_tokens
                )
                continue
            if is_lost:  # its connection breaks once
                delivery.dropped()
                is_lost = False
                continue
            await delivery.delivered()
            if not bench.episode.failure.done():
                self.sure.add(answer.id)
            known = self.heard.setdefault(answer.id, (ask, answer))
            assert known[1].text == answer.text
            assert known[1].calls == answer.calls
            follow = [result(answer, "1", place) for place in range(len(answer.calls))] or [user("and then?")]
            self.conversations.append([*ask.messages, said(answer), *follow])
            return

    async def _be_brought_back(self, dead: Bench) -> None:
        if self.bench is dead:
            self.bench = self._born()
            await dead.episode.abandon()

    def _ask(self, move: Move) -> TurnRequest:
        name, which, _ = move
        messages = list(self.conversations[which % len(self.conversations)])
        if name == "edit":
            messages[-1] = user(f"rather {which}")
        elif name == "sub_agent":
            messages = [{"role": "system", "content": f"sub {which}"}, user("do")]
        elif name == "compact":
            messages = [user("summary"), *messages[-1:]]
            messages = [one for one in messages if one["role"] == "user"]
        elif name == "speak_for_it":
            messages += [{"role": "assistant", "content": "I said."}, user("did you?")]
        elif name == "resample":
            messages = list(messages)
        tools = () if name == "other_tools" else (ADD,)
        return request(*messages, tools=tools, choice=CHOICES.get(name, AUTO), max_tokens=12)


move = st.tuples(st.sampled_from(MOVES), st.integers(0, 1000), st.booleans())
rounds = st.lists(
    st.tuples(st.lists(move, min_size=1, max_size=4), st.none() | st.integers(0, 8)), min_size=1, max_size=6
)


def check(agent: Agent) -> None:
    record = agent.records.segments()
    judge(record, agent.policy.served)
    tree, history = agent.bench.tree, agent.bench.episode.history
    had = history.had()
    for name, (ask, answer) in agent.heard.items():
        number = int(name.rsplit("-", 1)[1])
        assert number in had or name not in agent.sure
        turn = tree.turns[number]
        stored = [
            token
            for segment in record
            if segment.turn == number
            for token in segment.token_ids[segment.action_mask].tolist()
        ]
        assert stored == list(turn.sampled)
        begun = agent.codec.call_opening(ask.choice.name) if ask.choice.mode == "required" else []
        shown = read_turn(agent.codec, [*begun, *stored], ask.tools, gives_calls=ask.choice.mode != "none")
        assert (shown.text, shown.calls) == (answer.text, answer.calls)
        assert answer.usage.num_sampled_tokens == len(stored)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(rounds=rounds, seed=st.integers(0, 2**32))
def test_any_tree_is_stored_as_it_was_sampled(codec: HermesCodec, rounds: Any, seed: int) -> None:
    async def run() -> Agent:
        agent = Agent(codec, BabblingPolicy(codec, random.Random(seed)))
        await agent.play(rounds)
        return agent

    check(asyncio.run(run()))


def test_a_gateway_that_dies_at_any_write_loses_and_doubles_nothing(codec: HermesCodec) -> None:
    """The same three rounds, killed after each number of writes there are."""
    plan: list[tuple[list[Move], None]] = [
        ([("go_on", 0, False)], None),
        ([("go_on", 1, False), ("resample", 0, True)], None),
        ([("go_on", 2, False), ("edit", 1, False), ("sub_agent", 7, False)], None),
    ]

    async def run(kill: tuple[int, int]) -> Agent:
        agent = Agent(codec, BabblingPolicy(codec, random.Random(5)))
        await agent.play([(moves, kill[1] if place == kill[0] else None) for place, (moves, _) in enumerate(plan)])
        return agent

    lives = 0
    for place in range(len(plan)):
        for writes in range(12):
            agent = asyncio.run(run((place, writes)))
            check(agent)
            assert len(agent.heard) >= 5  # a retry of what never came here may get the equal turn before it
            lives += agent.num_lives
    assert lives > 2 * 36 - 18  # most of them did die
