"""smolagents plays: agents that call tools (and ask for a call each time), agents that write code, and a helper that
another one manages. Those that call tools tell the policy later what it did in words of their own, so its turns are
branches; those that write code put the text that ended an answer behind it, and words of their own behind that.

python play_smolagents.py AT_ONCE
"""

from __future__ import annotations

import json
import sys
from typing import Any

from openai import DefaultHttpxClient
from scenario import MISHAPS, Call, Report, Seen, serve, shuffled, speak_calls, words
from smolagents import CodeAgent, LogLevel, OpenAIModel, Tool, ToolCallingAgent

MOST_STEPS = 12
QUIET = {"verbosity_level": LogLevel.OFF}


class Lookup(Tool):
    name = "lookup"
    description = "Looks something up."
    inputs = {  # noqa: RUF012 as the package wants it
        "query": {"type": "string", "description": "what"},
        "limit": {"type": "integer", "description": "how much", "nullable": True},
    }
    output_type = "string"

    def __init__(self, rng: Any) -> None:
        super().__init__()
        self.rng = rng

    def forward(self, query: str, limit: int | None = None) -> str:
        return words(self.rng, "Found: ")


class Note(Tool):
    name = "note"
    description = "Writes a note."
    inputs = {"text": {"type": "string", "description": "what"}}  # noqa: RUF012 as the package wants it
    output_type = "string"

    def __init__(self, rng: Any) -> None:
        super().__init__()
        self.rng = rng

    def forward(self, text: str) -> str:
        return words(self.rng)


class Play:
    def __init__(self, call: Call) -> None:
        self.call = call
        self.rng = call.rng
        self.report = Report(stops=True)
        self.seen = Seen(self.report)
        client = DefaultHttpxClient(event_hooks={"response": [self._heard]}, timeout=300)
        self.model = OpenAIModel(
            "policy", api_base=call.base_url, api_key=call.api_key, client_kwargs={"http_client": client}
        )
        self.writes_code = not {"parallel", "sub_agent"} & set(call.features) and self.rng.random() < 0.4
        self.num_steps = 0
        """Until the policy is told to end."""
        self.agent = self._agent()

    def _heard(self, response: Any) -> None:
        """What went over the wire."""
        if response.status_code != 200 or not response.request.url.path.endswith("/completions"):
            return
        response.read()
        asked = json.loads(response.request.content)
        choice = response.json()["choices"][0]
        message = choice["message"]
        said = [(one["role"], _text(one["content"])) for one in asked["messages"]]
        num_calls = len(message.get("tool_calls") or ())
        self.seen.note(asked.get("tools"), said, message["content"] or "", num_calls, choice.get("stop_reason"))

    def _agent(self) -> Any:
        tools = [Lookup(self.rng), Note(self.rng)]
        given: dict[str, Any] = {"model": self.model, "tools": tools, "step_callbacks": [self._stepped]}
        given["instructions"] = self.call.instructions(self.rng, "Be brief. ")
        if self.writes_code:
            return CodeAgent(**given, max_steps=MOST_STEPS, **QUIET)
        if "sub_agent" in self.call.features:
            helper = ToolCallingAgent(
                model=self.model, tools=tools, name="helper", description="Helps.", max_steps=3, **QUIET
            )
            given["managed_agents"] = [helper]
        return ToolCallingAgent(**given, max_steps=MOST_STEPS, **QUIET)

    def _stepped(self, step: Any, agent: Any = None) -> None:
        if step.is_final_answer:
            return
        self.num_steps -= 1
        if self.num_steps <= 0:
            self.call.direct(cues=["code:final" if self.writes_code else "call:final_answer=answer"])
        elif self.writes_code and self.rng.random() < 0.7:
            self.call.direct(cues=["code:"])

    def run(self, *, reset: bool = False, task: str = "") -> None:
        self.num_steps = self.rng.randint(2, 4)
        self.agent.run(task or words(self.rng), reset=reset)

    def play(self) -> Report:
        self.run()
        for feature in self.call.features:
            getattr(self, f"do_{feature}")()
        while self.report.turns < self.call.least_turns or self.rng.random() < 0.4:
            self.run()
        return self.report

    def do_parallel(self) -> None:
        speak_calls(self.call, self.report)
        self.run()

    def do_retry(self) -> None:
        for mishap in shuffled(self.rng, MISHAPS):
            self.call.direct(mishap=mishap)
            self.report.retries += 1
            self.run()

    def do_sub_agent(self) -> None:
        """The one that it manages answers a task of its own."""
        self.call.direct(cues=["call:helper=task", "calls:1", "call:final_answer=answer"])
        self.run()

    def do_edited(self) -> None:
        """What was seen is changed in the agent's memory, as the package's guide has it."""
        for step in self.agent.memory.steps[1:]:
            if getattr(step, "observations", None):
                step.observations = words(self.rng)
        self.run()

    def do_best_of(self) -> None:
        task = words(self.rng)
        for _ in range(2):
            self.run(reset=True, task=task)


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(one["text"] for one in content)


def play(call: Call) -> Report:
    return Play(call).play()


if __name__ == "__main__":
    serve(play, int(sys.argv[1]))
