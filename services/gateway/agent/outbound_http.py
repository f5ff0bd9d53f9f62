"""HTTP to addresses that a job names, under the operator's rules for what may be connected to.

Rule: what is judged is the address, in the moment in which it is connected to, so no second answer of a resolver gets
past it (`gspo_core.outbound`); redirects are not followed, and no proxy of the environment is used. It retries nothing.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpcore

from gspo_core.outbound import AddressRefused, Network, check_url, is_allowed

MAX_CONNECTIONS = 256
CONNECT_S = 10.0
# That a service does not answer as it should, or not at all.
AWAY = (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError, TimeoutError)


class AnswerTooLong(ValueError):
    """Its body is longer than was asked for."""


@dataclass(frozen=True, slots=True)
class OutboundAnswer:
    status: int
    body: bytes
    retry_after_s: float | None = None
    """What the answer asks for."""


class _AllowedAddresses(httpcore.AsyncNetworkBackend):
    def __init__(self, networks: Sequence[Network]) -> None:
        self._networks = networks
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        failure: Exception = httpcore.ConnectError(f"{host} cannot be resolved")
        for address in await _addresses(host, port):
            if not is_allowed(address, self._networks):
                raise AddressRefused(f"{host} resolves to an address that is not allowed")
            try:
                return await self._inner.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)


async def _addresses(host: str, port: int) -> list[str]:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise httpcore.ConnectError(f"{host} cannot be resolved: {error}") from error
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class OutboundHttp:
    def __init__(self, pool: httpcore.AsyncConnectionPool, networks: Sequence[Network]) -> None:
        self._pool = pool
        self._networks = networks

    async def post(
        self, url: str, body: bytes, headers: Mapping[str, str], *, timeout_s: float, most_bytes: int
    ) -> OutboundAnswer:
        """Raises ``AddressRefused``, ``AnswerTooLong``, ``TimeoutError``, and the errors of httpcore (``AWAY``)."""
        await asyncio.to_thread(check_url, url, self._networks)
        request = self._pool.stream(
            "POST",
            url,
            headers=list(headers.items()),
            content=body,
            extensions={"timeout": {"connect": min(CONNECT_S, timeout_s)}},
        )
        async with asyncio.timeout(timeout_s), request as response:
            read = bytearray()
            async for piece in response.aiter_stream():
                read += piece
                if len(read) > most_bytes:
                    raise AnswerTooLong(f"its answer has more than {most_bytes} bytes")
        return OutboundAnswer(response.status, bytes(read), _retry_after(response.headers))


@asynccontextmanager
async def outbound_http(networks: Sequence[Network]) -> AsyncIterator[OutboundHttp]:
    backend = _AllowedAddresses(networks)
    async with httpcore.AsyncConnectionPool(
        max_connections=MAX_CONNECTIONS, max_keepalive_connections=16, network_backend=backend
    ) as pool:
        yield OutboundHttp(pool, networks)


def _retry_after(headers: Iterable[tuple[bytes, bytes]]) -> float | None:
    """Its seconds; dates are rare, and not read."""
    for name, value in headers:
        if name.lower() == b"retry-after" and value.strip().isdigit():
            return float(value)
    return None
