"""Episodes of a random policy, played in every dialect: what is stored is what was sampled, in no branch too many.

The packages that agents are written with play the same: `make test-agents`, and `python -m tests.play` at length.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from gspo_core.chat import HermesCodec, load_tokenizer
from gspo_core.env import Llm
from tests.core.qwen_vocabulary import qwen_vocabulary_or_skip
from tests.play.plain import Plain
from tests.play.players.scenario import ByHand, Call, Report
from tests.play.stage import set_up
from tests.play.tasks import LONGEST, MANY, SHORTEST, at_length, tasks
from tests.play.verdict import tally

CALL_BEGINS = "{"
FEATURES = ("parallel", "retry", "edited", "sub_agent", "best_of", "compacted", "other_tools", "written_back")


@pytest.fixture(scope="module")
def codec() -> HermesCodec:
    return HermesCodec(load_tokenizer(qwen_vocabulary_or_skip()))


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages", "gemini"])
async def test_random_episodes_are_stored_as_they_were_sampled(redis_client: Redis, codec: HermesCodec, dialect: str):
    seed = int(os.environ.get("GSPO_TEST_SEED", random.randrange(2**32)))
    print(f"seed {seed}: GSPO_TEST_SEED={seed} plays the same")

    async def play(task: Mapping[str, Any], llm: Llm) -> Mapping[str, Any]:
        call = Call(dict(task), llm.base_url, llm.api_key)
        by_hand = ByHand(call, lambda system: Plain(dialect, call, system))
        return (await asyncio.to_thread(by_hand.play)).as_json()

    async with set_up(redis_client, codec, seed, play) as stage:
        found = tally(await stage.play(tasks(seed, 10, FEATURES), at_once=4))
    assert found.faults == []
    assert found.retries > 0
    assert found.parallel > 0
    assert set(found.branches) == {"edited_history", "sub_agent", "resampled", "compacted", "tools_changed"}


async def test_a_branch_that_a_stop_text_begins_has_its_tokens(redis_client: Redis, codec: HermesCodec):
    async def play(task: Mapping[str, Any], llm: Llm) -> Mapping[str, Any]:
        call = Call(dict(task), llm.base_url, llm.api_key)
        return (await asyncio.to_thread(ask_for_nothing, call)).as_json()

    def ask_for_nothing(call: Call) -> Report:
        by_hand = ByHand(call, lambda system: Plain("chat", call, system))
        for system, stop in (("You are careful.", []), ("You help.", [CALL_BEGINS])):
            chat = by_hand.begin(system)
            chat.user("Hello.")
            call.direct(cues=["calls:1"])
            by_hand.ask(chat, choice="required", max_tokens=None, stop=stop)
        return replace(by_hand.report, branches=Counter(sub_agent=1), stops=True)

    async with set_up(redis_client, codec, 0, play) as stage:
        found = tally(await stage.play([{"number": 0, "features": [], "seed": 0, "turns": 2}], at_once=1))
    assert found.faults == []
    assert found.turns == 2
    assert found.branches == {"sub_agent": 1}
    assert found.tokens > 0


def test_each_feature_happens_in_every_ten_episodes():
    drawn = tasks(random.randrange(2**32), 200, FEATURES)
    for first in range(0, 200, 10):
        assert {feature for task in drawn[first : first + 10] for feature in task["features"]} == set(FEATURES)


def test_at_length_prompts_have_every_size():
    drawn = at_length(1, tasks(1, 50, FEATURES))
    sizes = [task["prompt_tokens"] for task in drawn]
    assert sizes[:2] == [SHORTEST, LONGEST]
    assert all(SHORTEST <= size <= LONGEST for size in sizes)
    assert {task["turns"] for task in drawn} == {MANY}
