"""What processes are asked through Redis: any of them to leave, a rollout worker to carry out an order and answer.

The rules: a wish that a process leaves names it by its id and stays until that process has seen it, so asking twice
equals asking once. A rollout worker then stops taking episodes, hands back those it holds, and exits; a trainer
finishes and saves its current step, hands its job back, and exits. Host and number of a process may come again: one
that finds a wish meant for a dead namesake leaves too, once, and the wish is gone.
One worker takes an order, any or the one that it names, and the order dies with it; the asker learns that no answer
came and may ask again, since orders are safe to repeat. The next asker removes orders that have outlived their asker's
wait. They come from the API, which runs no environment code itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.state.client import MAX_BLOCK_MS, Away, RedisClient
from services.state.keys import service_key

DRAIN_LOOK_S = 2.0
_WISHES = service_key("drains")
# A stream of orders, the worker that took each, and the answers.
_ORDERS, _CLAIMS, _ANSWERS = (service_key(name) for name in ("errands", "errand_claims", "errand_answers"))
# An asker looks for its answer this often.
LOOK_S = 0.05
# The longest a live worker takes to pick up a waiting order.
TAKEN_WITHIN_S = 10.0
MAX_AGE_MS = 15 * 60 * 1000
MAX_OPEN = 256


class Drains:
    def __init__(self, redis: RedisClient) -> None:
        # Replies are bytes; the client's types allow for more.
        self._redis: Any = redis

    async def ask(self, process: str) -> None:
        await self._redis.hset(_WISHES, process, 1)

    async def is_asked(self, process: str) -> bool:
        return bool(await self._redis.hexists(_WISHES, process))

    async def all_asked(self) -> set[str]:
        """Processes that have not seen their request yet."""
        return {process.decode() for process in await self._redis.hkeys(_WISHES)}

    async def wait(self, process: str, stop: asyncio.Event) -> None:
        """Set ``stop`` when the process is asked to leave. No request can arrive while Redis is away."""
        while True:
            with contextlib.suppress(Away):
                if await self.is_asked(process):
                    break
            await asyncio.sleep(DRAIN_LOOK_S)
        stop.set()
        with contextlib.suppress(Away):
            await self._redis.hdel(_WISHES, process)


class NoWorkerThere(Exception):
    """No rollout worker took the request."""


class NoAnswer(Exception):
    """A worker took the request but did not answer in time."""


class TooManyRequests(Exception):
    """Too many requests are waiting, so this one was not added."""


class WorkerRequestFailed(Exception):
    """The worker's reason for failing the request."""


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    id: str
    order: Mapping[str, Any]
    is_awaited: bool


class WorkerRequests:
    def __init__(self, redis: RedisClient) -> None:
        # Replies are bytes; the client's types allow for more.
        self._redis: Any = redis

    async def send(self, order: Mapping[str, Any], *, is_awaited: bool = True, worker: str = "") -> str:
        """Returns the request's id. ``worker``: for this one only. Raises TooManyRequests."""
        if await self._redis.xlen(_ORDERS) >= MAX_OPEN:
            await self._sweep(None)
            if await self._redis.xlen(_ORDERS) >= MAX_OPEN:
                raise TooManyRequests
        fields = {"order": json.dumps(dict(order), allow_nan=False), "awaited": int(is_awaited), "worker": worker}
        request: bytes = await self._redis.xadd(_ORDERS, fields)
        await self._sweep(request.decode())
        return request.decode()

    async def ask(self, order: Mapping[str, Any], timeout_s: float, *, worker: str = "") -> Any:
        """The answer of any worker, or of this one. Raises TooManyRequests, NoWorkerThere, NoAnswer,
        WorkerRequestFailed."""
        request = await self.send(order, worker=worker)
        try:
            answer = await self._wait(request, timeout_s)
        finally:
            await self._forget(request)
        if "error" in answer:
            raise WorkerRequestFailed(answer["error"])
        return answer["result"]

    async def next(self, after: str, worker: str, *, block_ms: int = 1000) -> tuple[str, WorkerRequest | None]:
        """The position to continue from, and the request this worker has now taken, if any."""
        reply = await self._redis.xread({_ORDERS: after}, count=1, block=min(block_ms, MAX_BLOCK_MS))
        if not reply:
            return after, None
        entry, fields = reply[0][1][0]
        request = entry.decode()
        wanted = fields.get(b"worker", b"").decode()
        if wanted not in ("", worker) or not await self._redis.hsetnx(_CLAIMS, request, worker):
            return request, None
        return request, WorkerRequest(request, json.loads(fields[b"order"]), fields[b"awaited"] == b"1")

    async def answer(self, request: WorkerRequest, answer: Mapping[str, Any]) -> None:
        """``{"result": ...}`` or ``{"error": text}``."""
        if not request.is_awaited:
            await self._forget(request.id)
            return
        await self._redis.hset(_ANSWERS, request.id, json.dumps(dict(answer), allow_nan=False))
        # The asker may be gone, and then nothing else would remove the answer.
        if not await self._redis.xrange(_ORDERS, request.id, request.id):
            await self._forget(request.id)

    async def _wait(self, request: str, timeout_s: float) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        asked = loop.time()
        while True:
            text = await self._redis.hget(_ANSWERS, request)
            if text is not None:
                answer: dict[str, Any] = json.loads(text)
                return answer
            waited_s = loop.time() - asked
            if waited_s > TAKEN_WITHIN_S and not await self._redis.hexists(_CLAIMS, request):
                raise NoWorkerThere
            if waited_s > timeout_s:
                raise NoAnswer
            await asyncio.sleep(LOOK_S)

    async def _forget(self, *worker_requests: str) -> None:
        await self._redis.xdel(_ORDERS, *worker_requests)
        await self._redis.hdel(_CLAIMS, *worker_requests)
        await self._redis.hdel(_ANSWERS, *worker_requests)

    async def _sweep(self, newest: str | None) -> None:
        """Remove requests older than the longest wait."""
        if newest is None:
            last = await self._redis.xrevrange(_ORDERS, count=1)
            newest = last[0][0].decode() if last else "0-0"
        before = int(newest.partition("-")[0]) - MAX_AGE_MS
        if before > 0:
            old = await self._redis.xrange(_ORDERS, "-", f"{before}", count=MAX_OPEN)
            if old:
                await self._forget(*(entry.decode() for entry, _ in old))
