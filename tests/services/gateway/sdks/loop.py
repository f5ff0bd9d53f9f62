"""Run under a Python that has `openai` or `anthropic` and nothing of ours: agents of a page, which call tools until
they have an answer, and send back what the package gave them.

python loop.py openai|anthropic BASE_URL KEY
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

QUESTION = "What is 2 + 3, and what time is it?"
PARAMETERS = {"type": "object", "properties": {"a": {"type": "number"}}}


def chat(base_url: str, key: str, *, as_dump: bool) -> str:
    import openai

    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key=key)
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    while True:
        answer = client.chat.completions.create(model="policy", messages=messages, tools=tools)
        message: Any = answer.choices[0].message
        messages.append(message.model_dump() if as_dump else message)
        if not message.tool_calls:
            return str(message.content)
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"result of {call.id}"})


def responses(base_url: str, key: str, *, is_stream: bool) -> str:
    import openai

    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key=key)
    tools: Any = [{"type": "function", "name": "add", "parameters": PARAMETERS}]
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    while True:
        if is_stream:
            with client.responses.stream(model="policy", input=items, tools=tools) as stream:
                answer: Any = stream.get_final_response()
        else:
            answer = client.responses.create(model="policy", input=items, tools=tools)
        items += answer.output
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return str(answer.output_text)
        for call in calls:
            items.append(
                {"type": "function_call_output", "call_id": call.call_id, "output": f"result of {call.call_id}"}
            )


def messages(base_url: str, key: str, *, is_stream: bool) -> str:
    import anthropic

    client = anthropic.Anthropic(base_url=base_url, api_key=key)
    tools: Any = [{"name": "add", "input_schema": PARAMETERS}]
    sent: list[Any] = [{"role": "user", "content": QUESTION}]
    options: Any = {"model": "policy", "max_tokens": 100, "tools": tools}
    while True:
        if is_stream:
            with client.messages.stream(messages=sent, **options) as stream:
                answer: Any = stream.get_final_message()
        else:
            answer = client.messages.create(messages=sent, **options)
        sent.append({"role": "assistant", "content": answer.content})
        uses = [block for block in answer.content if block.type == "tool_use"]
        if not uses:
            return "".join(block.text for block in answer.content if block.type == "text")
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": f"result of {use.id}"} for use in uses]
        sent.append({"role": "user", "content": results})


def said(package: str, base_url: str, key: str) -> Iterator[str]:
    for flag in (False, True):
        if package == "openai":
            yield chat(base_url, key, as_dump=flag)
            yield responses(base_url, key, is_stream=flag)
        else:
            yield messages(base_url, key, is_stream=flag)


def main() -> None:
    print(json.dumps(list(said(*sys.argv[1:]))))


if __name__ == "__main__":
    main()
