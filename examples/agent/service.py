"""The agent of this folder as a service of its own, written with the `openai` package: it knows nothing of training.

    python -m examples.agent.service --port 9000

It needs `openai` and nothing of ours but the calculator, which is its tool. An episode is played once, however often
its start is sent: who sends it again is given the same end. `examples/agent/job_service.yaml` names it by its URL.
"""

import argparse
import contextlib
import functools
import json
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import openai

from environments.calculator import evaluate

# A policy that is learned from may be away for a while, when its weights or its gateway change.
MAX_RETRIES = 30
CALCULATE: Any = {
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


def answer(client: openai.OpenAI, expression: str) -> str:
    """The whole agent: it asks, calculates where it is told to, and ends with what is left to say."""
    messages: list[Any] = [
        {"role": "system", "content": "Use the calculator. Then answer with the number only."},
        {"role": "user", "content": f"What is {expression}?"},
    ]
    while True:
        said = client.chat.completions.create(model="policy", messages=messages, tools=[CALCULATE]).choices[0].message
        messages.append(said)
        if not said.tool_calls:
            return said.content or ""
        for call in said.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": calculated(call.function.arguments)})


def calculated(arguments: str) -> str:
    try:
        return str(evaluate(json.loads(arguments)["expression"]))
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error}"


class Clients:
    """One for each episode of the moment: threads that share one wait for each other's turn at its connections."""

    def __init__(self, make: Callable[[], openai.OpenAI]) -> None:
        self._make = make
        self._free = deque[openai.OpenAI]()

    @contextlib.contextmanager
    def one(self) -> Iterator[openai.OpenAI]:
        try:
            client = self._free.pop()
        except IndexError:
            client = self._make()
        try:
            yield client
        finally:
            self._free.append(client)


class Episodes:
    """Each is played by whoever asks for it first; the others wait for its end."""

    def __init__(self, make_client: Callable[[], openai.OpenAI]) -> None:
        """``make_client``: their connections are kept; each episode has an address and a key of its own."""
        self._clients = Clients(make_client)
        self._ends: dict[str, Future[str]] = {}
        self._starting = threading.Lock()

    def play(self, name: str, start: dict[str, Any]) -> str:
        with self._starting:
            end = self._ends.get(name)
            is_first = end is None
            if end is None:
                end = self._ends[name] = Future()
        if is_first:
            _settle(end, lambda: self._play(start))
        return end.result()

    def _play(self, start: dict[str, Any]) -> str:
        with self._clients.one() as client:
            return self._answer(client.with_options(base_url=start["base_url"], api_key=start["api_key"]), start)

    def _answer(self, client: openai.OpenAI, start: dict[str, Any]) -> str:
        try:
            return answer(client, start["task"]["expression"])
        except openai.BadRequestError:  # beyond a limit of the episode
            return ""


def _settle(end: Future[str], play: Callable[[], str]) -> None:
    try:
        end.set_result(play())
    except Exception as error:
        end.set_exception(error)


class Service(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, port: int, episodes: Episodes) -> None:
        super().__init__(("127.0.0.1", port), Start)
        self.episodes = episodes


class Start(BaseHTTPRequestHandler):
    server: Service
    protocol_version = "HTTP/1.1"  # whoever starts episodes keeps the connection
    wbufsize = -1  # an answer leaves as one

    def do_POST(self) -> None:
        start = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            status, said = 200, {"answer": self.server.episodes.play(self.headers["Idempotency-Key"], start)}
        except openai.APIError as error:
            status, said = 500, {"error": str(error)}
        body = json.dumps(said).encode()
        with contextlib.suppress(ConnectionError):  # who asked is gone, and asks again
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""


def make_client() -> openai.OpenAI:
    http = openai.DefaultHttpxClient(verify=certificates())
    return openai.OpenAI(base_url="http://unused", api_key="unused", max_retries=MAX_RETRIES, http_client=http)


@functools.cache
def certificates() -> ssl.SSLContext:
    """Those of the system, read once: that takes longer than a small turn."""
    return ssl.create_default_context()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.agent.service")
    parser.add_argument("--port", type=int, default=9000)
    Service(parser.parse_args().port, Episodes(make_client)).serve_forever()


if __name__ == "__main__":
    main()
