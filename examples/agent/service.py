"""The agent of this folder as a service of its own, written with the `openai` package: it knows nothing of training.

    pip install 'openai[aiohttp]'
    python -m examples.agent.service --port 9000

It needs nothing of ours but the calculator, which is its tool. An episode is played once, however often its start is
sent: who sends it again is given the same end. `examples/agent/job_service.yaml` names it by its URL.
"""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
from aiohttp import web

from environments.calculator import evaluate

# A policy that is learned from may be away for a while, when its weights or its gateway change.
MAX_RETRIES = 30
MAX_TASK_BYTES = 64 << 20
CALCULATE: Any = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Compute an expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "numbers joined by + - *"}},
            "required": ["expression"],
        },
    },
}


async def answer(client: openai.AsyncOpenAI, expression: str) -> str:
    """The whole agent: it asks, calculates where it is told to, and ends with what is left to say."""
    messages: list[Any] = [
        {"role": "system", "content": "Use the calculator. Then answer with the number only."},
        {"role": "user", "content": f"What is {expression}?"},
    ]
    while True:
        said = await client.chat.completions.create(model="policy", messages=messages, tools=[CALCULATE])
        message = said.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": calculated(call.function.arguments)})


def calculated(arguments: str) -> str:
    try:
        return str(evaluate(json.loads(arguments)["expression"]))
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error}"


class Episodes:
    """Each is played when it is first asked for; who asks for it again waits for the same end."""

    _client: openai.AsyncOpenAI

    def __init__(self) -> None:
        self._ends: dict[str, asyncio.Task[str]] = {}

    async def open(self, _: web.Application) -> AsyncIterator[None]:
        """One client for all: its connections are kept, and each episode has an address and a key of its own."""
        http = openai.DefaultAioHttpClient()
        async with openai.AsyncOpenAI(
            base_url="http://unused", api_key="unused", max_retries=MAX_RETRIES, http_client=http
        ) as self._client:
            yield

    async def start(self, request: web.Request) -> web.Response:
        try:
            said = await self.end_of(request.headers["Idempotency-Key"], await request.json())
        except openai.APIError as error:
            return web.json_response({"error": str(error)}, status=500)
        return web.json_response({"answer": said})

    async def end_of(self, name: str, start: dict[str, Any]) -> str:
        if name not in self._ends:
            self._ends[name] = asyncio.create_task(self.play(start))
        return await asyncio.shield(self._ends[name])  # it is played on where who asked goes away

    async def play(self, start: dict[str, Any]) -> str:
        client = self._client.with_options(base_url=start["base_url"], api_key=start["api_key"])
        try:
            return await self.answer(client, start["task"]["expression"])
        except openai.BadRequestError:  # beyond a limit of the episode
            return ""

    async def answer(self, client: openai.AsyncOpenAI, expression: str) -> str:
        return await answer(client, expression)


def serve(episodes: Episodes, port: int, *, handle_signals: bool = True) -> None:
    service = web.Application(client_max_size=MAX_TASK_BYTES)
    service.router.add_post("/", episodes.start)
    service.cleanup_ctx.append(episodes.open)
    how = {"handle_signals": handle_signals, "shutdown_timeout": 1.0, "print": None, "access_log": None}
    web.run_app(service, host="127.0.0.1", port=port, **how)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.agent.service")
    parser.add_argument("--port", type=int, default=9000)
    serve(Episodes(), parser.parse_args().port)


if __name__ == "__main__":
    main()
