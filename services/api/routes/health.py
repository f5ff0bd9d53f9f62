"""Whether this process is alive, and whether it can serve. Open to everyone, so it says nothing about jobs."""

from __future__ import annotations

import asyncio
from typing import Literal

from pydantic import BaseModel

from services.api.http.context import ApiContext, ContextOf
from services.api.http.errors import RequestRefused
from services.api.http.presence import RegisteredProcess
from services.api.http.routers import open_router
from services.api.http.stored_specs import is_of_agents
from services.api.views.store_views import ReadyView
from services.state.client import Away, AwayReason
from services.state.fleet_records import WorkerRecord

router = open_router("operations")

# Probes come every few seconds and want an answer now, not after the client's retries.
PROBE_TIMEOUT_S = 2.0


class AliveView(BaseModel):
    status: Literal["alive"] = "alive"


@router.get("/healthz")
async def healthz() -> AliveView:
    """The process answers. It depends on nothing else, so restarts may be decided by it."""
    return AliveView()


_UNHEARD = "agents end without a request: can they reach the gateway under GSPO_GATEWAY_URL?"


def _is_unheard(member: RegisteredProcess) -> bool:
    return member.is_alive and isinstance(member.record, WorkerRecord) and member.record.hears_no_agent


async def _has_agents(context: ApiContext) -> bool:
    """Whether agents play the episodes of a job that is under way."""
    for job in await context.store.jobs.served():
        if is_of_agents(await context.store.jobs.get(job)):
            return True
    return False


@router.get("/readyz")
async def readyz(context: ContextOf) -> ReadyView:
    """200 when this process can serve; what other processes lack is listed as degraded."""
    if context.stopping.is_set():
        raise RequestRefused(503, "shutting_down", "this process is shutting down", headers={"Retry-After": "1"})
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            members = await context.presence.members()
    except TimeoutError:
        raise Away(AwayReason.UNREACHABLE) from None
    # A process that was asked to leave is not missing.
    lost = [one for one in members if not one.is_alive and not one.draining]
    degraded = [f"the {one.role} process {one.id} has stopped" for one in lost]
    playing = {one.role for one in members if one.is_alive}
    if not playing & {"rollout", "gateway"}:
        degraded.insert(0, "no rollout worker is running: jobs wait")
    elif "gateway" not in playing and await _has_agents(context):
        degraded.insert(0, "no gateway is running: jobs of agents wait")
    degraded += [f"{_UNHEARD} (asked for nothing at {one.id})" for one in members if _is_unheard(one)]
    return ReadyView(degraded=degraded)
