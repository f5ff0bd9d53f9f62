"""An engine that answers at once what it is told to say, after a delay: `python -m benchmarks.fast_engine --plan JSON`.

It speaks as much of SGLang's protocol as a rollout worker uses and computes nothing that grows with the context, so
that thousands of requests in flight cost the worker's machine next to nothing. It says `Plan.say` again and again; one
episode that `Plan.mark` names gets filler, as much as it asks for. The scripted engine of the tests
keeps a hash for each token of a prefix, which at 8,000 tokens takes longer than all that is measured here.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import sys
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec

from services.process.lifecycle import run_until_signalled


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What it says, and when."""

    say: list[int]
    """A whole turn, its stop token included."""
    seconds: tuple[float, float] = (0.0, 0.0)
    """A request takes a time between these."""
    seconds_per_token: float = 0.0
    """And this for each of its tokens."""
    mark: str = ""
    """JSON of neighbouring ids: the first prompt with them is answered with filler that never ends its turn."""
    label: str = ""


class _Sampling(msgspec.Struct):
    max_new_tokens: int


class _Ask(msgspec.Struct):
    rid: str
    input_ids: msgspec.Raw
    sampling_params: _Sampling


class _Label(msgspec.Struct):
    label: str


FILLER = 1
_FILLED = b",%d,%d" % (FILLER, FILLER)
_read_ask = msgspec.json.Decoder(_Ask).decode


@dataclass(eq=False)
class _Engine:
    plan: Plan
    label: str
    num_running: int = 0
    has_long: bool = False
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    async def generate(self, content: bytes) -> bytes:
        ask = _read_ask(content)
        plan, most = self.plan, ask.sampling_params.max_new_tokens
        ids = [FILLER] * most if self._is_long(bytes(ask.input_ids)) else plan.say[:most]
        seconds = self.rng.uniform(*plan.seconds) + plan.seconds_per_token * len(ids)
        logprob = -self.rng.random()  # by which an answer can be told from all others
        began, self.num_running = self.label, self.num_running + 1
        try:
            await asyncio.sleep(seconds)
        finally:
            self.num_running -= 1
        half = 0 if began == self.label else len(ids) // 2
        finish = {"type": "length", "length": len(ids)} if len(ids) == most else {"type": "stop", "matched": ids[-1]}
        return msgspec.json.encode(
            {
                "output_ids": ids,
                "meta_info": {
                    "id": ask.rid,
                    "finish_reason": finish,
                    "completion_tokens": len(ids),
                    "output_token_logprobs": [(logprob, one, None) for one in ids],
                    "weight_versions": [
                        {"version": began, "start": 0, "end": half},
                        {"version": self.label, "start": half, "end": len(ids)},
                    ],
                    "cached_tokens": 0,
                },
            }
        )

    def _is_long(self, prompt: bytes) -> bool:
        if not self.plan.mark or self.plan.mark.encode() not in prompt:
            return False
        begins, self.has_long = not self.has_long, True
        return begins or _FILLED in prompt

    async def answer(self, path: bytes, content: bytes) -> bytes:
        match path:
            case b"/generate":
                return await self.generate(content)
            case b"/model_info":
                return msgspec.json.encode({"weight_version": self.label})
            case b"/v1/loads":
                load = {"timestamp": time.time(), "num_running_reqs": self.num_running, "num_waiting_reqs": 0}
                # The outer time in words, as SGLang writes it.
                return msgspec.json.encode({"timestamp": datetime.now(UTC), "loads": [load]})
            case b"/label":
                self.label = msgspec.json.decode(content, type=_Label).label
        return b"{}"


class _Connection(asyncio.Protocol):
    """One request at a time, as the worker's transport sends them."""

    def __init__(self, engine: _Engine) -> None:
        self._engine = engine
        self._buffer = bytearray()
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._buffer[:end])
        _, _, rest = head.lower().partition(b"content-length:")
        length = int(rest.split(b"\r\n", 1)[0] or 0)
        if len(self._buffer) < end + 4 + length:
            return
        content = bytes(self._buffer[end + 4 : end + 4 + length])
        self._buffer.clear()
        self._task = asyncio.get_running_loop().create_task(self._serve(head.split(b" ", 2)[1], content))

    async def _serve(self, path: bytes, content: bytes) -> None:
        body = await self._engine.answer(path, content)
        self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)


async def serve(plan: Plan, listener: socket.socket, stop: asyncio.Event) -> None:
    engine = _Engine(plan, plan.label)
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(engine), sock=listener, backlog=4096)
    await stop.wait()
    server.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fast_engine", description=__doc__)
    parser.add_argument("--plan", required=True, help="a Plan as JSON")
    parser.add_argument("--fd", type=int, required=True, help="a listening socket that was inherited")
    arguments = parser.parse_args()
    plan = msgspec.json.decode(arguments.plan, type=Plan)
    listener = socket.socket(fileno=arguments.fd)
    return run_until_signalled(lambda stop: serve(plan, listener, stop))


if __name__ == "__main__":
    sys.exit(main())
