"""The processes that work on jobs."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from services.api.context import ContextOf
from services.api.views import Page, page

router = APIRouter(prefix="/workers", tags=["workers"])


@router.get("")
async def list_workers(context: ContextOf) -> Page[dict[str, Any]]:
    """Trainers, rollout workers and engines that have registered, each with whether it is `alive`."""
    everyone = await context.presence.members()
    return page(everyone, max(1, len(everyone)))
