"""Holds what was answered to the types that a package is made of: what is missing or of another type, and what is more.

python schemas.py PACKAGE < [[kind, answer], ...]: of each [what is wrong, [names of what the package does not know]].
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError


def types_of(package: str) -> dict[str, Any]:
    if package == "openai":
        from openai.types import Model
        from openai.types.chat import ChatCompletion, ChatCompletionChunk
        from openai.types.responses import Response, ResponseStreamEvent
        from openai.types.shared import ErrorObject

        return {
            "chat": ChatCompletion,
            "chat event": ChatCompletionChunk,
            "responses": Response,
            "responses event": ResponseStreamEvent,
            "model": Model,
            "error": ErrorObject,
        }
    if package == "anthropic":
        from anthropic.types import ErrorResponse, Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent

        return {
            "messages": Message,
            "messages event": RawMessageStreamEvent,
            "count": MessageTokensCount,
            "model": ModelInfo,
            "error": ErrorResponse,
        }
    from google.genai import types

    answer = types.GenerateContentResponse
    return {"gemini": answer, "gemini event": answer, "count": types.CountTokensResponse, "model": types.Model}


def more(value: Any) -> Iterator[str]:
    if isinstance(value, BaseModel):
        yield from value.model_extra or ()
        for name in type(value).model_fields:
            yield from more(getattr(value, name))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from more(one)


def looked_at(kind: Any, answer: Any) -> tuple[str, list[str]]:
    try:
        found = TypeAdapter(kind).validate_json(json.dumps(answer), strict=True)
    except ValidationError as error:
        return str(error)[:2000], []
    return "", sorted(set(more(found)))


if __name__ == "__main__":
    kinds = types_of(sys.argv[1])
    print(json.dumps([looked_at(kinds[kind], answer) for kind, answer in json.load(sys.stdin)]))
