"""Why a branch began: each way in which agents leave a conversation has one name, and others have none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from gspo_core.chat import HermesCodec
from gspo_core.messages import Message
from services.episodes.matching import MAX_QUOTED, MAX_QUOTING_CHARS, Rewritten
from services.gateway.dialects.anthropic_messages import AnthropicMessages
from services.gateway.dialects.turns import Answer, TurnRequest
from tests.services.gateway.gateway_kit import Bench, judge, request, said, take, user
from tests.services.gateway.test_gateway_episode import ADD, bench

INSTRUCTIONS: Message = {"role": "system", "content": "You mend programs. Be brief."}
OTHERS: Message = {"role": "system", "content": "You search the web."}
TASK = user("<reminder>be kind</reminder>Mend the parser.")
SECOND = user("And the tests?")
SUMMARY = "We mended the parser, and its tests are still to be written."


@dataclass(frozen=True)
class Thread:
    """What an agent and its policy have said: two turns, behind which it may go on."""

    first: Answer
    second: Answer

    @property
    def messages(self) -> list[Message]:
        return [INSTRUCTIONS, TASK, said(self.first), SECOND, said(self.second)]


Asking = Callable[[Thread], TurnRequest]


def asks(*messages: Message, **fields: Any) -> TurnRequest:
    return request(*messages, **fields)


SITUATIONS: dict[str, tuple[str, Asking]] = {
    "it goes on": ("", lambda t: asks(*t.messages, user("more"))),
    "another sample of the same request": (Rewritten.RESAMPLED, lambda t: asks(*t.messages[:4])),
    "a retry": ("", lambda t: replace(asks(*t.messages[:4]), is_retry=True)),
    "it goes on from an earlier turn": (
        Rewritten.EDITED_HISTORY,
        lambda t: asks(*t.messages[:3], user("Something else?")),
    ),
    "an old message is edited": (
        Rewritten.EDITED_HISTORY,
        lambda t: asks(INSTRUCTIONS, TASK, t.messages[2], user("And the docs?"), t.messages[4], user("more")),
    ),
    "a reminder moved": (
        Rewritten.EDITED_HISTORY,
        lambda t: asks(INSTRUCTIONS, user("Mend the parser."), *t.messages[2:], user("more")),
    ),
    "a sub-agent with instructions of its own": (Rewritten.SUB_AGENT, lambda t: asks(OTHERS, user("Look for x."))),
    "a sub-agent with the same instructions": (Rewritten.SUB_AGENT, lambda t: asks(INSTRUCTIONS, user("Look for x."))),
    "a sub-agent that is handed what was said": (
        Rewritten.SUB_AGENT,
        lambda t: asks(OTHERS, user(f"Judge this: {t.second.text}")),
    ),
    "a summary in place of all": (
        Rewritten.COMPACTED,
        lambda t: asks(INSTRUCTIONS, user(f"What happened: {t.second.text} Go on.")),
    ),
    "a summary before the last messages": (
        Rewritten.COMPACTED,
        lambda t: asks(INSTRUCTIONS, user("The parser was mended."), *t.messages[3:], user("more")),
    ),
    "a tool more": (Rewritten.TOOLS_CHANGED, lambda t: asks(*t.messages, user("more"), tools=(ADD,))),
    "words put into the policy's mouth": (
        "assistant_message",
        lambda t: asks(*t.messages, user("more"), {"role": "assistant", "content": "made up"}, user("go on")),
    ),
    "a nonce of a harness": ("", lambda t: _of_claude_code(t, nonce="b2")),
}


def _of_claude_code(thread: Thread, nonce: str) -> TurnRequest:
    """As its package sends it: the first block of its instructions differs in each request."""
    bill = f"x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={nonce};"
    blocks = [{"type": "text", "text": bill}, {"type": "text", "text": INSTRUCTIONS["content"]}]
    told = [{"role": one["role"], "content": one["content"]} for one in thread.messages[1:]]
    body: Any = {"model": "m", "max_tokens": 100, "system": blocks, "messages": [*told, user("more")]}
    return AnthropicMessages().read(body, {}).ask


@pytest.mark.parametrize(("reason", "asking"), SITUATIONS.values(), ids=SITUATIONS)
async def test_each_way_to_leave_a_conversation_has_its_name(codec: HermesCodec, reason: str, asking: Asking) -> None:
    one = bench(codec, "It is done.", SUMMARY, "x")
    thread = await _played(one)
    await take(await one.episode.ask(asking(thread)))
    named = {name for name in one.counters if name.startswith("drift/forks_")}
    assert named == ({f"drift/forks_{reason}"} if reason else set())
    record = one.records.segments()
    judge(record, one.policy.served)
    assert [one.asked.reason for one in record if one.asked is not None and one.asked.reason] == [reason] * bool(reason)


async def test_the_newest_answers_are_looked_for_in_the_beginning_of_a_long_first_message(codec: HermesCodec) -> None:
    """What is searched holds the event loop."""
    num_turns = MAX_QUOTED + 3
    speeches = [f"Of the files, number {number} was read." for number in range(num_turns)]
    one = bench(codec, *speeches, *("x" * 3), context_tokens=200_000, limits={"max_episode_tokens": 10**7})
    for number in range(num_turns):
        await one.ask(INSTRUCTIONS, user(f"Read file {number}."))

    async def why(text: str) -> str:
        await one.ask(INSTRUCTIONS, user(text))
        return one.episode.history.entries[max(one.episode.history.entries)].reason

    # Each is a turn itself, and one of the newest in the next.
    assert await why(f"{'y ' * (MAX_QUOTING_CHARS // 2)}{speeches[-1]}") == Rewritten.SUB_AGENT
    assert await why(f"{speeches[3]} {'y' * MAX_QUOTING_CHARS}") == Rewritten.SUB_AGENT
    assert await why(f"{speeches[-1]} {'y ' * MAX_QUOTING_CHARS}") == Rewritten.COMPACTED


async def _played(one: Bench) -> Thread:
    first = await one.ask(INSTRUCTIONS, TASK)
    return Thread(first, await one.ask(INSTRUCTIONS, TASK, said(first), SECOND))
