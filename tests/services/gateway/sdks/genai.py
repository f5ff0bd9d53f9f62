"""Run under a Python that has `google-genai` and nothing of ours: what a user of the package sees.

python genai.py BASE_URL KEY < ways.json

Each way is one request, or one conversation of a chat; for each, what came of it, or the error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from google import genai
from google.genai import errors, types

ADD = types.FunctionDeclaration(
    name="add",
    description="Adds.",
    parameters=types.Schema(type=types.Type.OBJECT, properties={"a": types.Schema(type=types.Type.NUMBER)}),
)


def add(a: float) -> str:
    """Adds."""
    return f"result of {a}"


class Ways:
    def __init__(self, base_url: str, key: str) -> None:
        self._client = genai.Client(api_key=key, http_options=types.HttpOptions(base_url=base_url))
        self._wrong = genai.Client(api_key="wrong", http_options=types.HttpOptions(base_url=base_url))

    def whole(self) -> Any:
        config = types.GenerateContentConfig(
            system_instruction="Be brief.",
            temperature=0.5,
            max_output_tokens=9,
            stop_sequences=["END"],
            seed=7,
            tools=[types.Tool(function_declarations=[ADD])],
        )
        return told(self._client.models.generate_content(model="policy", contents="x", config=config))

    def stream(self) -> Any:
        chunks = list(self._client.models.generate_content_stream(model="policy", contents="x"))
        return [told(chunk) for chunk in chunks]

    def count(self) -> Any:
        return self._client.models.count_tokens(model="policy", contents="x").total_tokens

    def models(self) -> Any:
        return [one.name for one in self._client.models.list()]

    def model(self) -> Any:
        return self._client.models.get(model="base").name

    def wrong_key(self) -> Any:
        return told(self._wrong.models.generate_content(model="policy", contents="x"))

    def candidates(self) -> Any:
        config = types.GenerateContentConfig(candidate_count=2)
        return told(self._client.models.generate_content(model="policy", contents="x", config=config))

    def retried(self) -> Any:
        options = types.HttpOptions(retry_options=types.HttpRetryOptions(attempts=2, initial_delay=0.01, jitter=0.01))
        config = types.GenerateContentConfig(http_options=options)
        return told(self._client.models.generate_content(model="policy", contents="x", config=config))

    def by_hand(self) -> Any:
        """The history is kept by whoever asks."""
        config = types.GenerateContentConfig(tools=[types.Tool(function_declarations=[ADD])])
        contents: list[Any] = [types.Content(role="user", parts=[types.Part(text="x")])]
        while True:
            answer = self._client.models.generate_content(model="policy", contents=contents, config=config)
            content: Any = (answer.candidates or [])[0].content
            if not answer.function_calls:
                return answer.text
            parts = [
                types.Part(function_response=types.FunctionResponse(name=one.name, response=result_of(one), id=one.id))
                for one in answer.function_calls
            ]
            contents += [content, types.Content(role="user", parts=parts)]

    def chat(self) -> Any:
        """The package keeps the history, and calls the functions."""
        chat = self._client.chats.create(model="policy", config=types.GenerateContentConfig(tools=[add]))
        return [chat.send_message(text).text for text in ("x", "y")]

    def chat_stream(self) -> Any:
        """It keeps an answer as the chunks that it came in."""
        chat = self._client.chats.create(model="policy", config=types.GenerateContentConfig(tools=[add]))
        return ["".join(one.text or "" for one in chat.send_message_stream(text)) for text in ("x", "y")]


def result_of(call: Any) -> dict[str, Any]:
    return {"result": add(**call.args)}


def told(answer: types.GenerateContentResponse) -> Any:
    return answer.model_dump(mode="json", exclude_none=True, by_alias=True, exclude={"sdk_http_response"})


def main() -> None:
    base_url, key = sys.argv[1:]
    ways, seen = Ways(base_url, key), []
    for name in json.load(sys.stdin):
        way: Callable[[], Any] = getattr(ways, name)
        try:
            seen.append(["ok", way()])
        except errors.APIError as error:
            seen.append([type(error).__name__, error.code, error.status, error.message])
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
