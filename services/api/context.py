"""What the routes work with: made once when the application starts, handed to each route, global nowhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, Request

from services.api.presence import Presence
from services.api.sse import PING_S
from services.store import Store

OpenStore = Callable[[], AbstractAsyncContextManager[Store]]


@dataclass(frozen=True)
class Context:
    store: Store
    stopping: asyncio.Event
    """Set when the process is about to end; streams end soon after."""
    presence: Presence
    clock: Callable[[], float] = time.monotonic
    ping_s: float = PING_S


def _context(request: Request) -> Context:
    return cast(Context, request.app.state.context)


ContextOf = Annotated[Context, Depends(_context)]
