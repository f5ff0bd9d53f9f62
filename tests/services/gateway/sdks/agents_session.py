"""Run under a Python that has `openai-agents` and nothing of ours: an agent with tools and a second one that it hands
over to, on either of OpenAI's dialects, whole and as a stream.

python agents_session.py BASE_URL KEY
"""

from __future__ import annotations

import asyncio
import json
import sys

from agents import (
    Agent,
    Model,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI


@function_tool
def add(a: float, b: float) -> str:
    """Adds.

    Args:
        a: one number
        b: another number
    """
    return str(a + b)


@function_tool
def now() -> str:
    """What time it is."""
    return "noon"


async def run(model: Model, *, is_stream: bool) -> str:
    poet = Agent(name="Poet", instructions="Answer in verse.", model=model)
    agent = Agent(name="Clerk", instructions="Be brief.", model=model, tools=[add, now], handoffs=[poet])
    if not is_stream:
        return str((await Runner.run(agent, "What is 2 + 3?")).final_output)
    streamed = Runner.run_streamed(agent, "What is 2 + 3?")
    async for _ in streamed.stream_events():
        pass
    return str(streamed.final_output)


async def main() -> None:
    base_url, key = sys.argv[1:]
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{base_url}/v1", api_key=key)
    models = (OpenAIChatCompletionsModel("policy", client), OpenAIResponsesModel("policy", client))
    print(json.dumps([await run(model, is_stream=flag) for model in models for flag in (False, True)]))


if __name__ == "__main__":
    asyncio.run(main())
