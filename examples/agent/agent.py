"""Answers a question with a calculator: an agent that owns its loop, of thirty lines and plain HTTP."""

import json
from typing import Any

import httpx

from environments.calculator import Calculator, evaluate

tasks, eval_tasks = Calculator.tasks, Calculator.eval_tasks
limits = {"max_turns": 4}
replayable = True
CALCULATE = {
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
# Made once: a client of its own would cost an episode more than its turns do.
client = httpx.Client(timeout=600)


def run(task: dict[str, str], llm: Any) -> float:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Use the calculator. Then answer with the number only."},
        {"role": "user", "content": f"What is {task['expression']}?"},
    ]
    key = {"Authorization": f"Bearer {llm.api_key}"}
    while True:
        question = {"model": llm.model, "messages": messages, "tools": [CALCULATE]}
        response = client.post(f"{llm.base_url}/chat/completions", headers=key, json=question)
        if response.status_code == 400:  # beyond a limit of the episode
            return 0.0
        said = response.raise_for_status().json()["choices"][0]["message"]
        messages.append(said)
        if not said.get("tool_calls"):
            return float((said["content"] or "").strip() == str(evaluate(task["expression"])))
        for call in said["tool_calls"]:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": calculated(call["function"])})


def calculated(call: dict[str, str]) -> str:
    try:
        return str(evaluate(json.loads(call["arguments"])["expression"]))
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error}"
