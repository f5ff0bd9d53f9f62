"""The tools of the routes: made once when the application starts, handed to each route, never global."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Annotated, cast

from fastapi import Depends, Request

from gspo_core.outbound import Network
from services.api.http.key_ring import KeyRing
from services.api.http.presence import Presence
from services.api.http.sse import PING_S
from services.api.http.streams import Streams
from services.api.http.traffic import Traffic
from services.api.views.codecs import Codecs
from services.api.views.event_tails import EventTails
from services.api.views.exports import Exports
from services.api.views.history import TrainedHistory
from services.api.views.replays import ReplayWork
from services.files.data_dir import HubDir
from services.files.environments.registry import EnvironmentRegistry
from services.files.job_dir import JobsDir
from services.state.client import RedisClient
from services.state.functions import Functions
from services.state.kept_replies import KeptReplies
from services.state.loans import Loans
from services.state.process_requests import Drains, WorkerRequests
from services.state.queue import Bus
from services.state.resubmissions import Resubmissions
from services.state.store import Store


@dataclass(frozen=True)
class Backend:
    """The control plane, the queue, and the files that all processes share."""

    store: Store
    bus: Bus
    jobs_dir: JobsDir
    redis: RedisClient
    registry: EnvironmentRegistry | None = None
    """None: environments cannot be registered."""
    networks: tuple[Network, ...] = ()
    """Where registered URLs may lead, besides public addresses."""
    may_upload: bool = False
    hub: HubDir | None = None
    """Models that were fetched; None: names of the hub stay as they are."""
    news: Store | None = None
    """Waits for events on connections of its own, since each wait holds one; None: ``store``."""


OpenBackend = Callable[[], AbstractAsyncContextManager[Backend]]


@dataclass(frozen=True)
class ApiContext:
    store: Store
    bus: Bus
    functions: Functions
    loans: Loans
    history: TrainedHistory
    codecs: Codecs
    stopping: asyncio.Event
    """Set when the process is about to end; streams end soon after."""
    presence: Presence
    tails: EventTails
    traffic: Traffic
    ring: KeyRing | None
    """None: the only keys are those of the settings."""
    worker_requests: WorkerRequests
    exports: Exports
    replays: ReplayWork
    drains: Drains
    resubmissions: Resubmissions
    replies: KeptReplies
    registry: EnvironmentRegistry | None = None
    networks: tuple[Network, ...] = ()
    may_upload: bool = False
    hub: HubDir | None = None
    """Models that were fetched; None: names of the hub stay as they are."""
    clock: Callable[[], float] = time.monotonic
    ping_s: float = PING_S
    streams: Streams = field(default_factory=Streams)


async def _context(request: Request) -> ApiContext:
    # A coroutine: the framework runs plain functions in a thread, each time.
    return cast(ApiContext, request.app.state.context)


ContextOf = Annotated[ApiContext, Depends(_context)]
