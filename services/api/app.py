"""The application: routes, rules of access and errors put together.

One rule: everything that a route uses is made in the lifespan and handed to it, so that any number of applications can
live in one process. The caller chooses the Redis.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI

from gspo_core import __version__
from services.api.http import errors
from services.api.http.access import Access, AccessMiddleware
from services.api.http.audit import Audit
from services.api.http.brakes import Brakes
from services.api.http.context import ApiContext, Backend, OpenBackend
from services.api.http.document import Application
from services.api.http.key_ring import KeyRing
from services.api.http.limits import RateLimit, SharedRateLimit
from services.api.http.presence import Presence
from services.api.http.repeats import RepeatMiddleware
from services.api.http.requests import RequestMiddleware
from services.api.http.sse import PING_S, render
from services.api.http.traffic import Traffic
from services.api.http.unattended import Unattended
from services.api.routes import (
    artifacts,
    capabilities,
    checkpoints,
    engines,
    environments,
    episodes,
    erasing,
    events,
    fine_tuning,
    forks,
    health,
    jobs,
    leases,
    metrics,
    pages,
    replays,
    settings,
    telemetry,
    traffic,
    trajectories,
    workers,
)
from services.api.routes import keys as keys_of_others
from services.api.views.codecs import Codecs
from services.api.views.event_tails import EventTails
from services.api.views.exports import Exports
from services.api.views.history import TrainedHistory
from services.api.views.replays import ReplayWork
from services.process.cancelling import cancel_all
from services.state.functions import Functions
from services.state.kept_replies import KeptReplies
from services.state.loans import Loans
from services.state.process_requests import Drains, WorkerRequests
from services.state.resubmissions import Resubmissions

LEASE_S = 30.0


def create_app(
    open_backend: OpenBackend,
    *,
    keys: Sequence[str] = (),
    ring: KeyRing | None = None,
    may_be_open: bool = True,
    audit: Audit | None = None,
    stopping: asyncio.Event | None = None,
    lease_s: float = LEASE_S,
    ping_s: float = PING_S,
) -> FastAPI:
    """An application that keeps its backend open while it runs. Without keys it serves this machine only.

    `keys` may do everything; those on the `ring` have scopes. `may_be_open` must be False where other machines can
    reach it. The `audit` records every change.

    The caller sets `stopping` before it shuts down, since open streams would hold it up.
    """

    seen = Traffic()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with open_backend() as backend:
            presence = Presence(backend.store, lease_s, time.monotonic)
            app.state.context = _context(backend, presence, seen, ring, stopping or asyncio.Event(), ping_s)
            unattended = Unattended(backend.store, presence, lease_s, time.monotonic)
            async with _at_work(app.state.context, presence, unattended):
                yield

    app = Application(
        title="GSPO",
        version=__version__,
        description="Jobs that train language-model agents by asynchronous reinforcement learning.",
        lifespan=lifespan,
        # The interactive pages load scripts from other hosts; tools need only the document.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    # The last middleware added sees a request first.
    app.add_middleware(RepeatMiddleware)
    app.add_middleware(
        AccessMiddleware,
        access=Access(keys, ring, may_be_open=may_be_open),
        limit=SharedRateLimit(RateLimit(time.monotonic)),
        brakes=Brakes(time.monotonic),
    )
    app.add_middleware(RequestMiddleware, traffic=seen, audit=audit)
    errors.install(app)
    _add_routes(app)
    return app


@asynccontextmanager
async def _at_work(context: ApiContext, presence: Presence, unattended: Unattended) -> AsyncIterator[None]:
    watching = asyncio.create_task(presence.run(), name="presence")
    telling = asyncio.create_task(unattended.run(), name="jobs without a trainer")
    try:
        yield
    finally:
        await context.exports.close()
        await context.replays.close()
        await cancel_all([watching, telling], again_after_s=0.1)
        await presence.close()


def _add_routes(app: FastAPI) -> None:
    for module in (
        *(health, telemetry, pages, jobs, events, metrics, artifacts, checkpoints, episodes, trajectories),
        *(environments, workers, engines, capabilities, keys_of_others, fine_tuning, settings, leases, forks),
        *(replays, traffic, erasing),
    ):
        app.router.routes.extend(module.router.routes)


def _context(
    backend: Backend, presence: Presence, traffic: Traffic, ring: KeyRing | None, stopping: asyncio.Event, ping_s: float
) -> ApiContext:
    return ApiContext(
        store=backend.store,
        bus=backend.bus,
        functions=Functions(backend.redis),
        loans=Loans(Functions(backend.redis)),
        history=TrainedHistory(backend.jobs_dir),
        codecs=Codecs(backend.jobs_dir),
        stopping=stopping,
        presence=presence,
        tails=EventTails(backend.news or backend.store, render, stopping),
        traffic=traffic,
        ring=ring,
        worker_requests=WorkerRequests(backend.redis),
        exports=Exports(),
        replays=ReplayWork(),
        drains=Drains(backend.redis),
        resubmissions=Resubmissions(backend.redis),
        replies=KeptReplies(backend.redis),
        registry=backend.registry,
        networks=backend.networks,
        may_upload=backend.may_upload,
        hub=backend.hub,
        ping_s=ping_s,
    )
