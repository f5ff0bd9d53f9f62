"""What this installation can do, so that clients can adapt."""

from __future__ import annotations

from typing import Literal

from gspo_core import __version__
from gspo_core.objective_config import NAMES
from services.api.http.context import ContextOf
from services.api.http.presence import ROLES
from services.api.http.requests import MAX_BODY_BYTES
from services.api.http.routers import v1_router
from services.api.submission.environment_sources import SOURCES
from services.api.views.store_views import View

router = v1_router("operations", "/capabilities")


class CapabilitiesView(View):
    object: Literal["capabilities"] = "capabilities"
    version: str
    objectives: list[str]
    """Values of `objective.name`."""
    environment_sources: list[str]
    """Where an environment can come from."""
    limits: dict[str, int]
    features: dict[str, bool]
    """Features that this installation has (true) or lacks (false)."""
    num_alive: dict[str, int]
    """Processes of each role that are alive."""


@router.get("")
async def capabilities(context: ContextOf) -> CapabilitiesView:
    """What this installation can do."""
    members = await context.presence.members()
    return CapabilitiesView(
        version=__version__,
        objectives=list(NAMES),
        environment_sources=[*SOURCES, *(["upload"] if context.may_upload else [])],
        limits={"max_body_bytes": MAX_BODY_BYTES, "max_page": 100},
        features=_FEATURES | {"environment_upload": context.may_upload},
        num_alive={role: sum(one.is_alive for one in members if one.role == role) for role in ROLES},
    )


_FEATURES = {
    "pause": True,
    "event_stream": True,
    "episodes": True,
    "live_tuning": True,
    "environment_registration": True,
    "pushed_trajectories": True,
    "checkpoint_export": True,
    "openai_facade": True,
}
