"""A model that says what a test wants, behind an OpenAI endpoint on this machine: for tests of agents.

Rule: each request gets the next answer of the script, in order; one beyond its end is refused as the gateway refuses
what is beyond a limit. It speaks Chat Completions alone, whole or as a stream of one piece.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeAlias

from gspo_core.environment_contract import Llm
from gspo_core.json_value import JSON

Said: TypeAlias = str | tuple[str, dict[str, JSON]] | list[tuple[str, dict[str, JSON]]]
"""A text, a call ``(name, arguments)``, or several calls of one turn."""


@dataclass(frozen=True)
class ScriptedLlm(Llm):
    """What ``run(task, llm)`` gets."""

    requests: list[dict[str, JSON]] = field(default_factory=list, repr=False)
    """The bodies, as they came."""


@contextmanager
def scripted_llm(*script: Said) -> Iterator[ScriptedLlm]:
    requests: list[dict[str, JSON]] = []
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(requests)
                requests.append(body)
            if not self.path.endswith("/chat/completions"):
                return self._answer(404, _error(f"there is no {self.path} here"))
            if number >= len(script):
                return self._answer(400, _error("rollout stopped: the script is over"))
            whole = _completion(number, script[number])
            if not body.get("stream"):
                return self._answer(200, json.dumps(whole))
            return self._answer(200, _events(whole), "text/event-stream")

        def _answer(self, status: int, text: str, kind: str = "application/json") -> None:
            data = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """A test prints what it likes."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_address[1]}/v1"
            yield ScriptedLlm(url, "scripted-key", episode="scripted", requests=requests)
        finally:
            server.shutdown()
            thread.join()


def _completion(number: int, said: Said) -> dict[str, JSON]:
    message: dict[str, JSON] = {"role": "assistant", "content": said if isinstance(said, str) else None}
    if not isinstance(said, str):
        message["tool_calls"] = [
            {
                "id": f"call_{number}_{index}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for index, (name, arguments) in enumerate([said] if isinstance(said, tuple) else said)
        ]
    finish = "stop" if isinstance(said, str) else "tool_calls"
    choice: JSON = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
    usage: JSON = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": 0,
        "model": "policy",
        "choices": [choice],
        "usage": usage,
    }


def _events(whole: dict[str, JSON]) -> str:
    """The whole answer in one piece, its end, and how many tokens it took."""
    choices = whole["choices"]
    assert isinstance(choices, list)
    assert isinstance(choices[0], dict)
    delta = choices[0]["message"]
    assert isinstance(delta, dict)
    calls = delta.get("tool_calls")
    if isinstance(calls, list):
        delta = {**delta, "tool_calls": [{"index": i, **one} for i, one in enumerate(calls) if isinstance(one, dict)]}
    common = {**whole, "object": "chat.completion.chunk"}
    pieces: list[dict[str, JSON]] = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}], "usage": None},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": choices[0]["finish_reason"]}], "usage": None},
        {"choices": []},
    ]
    return "".join(f"data: {json.dumps(common | piece)}\n\n" for piece in pieces) + "data: [DONE]\n\n"


def _error(text: str) -> str:
    return json.dumps({"error": {"message": text, "type": "invalid_request_error", "param": None, "code": None}})
