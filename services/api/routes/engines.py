"""Draining engines, before they are stopped or replaced."""

from __future__ import annotations

from typing import Literal

from services.api.http.context import ApiContext, ContextOf
from services.api.http.errors import RequestRefused
from services.api.http.routers import v1_router
from services.api.views.store_views import View
from services.state.fleet_records import EngineRecord

router = v1_router("workers", "/engines")


class EngineDrainView(View):
    """An engine that is drained, or in use again."""

    object: Literal["engine.drain"] = "engine.drain"
    id: str
    alive: bool
    state: Literal["in_use", "draining", "drained"]
    """`drained` once no job holds it: then it may be stopped."""
    job: str | None
    """The job that still holds it."""


@router.post("/{engine:path}/drain", status_code=202)
async def drain_engine(engine: str, context: ContextOf) -> EngineDrainView:
    """Drain an engine, named by its address: it gets no new requests and no new weights. Running requests finish, then
    its job gives it back. It stays drained, even if it restarts at this address, until it is used again (DELETE)."""
    found = await _find(context, engine)
    await context.store.fleet.drain_engine(engine)
    return _view(*found, draining=True)


@router.delete("/{engine:path}/drain")
async def use_engine_again(engine: str, context: ContextOf) -> EngineDrainView:
    """Use it again."""
    found = await _find(context, engine)
    await context.store.fleet.drain_engine(engine, False)
    return _view(*found, draining=False)


async def _find(context: ApiContext, engine: str) -> tuple[EngineRecord, bool]:
    """Its record, and whether it is alive."""
    for one in await context.presence.members():
        if isinstance(one.record, EngineRecord) and one.id == engine:
            return one.record, one.is_alive
    raise RequestRefused(404, "engine_not_found", f"no engine {engine[:80]!r} is registered", param="engine")


def _view(record: EngineRecord, is_alive: bool, *, draining: bool) -> EngineDrainView:
    state: Literal["in_use", "draining", "drained"] = "draining" if record.job else "drained"
    return EngineDrainView(id=record.id, alive=is_alive, state=state if draining else "in_use", job=record.job)
