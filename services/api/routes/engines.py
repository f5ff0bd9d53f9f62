"""Engines that are to be left alone, before they are stopped or replaced."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter

from services.api.context import Context, ContextOf
from services.api.errors import ApiError
from services.api.views import View

router = APIRouter(prefix="/engines", tags=["workers"])


class EngineDrainView(View):
    """An engine that was asked to be left alone, or is used again."""

    object: Literal["engine.drain"] = "engine.drain"
    id: str
    alive: bool
    state: Literal["in_use", "draining", "drained"]
    """`drained` when no job holds it any more: then it may be stopped."""
    job: str | None
    """The job that still holds it."""


@router.post("/{engine:path}/drain", status_code=202)
async def drain_engine(engine: str, context: ContextOf) -> EngineDrainView:
    """Leave an engine, named by its address, alone: it gets no new requests and no new weights. What runs on it goes on
    to its end, then its job gives it back. It stays so, also when it is started again at this address, until it is used
    again (DELETE)."""
    found = await _find(context, engine)
    await context.store.drain_engine(engine)
    return _view(found | {"draining": True})


@router.delete("/{engine:path}/drain")
async def use_engine_again(engine: str, context: ContextOf) -> EngineDrainView:
    """Use it again."""
    found = await _find(context, engine)
    await context.store.drain_engine(engine, False)
    return _view(found | {"draining": False})


async def _find(context: Context, engine: str) -> dict[str, Any]:
    members = await context.presence.members()
    found = next((one for one in members if one["role"] == "engine" and one["id"] == engine), None)
    if found is None:
        raise ApiError(404, "engine_not_found", f"no engine {engine[:80]!r} is registered", param="engine")
    return found


def _view(record: dict[str, Any]) -> EngineDrainView:
    job = record.get("job")
    state: Literal["in_use", "draining", "drained"] = "draining" if job else "drained"
    return EngineDrainView(
        id=record["id"], alive=record["alive"], state=state if record["draining"] else "in_use", job=job
    )
