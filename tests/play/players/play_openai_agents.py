"""The `openai-agents` package plays: an agent with tools that runs until it answers, a helper that is one of its tools,
and a second agent that it hands over to; on either of OpenAI's dialects, whole and as streams.

python play_openai_agents.py AT_ONCE
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunHooks,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel
from scenario import MISHAPS, Call, Report, serve, shuffled, speak_calls, words

Item = Any


class Note(BaseModel):
    text: str


class Watching(RunHooks):
    """Counts what the package does."""

    def __init__(self, report: Report) -> None:
        self.report = report

    async def on_llm_end(self, context: Any, agent: Any, response: Any) -> None:
        self.report.heard(sum(one.type == "function_call" for one in response.output))

    async def on_agent_start(self, context: Any, agent: Any) -> None:
        if agent.name == "Helper":
            self.report.branches["sub_agent"] += 1


class Play:
    def __init__(self, call: Call, client: AsyncOpenAI) -> None:
        self.call = call
        self.rng = call.rng
        self.report = Report()
        self.hooks = Watching(self.report)
        rng = self.rng
        kind: Any = rng.choice((OpenAIChatCompletionsModel, OpenAIResponsesModel))
        self.model = kind("policy", client)
        self.stream = rng.random() < 0.5
        self.agent = self._agent()
        self.last: Any = None
        """The result of the last run."""
        self.items: list[Item] = [self._user()]

    def _agent(self) -> Agent[Any]:
        rng = self.rng

        @function_tool
        def lookup(query: str, limit: int = 5) -> str:
            """Looks something up.

            Args:
                query: what to look up
                limit: how much of it
            """
            return words(rng, "Found: ")

        @function_tool
        def note(text: str) -> str:
            """Writes a note."""
            return words(rng)

        more: dict[str, Any] = {}
        if "sub_agent" in self.call.features:
            helper = Agent(name="Helper", instructions=words(rng, "You help. "), model=self.model, tools=[lookup])
            note = helper.as_tool(
                "note", "Asks a helper.", parameters=Note, hooks=self.hooks, input_builder=self._asked
            )
        if "handoff" in self.call.features:
            more["handoffs"] = [Agent(name="Poet", instructions=words(rng, "In verse. "), model=self.model)]
        settings = ModelSettings(tool_choice=rng.choice((None, "auto", "required")))
        return Agent(
            name="Clerk",
            instructions=self.call.instructions(rng, "Be brief. "),
            model=self.model,
            tools=[lookup, note],
            model_settings=settings,
            **more,
        )

    def _asked(self, given: Any) -> str:
        """What the helper is asked, never the same twice."""
        return words(self.rng, f"{given['params']} ")

    def _user(self) -> Item:
        return {"role": "user", "content": words(self.rng)}

    async def run(self) -> None:
        """Until the agent answers; its words and a question of ours are added."""
        given = {"starting_agent": self.agent, "input": list(self.items), "hooks": self.hooks, "max_turns": 60}
        if self.stream:
            self.last = Runner.run_streamed(**given)
            async for _ in self.last.stream_events():
                pass
        else:
            self.last = await Runner.run(**given)
        self.items = [*self.last.to_input_list(), self._user()]

    async def play(self) -> Report:
        await self.run()
        for feature in self.call.features:
            await getattr(self, f"do_{feature}")()
        while self.report.turns < self.call.least_turns or self.rng.random() < 0.5:
            await self.run()
        return self.report

    async def do_parallel(self) -> None:
        speak_calls(self.call, self.report)
        self.agent.model_settings.tool_choice = None
        await self.run()

    async def do_retry(self) -> None:
        for mishap in shuffled(self.rng, MISHAPS):
            self.call.direct(mishap=mishap)
            self.report.retries += 1
            await self.run()

    async def do_edited(self) -> None:
        before = self.items[:-1]
        await self.run()
        self.items = [*before, self._user()]
        self.report.branches["edited_history"] += 1
        await self.run()

    async def do_sub_agent(self) -> None:
        self.call.direct(cues=["call:note=text"])
        await self.run()

    async def do_best_of(self) -> None:
        items = list(self.items)
        await self.run()
        kept = self.items
        self.items = items
        self.report.branches["resampled"] += 1
        await self.run()
        self.items = self.rng.choice((kept, self.items))

    async def do_compacted(self) -> None:
        await self.run()
        answer = self.last.raw_responses[-1].to_input_items()
        self.items = [{"role": "user", "content": words(self.rng, "In short: ")}, *answer, self._user()]
        # Where nothing is left of the conversation, nobody can tell a summary of it from another question.
        self.report.branches["compacted" if any(map(_is_message, answer)) else "sub_agent"] += 1
        await self.run()

    async def do_handoff(self) -> None:
        """The second agent has other instructions and the same conversation; then the first one reads its words."""
        self.agent.model_settings.tool_choice = None
        self.call.direct(cues=["call:transfer_to_poet", "text"])
        self.report.branches["edited_history"] += 1
        await self.run()
        self.report.branches["assistant_message"] += 1
        await self.run()


def _is_message(item: Any) -> bool:
    """Responses have one for an answer without a word too; it is sent back and says whose it is."""
    return bool(item["type"] == "message")


async def play_one(call: Call) -> Report:
    async with AsyncOpenAI(base_url=call.base_url, api_key=call.api_key, timeout=300) as client:
        return await Play(call, client).play()


def play(call: Call) -> Report:
    return asyncio.run(play_one(call))


if __name__ == "__main__":
    set_tracing_disabled(True)
    serve(play, int(sys.argv[1]))
