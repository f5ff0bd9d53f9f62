"""pydantic-ai plays, over the `openai` package and both of its dialects: an agent that is run again with the messages
of its runs before, whole or cut short; a helper is an agent of its own behind a tool.

python play_pydantic_ai.py AT_ONCE
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from openai import AsyncOpenAI
from pydantic_ai import Agent
from pydantic_ai.messages import ModelRequest, ModelResponse, UserPromptPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.profiles import ModelProfile
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits
from scenario import MISHAPS, Call, Report, serve, shuffled, speak_calls, words

MOST_TURNS = 400
# What is written is plain text at the gateway, and thoughts are told as such. Else the package puts invisible
# characters into what spells a token, and takes what stands behind a spelled <think> for a thought: also of what the
# policy has said, which then comes back changed.
TAGS = ("<this-is-no-thought>", "</this-is-no-thought>")
PROFILE = ModelProfile(may_tokenize_special_tokens_in_content=False, thinking_tags=TAGS)


class Play:
    def __init__(self, call: Call, client: AsyncOpenAI) -> None:
        self.call = call
        self.rng = rng = call.rng
        self.report = Report()
        kind: Any = rng.choice((OpenAIChatModel, OpenAIResponsesModel))
        self.model = kind("policy", provider=OpenAIProvider(openai_client=client), profile=PROFILE)
        self.is_stream = rng.random() < 0.5
        self.messages: list[Any] = []
        self.agent = self._agent(call.instructions(rng, "Be brief. "), self._note())

    def _agent(self, told: str, *tools: Any) -> Any:
        def lookup(query: str, limit: int = 5) -> str:
            """Looks something up."""
            return words(self.rng, "Found: ")

        return Agent(self.model, instructions=told, tools=[lookup, *tools], retries=MOST_TURNS)

    def _note(self) -> Any:
        if "sub_agent" not in self.call.features:

            def note(text: str) -> str:
                """Writes a note."""
                return words(self.rng)

            return note
        helper = self._agent(words(self.rng, "You help. "))

        async def asked(text: str) -> str:
            """Asks a helper."""
            self.report.branches["sub_agent"] += 1
            found = await self._ask(helper, words(self.rng, f"{text} "), [])
            return str(found.output)

        asked.__name__ = "note"
        return asked

    async def _ask(self, agent: Any, prompt: str, before: list[Any]) -> Any:
        how: dict[str, Any] = {"message_history": before, "usage_limits": UsageLimits(request_limit=MOST_TURNS)}
        if self.is_stream:
            how["event_stream_handler"] = _to_its_end
        awaited, self.report.num_awaited = self.report.num_awaited, 0  # of its first turn, and not of a helper's
        found = await agent.run(prompt, **how)
        self.report.num_awaited = awaited
        for message in found.new_messages():
            if isinstance(message, ModelResponse):
                self.report.heard(len(message.tool_calls))
        return found

    async def run(self, before: list[Any] | None = None, prompt: str = "") -> str:
        """Until it answers. Returns what it was asked."""
        prompt = prompt or words(self.rng)
        found = await self._ask(self.agent, prompt, self.messages if before is None else before)
        self.messages = found.all_messages()
        return prompt

    async def play(self) -> Report:
        await self.run()
        for feature in self.call.features:
            await getattr(self, f"do_{feature}")()
        while self.report.turns < self.call.least_turns or self.rng.random() < 0.5:
            await self.run()
        return self.report

    async def do_parallel(self) -> None:
        speak_calls(self.call, self.report)
        await self.run()

    async def do_retry(self) -> None:
        for mishap in shuffled(self.rng, MISHAPS):
            self.call.direct(mishap=mishap)
            self.report.retries += 1
            await self.run()

    async def do_sub_agent(self) -> None:
        self.call.direct(cues=["call:note=text"])
        await self.run()

    async def do_edited(self) -> None:
        before = self.messages
        await self.run()
        self.report.branches["edited_history"] += 1
        await self.run(before)

    async def do_best_of(self) -> None:
        before = self.messages
        prompt = await self.run()
        self.report.branches["resampled"] += 1
        await self.run(before, prompt)

    async def do_compacted(self) -> None:
        await self.run()  # else there is as little behind it as before
        short = ModelRequest([UserPromptPart(words(self.rng, "In short: "))])
        self.report.branches["compacted"] += 1
        await self.run([short, self.messages[-1]])


async def _to_its_end(_: Any, events: Any) -> None:
    async for _event in events:
        pass


async def _play(call: Call) -> Report:
    async with AsyncOpenAI(base_url=call.base_url, api_key=call.api_key, timeout=300) as client:
        return await Play(call, client).play()


def play(call: Call) -> Report:
    return asyncio.run(_play(call))


if __name__ == "__main__":
    serve(play, int(sys.argv[1]))
