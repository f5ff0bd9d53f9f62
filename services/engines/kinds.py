"""The kinds of engines there are, and how an address becomes an engine.

Rule: a kind is one line in ``KINDS``; nothing else in the system names it. An address without a kind is of the default
one; ``KIND+http://host:port`` names another, whose client is loaded with the first such address. It does not know
where engines are or who may use them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from services.engines.errors import NoSuchKind
from services.engines.http_engine import open_http
from services.engines.keys import NO_KEYS, EngineKeys
from services.engines.protocol import Connect, Engine
from services.engines.sglang import open_sglang

OpenKind = Callable[[int, EngineKeys], AbstractAsyncContextManager[Connect]]
"""From a number of connections per engine, and keys, to a context that connects to engines of the kind."""


@asynccontextmanager
async def _open_vllm(max_connections: int, keys: EngineKeys) -> AsyncIterator[Connect]:
    async with open_http(max_connections=max_connections) as http:

        def connect(url: str) -> Engine:
            from services.engines.vllm import VllmClient  # loaded with the first address: most installations have none

            return VllmClient(url, http, keys.for_engine(url))

        yield connect


DEFAULT_KIND = "sglang"
KINDS: Mapping[str, OpenKind] = {
    DEFAULT_KIND: open_sglang,
    "vllm": _open_vllm,
}


@asynccontextmanager
async def open_engines(keys: EngineKeys = NO_KEYS, *, max_connections: int = 512) -> AsyncIterator[Connect]:
    """Connects to engines of every kind while it is open.

    A request to an engine beyond its ``max_connections`` waits; leave room for control calls beside the generate calls.
    """
    async with AsyncExitStack() as stack:
        kinds = {name: await stack.enter_async_context(open_(max_connections, keys)) for name, open_ in KINDS.items()}

        def connect(address: str) -> Engine:
            """Raises NoSuchKind."""
            return kinds[kind_of(address)](address)

        yield connect


def engine_is_ready(address: str) -> bool:
    """For a caller that has no event loop."""

    async def ask() -> bool:
        async with open_engines() as connect:
            return await connect(address).is_ready()

    return asyncio.run(ask())


def kind_of(address: str) -> str:
    """The kind that an address names. Raises NoSuchKind."""
    name, plus, _ = address.partition("://")[0].partition("+")
    if not plus:
        return DEFAULT_KIND
    if name == DEFAULT_KIND or name not in KINDS:
        others = ", ".join(sorted(KINDS.keys() - {DEFAULT_KIND})) or "none"
        raise NoSuchKind(f"{address} names an unknown kind of engine; kinds that can be named: {others}")
    return name
