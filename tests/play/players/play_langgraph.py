"""LangGraph plays, over `langchain-openai`: a graph of a model and its tools with a checkpointer, which goes back in
time for an edited history and for another sample; a helper is a graph of its own behind a tool.

python play_langgraph.py AT_ONCE
"""

from __future__ import annotations

import sys
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import HumanMessage, RemoveMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from langgraph.prebuilt import ToolNode, tools_condition
from scenario import MISHAPS, Call, Report, serve, shuffled, speak_calls, words

MOST_STEPS = 400


class Watching(BaseCallbackHandler):
    """Counts what the package does, helpers included."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def on_llm_end(self, response: Any, **_: Any) -> None:
        self.report.heard(len(response.generations[0][0].message.tool_calls))


class Play:
    def __init__(self, call: Call) -> None:
        self.call = call
        self.rng = call.rng
        self.report = Report()
        rng = self.rng
        self.model = ChatOpenAI(
            model="policy",
            base_url=call.base_url,
            api_key=call.api_key,
            timeout=300,
            streaming=rng.random() < 0.5,
            use_responses_api=rng.random() < 0.5,
        )
        self.config = {
            "configurable": {"thread_id": "1"},
            "callbacks": [Watching(self.report)],
            "recursion_limit": MOST_STEPS,
        }
        choice = "any" if rng.random() < 0.15 else None
        self.graph = self._graph(call.instructions(rng, "Be brief. "), self._tools(), choice, InMemorySaver())

    def _tools(self) -> list[Any]:
        rng = self.rng

        @tool
        def lookup(query: str, limit: int = 5) -> str:
            """Looks something up."""
            return words(rng, "Found: ")

        if "sub_agent" not in self.call.features:

            @tool
            def note(text: str) -> str:
                """Writes a note."""
                return words(rng)

            return [lookup, note]

        helper = self._graph(words(rng, "You help. "), [lookup], None, None)

        @tool("note")
        def asked(text: str) -> str:
            """Asks a helper."""
            self.report.branches["sub_agent"] += 1
            found = helper.invoke({"messages": [HumanMessage(words(rng, f"{text} "))]})
            return str(found["messages"][-1].text)

        return [lookup, asked]

    def _graph(self, system: str, tools: list[Any], choice: str | None, checkpointer: Any) -> Any:
        model = self.model.bind_tools(tools, tool_choice=choice)

        def ask(state: MessagesState) -> Any:
            return {"messages": [model.invoke([SystemMessage(system), *state["messages"]])]}

        graph = StateGraph(MessagesState)
        graph.add_node("model", ask)
        graph.add_node("tools", ToolNode(tools, handle_tool_errors=True))
        graph.add_edge(START, "model")
        graph.add_conditional_edges("model", tools_condition)
        graph.add_edge("tools", "model")
        return graph.compile(checkpointer=checkpointer)

    def run(self) -> None:
        """Until it answers."""
        self.graph.invoke({"messages": [HumanMessage(words(self.rng))]}, self.config)

    def play(self) -> Report:
        self.run()
        for feature in self.call.features:
            getattr(self, f"do_{feature}")()
        while self.report.turns < self.call.least_turns or self.rng.random() < 0.5:
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
        self.call.direct(cues=["call:note=text"])
        self.run()

    def do_edited(self) -> None:
        self.run()
        asked = self._asked()
        edited = HumanMessage(words(self.rng), id=asked.values["messages"][-1].id)
        config = self.graph.update_state(asked.config, {"messages": [edited]}, as_node=START)
        self.report.branches["edited_history"] += 1
        self.graph.invoke(None, self.config | config)

    def do_best_of(self) -> None:
        self.run()
        self.report.branches["resampled"] += 1
        self.graph.invoke(None, self.config | self._asked().config)

    def do_compacted(self) -> None:
        self.run()  # else there is as little behind it as before
        last = self.graph.get_state(self.config).values["messages"][-1]
        short = HumanMessage(words(self.rng, "In short: "))
        self.graph.update_state(self.config, {"messages": [RemoveMessage(REMOVE_ALL_MESSAGES), short, last]})
        self.report.branches["compacted"] += 1
        self.run()

    def _asked(self) -> Any:
        """The state when the last question had been asked."""
        for state in self.graph.get_state_history(self.config):
            if state.next == ("model",) and state.values["messages"][-1].type == "human":
                return state
        raise AssertionError("nothing was asked")


def play(call: Call) -> Report:
    return Play(call).play()


if __name__ == "__main__":
    serve(play, int(sys.argv[1]))
