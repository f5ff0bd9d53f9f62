"""Messages of the Agent Client Protocol: JSON-RPC 2.0, one object a line, to and from a program.

Rule: what the program writes is bounded, and what is no message is refused by name, for the protocol leaves no place
for other lines. Requests of the program are answered while an answer of its own is waited for. What they ask is none
of this module's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import Protocol

from gspo_core.json_value import JSON

MAX_LINE_BYTES = 16 << 20
# A message for each token of the longest episode, and then some.
MAX_MESSAGES = 1_000_000
MAX_SHOWN_CHARS = 500
METHOD_NOT_FOUND, INVALID_PARAMS, INTERNAL_ERROR = -32601, -32602, -32603
AUTH_REQUIRED, RESOURCE_NOT_FOUND = -32000, -32002


class RpcError(Exception):
    """A request was answered with an error, by either side."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{message} ({code})")
        self.code, self.message = code, message


class BrokenProtocol(Exception):
    """The program broke the protocol in what it wrote."""


class StreamEnded(Exception):
    """The program writes nothing any more."""


class AcpClient(Protocol):
    """The side that a program asks and tells."""

    def answer(self, method: str, params: Mapping[str, JSON]) -> JSON:
        """Raises ``RpcError``."""
        ...

    def hear(self, method: str, params: Mapping[str, JSON]) -> None:
        """A notification, which gets no answer."""
        ...


class AcpConnection:
    """``reader`` has to be made with ``MAX_LINE_BYTES`` as its limit."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, client: AcpClient) -> None:
        self._reader, self._writer, self._client = reader, writer, client
        self._num_asked = self._num_read = 0

    async def request(self, method: str, params: Mapping[str, JSON]) -> Mapping[str, JSON]:
        """The result. Raises ``RpcError``, ``BrokenProtocol`` and ``StreamEnded``."""
        return await self.answer_to(await self.ask(method, params))

    async def ask(self, method: str, params: Mapping[str, JSON]) -> int:
        """The number by which ``answer_to`` knows it."""
        self._num_asked += 1
        await self._send({"id": self._num_asked, "method": method, "params": dict(params)})
        return self._num_asked

    async def tell(self, method: str, params: Mapping[str, JSON]) -> None:
        await self._send({"method": method, "params": dict(params)})

    async def answer_to(self, number: int) -> Mapping[str, JSON]:
        while True:
            message = await self._next()
            if "method" in message:
                await self._serve(message)
            elif "error" in message and message.get("id") in (number, None):
                raise _error_of(message["error"])
            elif message.get("id") == number:
                result = message.get("result")
                return result if isinstance(result, dict) else {}

    async def _serve(self, message: Mapping[str, JSON]) -> None:
        method, given = message["method"], message.get("params")
        params = given if isinstance(given, dict) else {}
        if "id" not in message:
            self._client.hear(str(method), params)
            return
        reply: dict[str, JSON] = {"id": message["id"]}
        try:
            reply["result"] = self._client.answer(str(method), params)
        except RpcError as error:
            reply["error"] = {"code": error.code, "message": error.message}
        await self._send(reply)

    async def _send(self, message: Mapping[str, JSON]) -> None:
        self._writer.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        with contextlib.suppress(ConnectionError):  # it reads no more; what it writes says whether it is gone
            await self._writer.drain()

    async def _next(self) -> Mapping[str, JSON]:
        line = b""
        while not line.strip():
            try:
                line = await self._reader.readuntil(b"\n")
            except asyncio.IncompleteReadError as error:
                if not error.partial.strip():
                    raise StreamEnded from None
                line = error.partial
            except asyncio.LimitOverrunError:
                raise BrokenProtocol(f"a line of more than {MAX_LINE_BYTES} bytes") from None
            self._num_read += 1
            if self._num_read > MAX_MESSAGES:
                raise BrokenProtocol(f"more than {MAX_MESSAGES} messages")
        try:
            message: JSON = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            shown = line[: 4 * MAX_SHOWN_CHARS].decode("utf-8", "replace").strip()[:MAX_SHOWN_CHARS]
            raise BrokenProtocol(f"a line that is no message of the Agent Client Protocol: {shown}")
        return message


def _error_of(error: JSON) -> RpcError:
    told = error if isinstance(error, dict) else {}
    code, message, data = told.get("code"), str(told.get("message")), told.get("data")
    more = "" if data is None else f": {data if isinstance(data, str) else json.dumps(data)}"
    return RpcError(code if isinstance(code, int) else 0, (message + more)[: 4 * MAX_SHOWN_CHARS])
