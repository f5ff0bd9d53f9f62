"""The kinds of engines there are, and how an address becomes an engine.

Rule: a kind is one line in ``KINDS``; nothing else in the system names it. An address without a kind is of the default
one; ``KIND+http://host:port`` names another. It does not know where engines are or who may use them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import httpx

from services.engines.http_engine import open_http
from services.engines.keys import NO_KEYS, EngineKeys, KeyPair
from services.engines.protocol import Connect, Engine, NoSuchKind

OneEngine = Callable[[str, httpx.AsyncClient, KeyPair], Engine]
"""From an address, the connections to all engines, and its keys."""


def _sglang() -> OneEngine:
    from services.engines.sglang import EngineClient

    return EngineClient


def _vllm() -> OneEngine:
    from services.engines.vllm import VllmClient

    return VllmClient


DEFAULT_KIND = "sglang"
# Loaded with the first address of the kind: few installations have several.
KINDS: Mapping[str, Callable[[], OneEngine]] = {DEFAULT_KIND: _sglang, "vllm": _vllm}


@asynccontextmanager
async def open_engines(keys: EngineKeys = NO_KEYS, *, max_connections: int = 512) -> AsyncIterator[Connect]:
    """Connects to engines of every kind while it is open; all of them share one pool.

    A request to an engine beyond its ``max_connections`` waits; leave room for control calls beside the generate calls.
    """
    async with open_http(max_connections=max_connections) as http:

        def connect(address: str) -> Engine:
            """Raises NoSuchKind."""
            return KINDS[kind_of(address)]()(address, http, keys.for_engine(address))

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
