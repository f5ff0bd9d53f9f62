"""The agent of a chaos run: it owns its loop, asks with the unmodified `openai` package, and adds up as the worlds do.

The rule kept here: it asks again until it has its answer, as anybody's agent would, and writes down what it was told
and what it did, so that the oracle can hold the training to it. It is imported by any Python that has `openai`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.chain import chain

PACKAGES = Path(os.environ.get("GSPO_TEST_AGENTS", Path(__file__).parents[2] / ".make" / "agents")) / "openai"
"""The environment that has `openai`; other Pythons take the package from there."""
sys.path += [str(path) for path in PACKAGES.glob("lib/python*/site-packages") if str(path) not in sys.path]

import openai  # noqa: E402

MAX_RETRIES = 200
"""Of the package itself, some seconds apart: longer than any fault lasts."""
MODULUS = 97
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add to the sum.",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer", "description": "what to add"}},
            "required": ["number"],
        },
    },
}
Note = Callable[..., None]


class Broke(Exception):
    """A stream ended before its answer did."""


@dataclass
class Said:
    """An answer, whole or put together from a stream."""

    id: str
    text: str
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Id and arguments."""

    def message(self) -> Any:
        calls = [
            {"id": name, "type": "function", "function": {"name": "add", "arguments": arguments}}
            for name, arguments in self.calls
        ]
        return {"role": "assistant", "content": self.text or None} | ({"tool_calls": calls} if calls else {})


def make_client() -> openai.OpenAI:
    """Once for all episodes of a process: each of them adds its own address and key."""
    return openai.OpenAI(base_url="http://unused", api_key="unused", max_retries=MAX_RETRIES)


class Adder:
    """One episode. ``pays``: each turn is rewarded as it is played, every reward posted twice; else the sum is the
    caller's to return. ``may_repeat``: what it does may be done again by one that begins the same run."""

    def __init__(
        self,
        client: openai.OpenAI,
        run: str,
        ledger: Path,
        note: Note | None = None,
        *,
        pays: bool = False,
        may_repeat: bool = False,
    ) -> None:
        self._client, self._run, self._ledger, self._note = client, run, ledger, note or self._note_here
        self._pays, self._may_repeat = pays, may_repeat
        self._count, self._sum, self._chain = 0, 0, ""
        self._num_turns = 0

    def play(self, number: int) -> float:
        messages: list[Any] = [
            {"role": "system", "content": "Add up."},
            {"role": "user", "content": f"task {number} {self._run}"},
        ]
        while True:
            said = self._ask(messages)
            messages.append(said.message())
            if not said.calls:
                break
            for name, arguments in said.calls:
                messages.append({"role": "tool", "tool_call_id": name, "content": self._add(said, arguments)})
        if self._pays:
            self._pay(0.0, "end")
        return self._worth

    def _note_here(self, **record: Any) -> None:
        _append(heard_in(self._ledger), json.dumps(record))

    @property
    def _worth(self) -> float:
        return (self._sum % MODULUS) / MODULUS

    def _add(self, said: Said, arguments: str) -> str:
        number, before = int(json.loads(arguments)["number"]), self._worth
        self._count, self._sum, self._chain = self._count + 1, self._sum + number, chain(self._chain, number)
        if not self._may_repeat:
            _append(self._ledger, f"{self._run} {self._count}")
        if self._pays:
            self._pay(self._worth - before, str(self._count), turn=said.id)
        return f"{self._run} {self._count} {self._chain}"

    def _pay(self, reward: float, token: str, **turn: str) -> None:
        """Twice, as one does who does not know whether it was heard."""
        body = {"reward": reward, "token": f"{self._run} {token}", **turn}
        for _ in range(2):
            self._client.post("/episode/reward", body=body, cast_to=object)

    def _ask(self, messages: list[Any]) -> Said:
        """Every other turn is streamed."""
        turn, self._num_turns = self._num_turns, self._num_turns + 1
        is_stream = (int(self._run, 16) + turn) % 2 == 1
        while True:
            try:
                said = self._streamed(messages, turn) if is_stream else self._whole(messages)
                break
            except Broke as error:
                self._note(event="broke", run=self._run, turn=turn, why=str(error))
        numbers = [json.loads(arguments)["number"] for _, arguments in said.calls]
        heard = {"run": self._run, "turn": turn, "text": said.text, "numbers": numbers}
        _append(heard_in(self._ledger), json.dumps(heard))
        return said

    def _whole(self, messages: list[Any]) -> Said:
        given = self._client.chat.completions.create(model="policy", messages=messages, tools=[ADD])
        message: Any = given.choices[0].message
        calls = [(call.id, call.function.arguments) for call in message.tool_calls or ()]
        return Said(given.id, message.content or "", calls)

    def _streamed(self, messages: list[Any], turn: int) -> Said:
        """The package does not ask again for what broke in the middle. Who does is known by the key of the request."""
        key = {"Idempotency-Key": f"{self._run}-{turn}"}
        stream = self._client.chat.completions.create(
            model="policy", messages=messages, tools=[ADD], stream=True, extra_headers=key
        )
        try:
            return _together(stream)
        except openai.APIStatusError:
            raise
        except (openai.APIError, OSError) as error:
            raise Broke(type(error).__name__) from error
        except Exception as error:
            # Of the package's own HTTP client, whose name is not promised.
            if type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore", "httpcore2"):
                raise Broke(type(error).__name__) from error
            raise


def _together(stream: Iterable[Any]) -> Said:
    said, is_whole = Said("", ""), False
    for chunk in stream:
        said.id = chunk.id
        for choice in chunk.choices:
            said.text += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                said.calls.append((call.id, call.function.arguments))
            is_whole |= choice.finish_reason is not None
    if not is_whole:
        raise Broke("no end")
    return said


def heard_in(ledger: Path) -> Path:
    """Where it is written what an agent was answered."""
    return ledger.with_name(f"heard-{ledger.name}")


def _append(path: Path, line: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode() + b"\n")
    os.close(file)


def run_of(name: str) -> str:
    """The name of a run that begins again under the same name of its attempt."""
    return hashlib.sha256(name.encode()).hexdigest()[:6]
