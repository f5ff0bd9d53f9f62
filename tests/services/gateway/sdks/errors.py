"""Run under a Python that has `openai` or `anthropic` and nothing of ours: what a user of the package sees of errors.

python errors.py openai|anthropic BASE_URL KEY WAY...

Each way is one request; for each, the name of the error, its status and whether it carries the message.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any


def of_openai(base_url: str, key: str) -> tuple[dict[str, Callable[[], Any]], type[Exception]]:
    import openai

    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key=key)
    question: Any = {"model": "policy", "messages": [{"role": "user", "content": "x"}]}
    asked: Any = {"model": "policy", "input": "x"}
    return {
        "chat whole": lambda: client.chat.completions.create(**question),
        "chat stream": lambda: list(client.chat.completions.create(**question, stream=True)),
        "responses whole": lambda: client.responses.create(**asked),
        "responses stream": lambda: list(client.responses.create(**asked, stream=True)),
        "models": lambda: [one.id for one in client.models.list()],
        "chat wrong key": lambda: client.with_options(api_key="wrong").chat.completions.create(**question),
        "chat n": lambda: client.chat.completions.create(**question, n=2),
    }, openai.APIError


def of_anthropic(base_url: str, key: str) -> tuple[dict[str, Callable[[], Any]], type[Exception]]:
    import anthropic

    client = anthropic.Anthropic(base_url=base_url, api_key=key)
    question: Any = {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
    counted: Any = {"model": "policy", "messages": question["messages"]}
    return {
        "messages whole": lambda: client.messages.create(**question),
        "messages stream": lambda: list(client.messages.create(**question, stream=True)),
        "models": lambda: [one.id for one in client.models.list()],
        "messages count": lambda: client.messages.count_tokens(**counted).input_tokens,
        "messages token": lambda: anthropic.Anthropic(base_url=base_url, auth_token=key).messages.create(**question),
        "messages wrong key": lambda: client.with_options(api_key="wrong").messages.create(**question),
        "messages choice": lambda: client.messages.create(**question, tool_choice={"type": "any"}),
    }, anthropic.APIError


def main() -> None:
    package, base_url, key, *names = sys.argv[1:]
    ways, kind = (of_openai if package == "openai" else of_anthropic)(base_url, key)
    seen = []
    for name in names:
        try:
            answer = ways[name]()
            seen.append(["ok", answer if isinstance(answer, int | list) and not name.endswith("stream") else None])
        except kind as error:
            seen.append([type(error).__name__, getattr(error, "status_code", None), str(error)])
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
