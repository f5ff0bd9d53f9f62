"""A world made larger is still the world, with a longer prompt, more tools, more turns and one long observation."""

from __future__ import annotations

from pathlib import Path

from gspo_core.chat import load_codec
from gspo_core.env import CallStatus, ParsedTurn, ToolCall, load_environment
from gspo_core.types import Split, StopReason
from tests.core.qwen_vocabulary import qwen_vocabulary_or_skip
from tests.ladder.speaker import cut
from tests.ladder.world import GO_ON, WORD

CALCULATOR = {"inner": "environments.calculator:Calculator"}
SIZED = f"{Path(__file__).with_name('world.py')}:Sized"


def call(name: str, **arguments: str) -> ToolCall:
    return ToolCall(name, {**arguments}, CallStatus.OK, "", 0, 1)


async def test_the_world_inside_is_played_and_what_is_added_is_answered() -> None:
    sizes = {"prompt_words": 100, "observation_words": 50, "num_turns": 4, "num_tools": 5}
    environment = load_environment(SIZED, {**CALCULATOR, **sizes})
    session = environment.session()
    start = await session.start(await environment.task(Split.TRAIN, 0), 0)
    assert [tool["function"]["name"] for tool in start.tools] == ["calculate", *(f"extra_{n}" for n in range(4))]
    assert str(start.messages[-1]["content"]).endswith(WORD * 100)
    calls = (call("calculate", expression="2+3"), call("extra_0"), call("calculate", expression="4*5"))
    first = await session.act(ParsedTurn("", calls))
    assert [message["content"] for message in first.messages] == ["5", GO_ON, "20" + WORD * 50]
    said = await session.act(ParsedTurn("that ends the calculator"))
    assert (said.done, [message["content"] for message in said.messages]) == (False, [GO_ON])
    beyond = await session.act(ParsedTurn("", (call("calculate", expression="1+1"),)))
    assert [message["role"] for message in beyond.messages] == ["tool"]
    last = await session.act(ParsedTurn("", (call("extra_3"),)))
    assert last.stop_reason is StopReason.COMPLETED
    reward, _ = await session.score()
    assert 0 <= reward < 1
    await session.close()


def test_a_sentence_is_cut_into_different_tokens_that_spell_it() -> None:
    codec = load_codec(qwen_vocabulary_or_skip())
    call_text = '{"name":"calculate","arguments":{"expression":"2+3"}}'
    from tokenizers import Tokenizer

    start, turns = cut(Tokenizer.from_file(str(qwen_vocabulary_or_skip() / "tokenizer.json")), call_text)
    assert codec.render([{"role": "user", "content": "x"}])[-1] == start
    words, acting = turns
    assert len({start, *words, *acting}) == 1 + len(words) + len(acting) - 1  # both end alike
    assert codec.tokenizer.decode(list(acting)) == f"<tool_call>{call_text}</tool_call><|im_end|>"
    (found,) = codec.parse(list(acting)).calls
    assert (found.name, found.arguments) == ("calculate", {"expression": "2+3"})
