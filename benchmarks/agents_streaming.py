"""The demo's agent as a service whose every turn is streamed: ``python -m benchmarks.agents_streaming --port N``.

For ``benchmarks.agents_kills``, under a Python that has `openai` and nothing of ours. The package asks again by itself
where nothing was answered yet; where a stream breaks in the middle this agent asks again, with the same key.
"""

from __future__ import annotations

import argparse
import uuid
from collections.abc import AsyncIterable
from typing import Any

import openai

from examples.agent.service import CALCULATE, Episodes, calculated, serve


class Broke(Exception):
    """A stream ended before its answer did."""


class Streaming(Episodes):
    async def answer(self, client: openai.AsyncOpenAI, expression: str) -> str:
        return await answer(client, expression)


async def answer(client: openai.AsyncOpenAI, expression: str) -> str:
    messages: list[Any] = [
        {"role": "system", "content": "Use the calculator. Then answer with the number only."},
        {"role": "user", "content": f"What is {expression}?"},
    ]
    while True:
        said = await ask(client, messages)
        messages.append(said)
        if not said.get("tool_calls"):
            return said["content"] or ""
        for call in said["tool_calls"]:
            result = calculated(call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


async def ask(client: openai.AsyncOpenAI, messages: list[Any]) -> dict[str, Any]:
    key = {"Idempotency-Key": uuid.uuid4().hex}
    while True:
        stream = await client.chat.completions.create(
            model="policy", messages=messages, tools=[CALCULATE], stream=True, extra_headers=key
        )
        try:
            return await together(stream)
        except openai.APIStatusError:
            raise
        except (openai.APIError, OSError, Broke):
            continue
        except Exception as error:
            # Of the package's own HTTP client, whose name is not promised.
            if type(error).__module__.partition(".")[0] not in ("aiohttp", "httpx", "httpx2"):
                raise


async def together(stream: AsyncIterable[Any]) -> dict[str, Any]:
    text, calls, is_whole = "", dict[int, Any](), False
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for piece in choice.delta.tool_calls or ():
                call = calls.setdefault(
                    piece.index, {"id": piece.id, "type": "function", "function": {"name": "", "arguments": ""}}
                )
                call["function"]["name"] += piece.function.name or ""
                call["function"]["arguments"] += piece.function.arguments or ""
            is_whole |= choice.finish_reason is not None
    if not is_whole:
        raise Broke
    said: dict[str, Any] = {"role": "assistant", "content": text or None}
    return said | ({"tool_calls": list(calls.values())} if calls else {})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    serve(Streaming(), parser.parse_args().port)


if __name__ == "__main__":
    main()
