"""The `google-genai` package plays: contents that its user keeps, and chats that it keeps itself, whole and as streams.

Rule: it asks again by itself where an answer says so. Where a connection breaks it leaves that to its user, who is
played here too: he names a request, so that it is known again, or does not, and it is another sample.

python play_google_genai.py AT_ONCE
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import httpx2
from google import genai
from google.genai import types
from scenario import LOOKUP, MISHAPS, NOTE, ByHand, Call, Conversation, Report, Said, Wire, serve, shuffled

TRIES = 5
MODEL = "policy"


class Asking:
    """What a request has beside its contents, and that it is sent again where the connection breaks."""

    def __init__(self, client: genai.Client, system: str, names: Iterator[str] | None) -> None:
        self.client = client
        self._system = system
        self._names = names

    def config(self, choice: str, max_tokens: int | None, stop: Sequence[str], *, other_tools: bool) -> Any:
        declared = [
            types.FunctionDeclaration(
                name=one["name"], description=one["description"], parameters_json_schema=one["parameters"]
            )
            for one in ((LOOKUP,) if other_tools else (LOOKUP, NOTE))
        ]
        modes = {"none": "NONE", "required": "ANY", "auto": "AUTO"}
        allowed = None if choice in modes else [choice]
        calling = types.FunctionCallingConfig(
            mode=types.FunctionCallingConfigMode(modes.get(choice, "ANY")), allowed_function_names=allowed
        )
        headers = None if self._names is None else {"Idempotency-Key": next(self._names)}
        return types.GenerateContentConfig(
            system_instruction=self._system,
            tools=[types.Tool(function_declarations=declared)],
            tool_config=None if choice == "auto" else types.ToolConfig(function_calling_config=calling),
            max_output_tokens=max_tokens,
            stop_sequences=list(stop) or None,
            automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
            http_options=headers and types.HttpOptions(headers=headers),
        )


def again_where_broken(ask: Any) -> Any:
    for _ in range(TRIES):
        try:
            return ask()
        except httpx2.TransportError:
            continue
    raise ConnectionError("it broke each time")


def whole(chunks: Any) -> list[Any]:
    """Those of a stream that came to its end."""
    got = list(chunks)
    if not got or got[-1].candidates[0].finish_reason is None:
        raise httpx2.ReadError("the stream broke off")
    return got


def said(answers: Sequence[Any]) -> Said:
    parts = [part for one in answers for part in one.candidates[0].content.parts]
    calls = [part.function_call for part in parts if part.function_call]
    text = "".join(part.text for part in parts if part.text and not part.thought)
    return Said(text, [(one.id, one.name) for one in calls])


class Contents:
    """Contents go back as the package gave them, those of a stream as its chunks."""

    has_stop = True

    def __init__(self, asking: Asking) -> None:
        self._asking = asking
        self._contents: list[Any] = []
        self._num_last = 0
        self._names: dict[str, str] = {}
        self.other_tools = False

    def user(self, text: str) -> None:
        self._contents.append(types.Content(role="user", parts=[types.Part(text=text)]))

    def results(self, results: Sequence[tuple[str, str]]) -> None:
        self._contents.append(types.Content(role="user", parts=self._results(results)))

    def _results(self, results: Sequence[tuple[str, str]]) -> list[Any]:
        return [
            types.Part(
                function_response=types.FunctionResponse(id=one, name=self._names[one], response={"result": text})
            )
            for one, text in results
        ]

    def ask(self, *, stream: bool, choice: str, max_tokens: int | None, stop: Sequence[str]) -> Said:
        config = self._asking.config(choice, max_tokens, stop, other_tools=self.other_tools)
        heard = said(again_where_broken(lambda: self._asked(config, stream=stream)))
        self._names |= dict(heard.calls)
        return heard

    def _asked(self, config: Any, *, stream: bool) -> list[Any]:
        models: Any = self._asking.client.models
        given = {"model": MODEL, "contents": self._contents, "config": config}
        answers = whole(models.generate_content_stream(**given)) if stream else [models.generate_content(**given)]
        answered = [one.candidates[0].content for one in answers]
        self._contents, self._num_last = [*self._contents, *answered], len(answered)
        return answers

    def copy(self) -> Contents:
        other = copy.copy(self)
        other._contents = list(self._contents)
        return other

    def write_back(self, words: str) -> None:
        raise NotImplementedError

    def compacted(self, summary: str) -> Contents:
        """Right behind an answer."""
        other = self.copy()
        other._contents = self._contents[len(self._contents) - self._num_last :]
        other._contents.insert(0, types.Content(role="user", parts=[types.Part(text=summary)]))
        return other


class Chat(Contents):
    """The package keeps the history, and leaves out what it takes for no answer."""

    def __init__(self, asking: Asking) -> None:
        super().__init__(asking)
        self._open([])

    def _open(self, history: Sequence[Any]) -> None:
        self._chat: Any = self._asking.client.chats.create(model=MODEL, history=list(history))
        self._parts: list[Any] = []

    def user(self, text: str) -> None:
        self._parts.append(types.Part(text=text))

    def results(self, results: Sequence[tuple[str, str]]) -> None:
        self._parts += self._results(results)

    def _asked(self, config: Any, *, stream: bool) -> list[Any]:
        parts = self._parts
        if stream:
            answers = whole(self._chat.send_message_stream(parts, config))
        else:
            answers = [self._chat.send_message(parts, config)]
        self._parts, self._num_last = [], len(answers)
        return answers

    def copy(self) -> Chat:
        other = copy.copy(self)
        other._open(self._chat.get_history(curated=True))
        other._parts = list(self._parts)
        return other

    def compacted(self, summary: str) -> Chat:
        other = copy.copy(self)
        kept = self._chat.get_history(curated=True)
        last = kept[len(kept) - self._num_last :]
        other._open([types.Content(role="user", parts=[types.Part(text=summary)]), *last])
        return other


class Play(ByHand):
    def __init__(self, call: Call, client: genai.Client) -> None:
        rng = random.Random(f"{call.task['seed']} how")
        self._is_named = rng.random() < 0.5
        names = (f"request-{number}" for number in count()) if self._is_named else None
        kind = rng.choice((Contents, Chat))
        super().__init__(call, lambda system: kind(Asking(client, system, names)))

    def do_retry(self, chat: Conversation) -> Conversation:
        for mishap in shuffled(self.rng, (*MISHAPS, "torn")):
            self.call.direct(mishap=mishap)
            self.report.retries += 1
            if mishap == "lost" and not self._is_named:  # nobody can know that it was not heard
                self.report.turns += 1
                self.report.branches["resampled"] += 1
            how: Wire = {"stream": True} if mishap == "torn" else {}
            self.reply(chat, self.ask(chat, **how))
        return chat


def play(call: Call) -> Report:
    options = types.HttpOptions(
        base_url=call.base_url.removesuffix("/v1"),
        timeout=300_000,
        retry_options=types.HttpRetryOptions(attempts=TRIES, initial_delay=0.01, jitter=0.01),
    )
    with genai.Client(api_key=call.api_key, http_options=options) as client:
        return Play(call, client).play()


if __name__ == "__main__":
    serve(play, int(sys.argv[1]))
