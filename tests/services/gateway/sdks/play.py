"""Run under a Python that has `openai` or `anthropic` and nothing of ours: plays requests as its users do.

python play.py openai|anthropic BASE_URL KEY < requests.json

Each request has a path, a body and how to read the answer: whole, as raw events, or put together by the package.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

Wire = dict[str, Any]


def dumped(model: Any) -> Wire:
    wire: Wire = model.model_dump(mode="json", exclude_unset=True)
    return wire


def events(stream: Iterable[Any], *, named: bool) -> str:
    """A stream as it is on the wire, from what the package made of it."""
    told = [dumped(one) for one in stream]
    return "".join((f"event: {one['type']}\n" if named else "") + f"data: {json.dumps(one)}\n\n" for one in told)


def of_openai(base_url: str, key: str) -> dict[str, Callable[[Wire], Any]]:
    import openai

    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key=key)
    chat, responses = client.chat.completions, client.responses

    def put_together(body: Wire) -> Any:
        with responses.stream(**body) as stream:
            return dumped(stream.get_final_response())

    return {
        "chat whole": lambda body: dumped(chat.create(**body)),
        "chat events": lambda body: events(chat.create(**body, stream=True), named=False) + "data: [DONE]\n\n",
        "responses whole": lambda body: dumped(responses.create(**body)),
        "responses events": lambda body: events(responses.create(**body, stream=True), named=True),
        "responses together": put_together,
    }


def of_anthropic(base_url: str, key: str) -> dict[str, Callable[[Wire], Any]]:
    import anthropic

    messages = anthropic.Anthropic(base_url=base_url, api_key=key).messages

    def put_together(body: Wire) -> Any:
        with messages.stream(**body) as stream:
            return dumped(stream.get_final_message())

    return {
        "messages whole": lambda body: dumped(messages.create(**body)),
        "messages events": lambda body: events(messages.create(**body, stream=True), named=True),
        "messages together": put_together,
    }


def main() -> None:
    package, base_url, key = sys.argv[1:]
    ways = of_openai(base_url, key) if package == "openai" else of_anthropic(base_url, key)
    print(json.dumps([ways[one["way"]](one["body"]) for one in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
