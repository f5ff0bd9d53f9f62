"""The agent of ``benchmarks.gateway_kills``: one episode for each line of its input, what happens as lines of JSON.

It runs under a Python that may have `openai` and has nothing of ours. The package repeats a request by itself, twice,
as it does by default; where there is no package, the standard library does as much by the same rule. A stream that
breaks in the middle is asked for once more, by the agent, since no package does that.
"""

from __future__ import annotations

import http.client
import json
import random
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

MAX_TOKENS = 24
MAX_RETRIES = 2
"""The package's default, and what the rule below goes by."""
FIRST_WAIT_S, LONGEST_WAIT_S, LONGEST_TOLD_S, JITTER = 0.5, 8.0, 60.0, 0.25
TIMEOUT_S = 600.0
AGAIN = (408, 409, 429)
Heard = Callable[[], None]


class Broke(Exception):
    """A stream ended before its answer did."""


class Package:
    def __init__(self, told: dict[str, Any]) -> None:
        import openai

        self._openai = openai
        self._client = openai.OpenAI(base_url=told["base_url"], api_key=told["api_key"])
        assert self._client.max_retries == MAX_RETRIES

    def whole(self, body: dict[str, Any], key: str) -> str:
        create = self._client.chat.completions.create
        return create(**body, extra_headers={"Idempotency-Key": key}).choices[0].message.content or ""

    def pieces(self, body: dict[str, Any], key: str) -> Iterator[str]:
        create, is_whole = self._client.chat.completions.create, False
        stream = create(**body, stream=True, extra_headers={"Idempotency-Key": key})
        try:
            for chunk in stream:
                for choice in chunk.choices:
                    yield choice.delta.content or ""
                    is_whole |= choice.finish_reason is not None
        except self._openai.APIStatusError:
            raise
        except Exception as error:  # of the package's HTTP client, whose name is not promised
            raise Broke from error
        if not is_whole:
            raise Broke


class Plain:
    def __init__(self, told: dict[str, Any]) -> None:
        self._key = told["api_key"]
        parts = urlsplit(told["base_url"])
        self._address, self._path = (parts.hostname or "", parts.port), f"{parts.path}/chat/completions"

    def whole(self, body: dict[str, Any], key: str) -> str:
        return str(json.loads(self._asked(body, key, whole=True)[1])["choices"][0]["message"]["content"] or "")

    def pieces(self, body: dict[str, Any], key: str) -> Iterator[str]:
        answer, _ = self._asked(body | {"stream": True}, key, whole=False)
        try:
            while line := answer.readline():
                if line.strip() == b"data: [DONE]":
                    return
                if line.startswith(b"data: "):
                    for choice in json.loads(line[6:])["choices"]:
                        yield choice["delta"].get("content") or ""
        except (OSError, http.client.HTTPException) as error:
            raise Broke from error
        raise Broke

    def _asked(self, body: dict[str, Any], key: str, *, whole: bool) -> tuple[http.client.HTTPResponse, bytes]:
        """The answer, and its body where that is wanted: what breaks before is asked again."""
        for count in range(MAX_RETRIES + 1):
            told: str | None = None
            headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
            headers |= {"Idempotency-Key": key, "x-stainless-retry-count": str(count)}
            try:
                connection = http.client.HTTPConnection(*self._address, timeout=TIMEOUT_S)
                connection.request("POST", self._path, json.dumps(body), headers)
                answer = connection.getresponse()
                if answer.status == 200:
                    return answer, answer.read() if whole else b""
                error, told = f"{answer.status}: {answer.read().decode()}", answer.getheader("retry-after")
                if answer.status not in AGAIN and answer.status < 500:
                    break
            except (OSError, http.client.HTTPException) as met:
                error = repr(met)
            if count < MAX_RETRIES:
                time.sleep(wait_s(count, told))
        raise ConnectionError(error)


def wait_s(count: int, told: str | None) -> float:
    if told and 0 < float(told) <= LONGEST_TOLD_S:
        return float(told)
    return float(min(FIRST_WAIT_S * 2**count, LONGEST_WAIT_S)) * (1 - JITTER * random.random())


def tell(**what: object) -> None:
    print(json.dumps({"at": time.monotonic(), **what}), flush=True)


def play(told: dict[str, Any], client: Package | Plain) -> None:
    """``told`` says in which turn a kill is expected: what that turn hears is told, so that it comes in the middle."""
    messages: list[dict[str, str]] = [{"role": "user", "content": "begin"}]
    for turn in range(told["turns"]):
        is_struck = turn == told["struck"]
        body, key = {"model": "policy", "messages": messages, "max_tokens": MAX_TOKENS}, uuid.uuid4().hex
        if is_struck and not told["stream"]:
            tell(event="open")
        text = streamed(client, body, key, is_struck=is_struck) if told["stream"] else client.whole(body, key)
        if is_struck:
            tell(event="heard")
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"and {turn}?"}]
    tell(event="done")


def streamed(client: Package | Plain, body: dict[str, Any], key: str, *, is_struck: bool) -> str:
    before = ""
    for is_again in (False, True):
        text = ""
        try:
            for piece in client.pieces(body, key):
                if is_struck and piece and not text:
                    tell(event="first" if is_again else "open")
                text += piece
        except Broke:
            before = text
            continue
        assert text.startswith(before), f"told {text!r} after {before!r}"
        return text
    raise Broke("twice")


def main() -> int:
    kind = Package if sys.argv[1] == "package" else Plain
    for line in sys.stdin:
        told = json.loads(line)
        try:
            play(told, kind(told))
        except Exception as error:
            tell(event="failed", error=f"{type(error).__name__}: {error}"[:500])
    return 0


if __name__ == "__main__":
    sys.exit(main())
