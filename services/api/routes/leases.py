"""Episodes that agents fetch by themselves: lent to one agent at a time, kept by signs of life, ended.

Rule: the same `Idempotency-Key` of one caller names the same lease, so a lost answer costs no episode. Here only Redis
is asked; the gateway that holds the episode watches its agent, and answers it.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable
from datetime import UTC, datetime
from typing import Annotated, Literal
from uuid import uuid4

import msgspec
from fastapi import Header, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, JsonValue

from gspo_core.invariants import MOST_SIZE
from services.api.http.access import Caller
from services.api.http.context import ApiContext, ContextOf
from services.api.http.errors import FINAL, RequestRefused, documented
from services.api.http.routers import v1_router
from services.api.http.stored_specs import readable_spec
from services.api.views.store_views import View
from services.state.loans import Lent, Loan
from services.state.refusals import Fenced, OutOfRange

router = v1_router("leases", "/jobs")

LEASE_S = 300.0
LOOK_S = 0.25
LeaseId = Annotated[str, Path(pattern=r"^[0-9a-f]{32}$")]
IdempotencyKey = Annotated[str | None, Header(max_length=255, pattern=r"^[\x21-\x7e]+$")]
Length = Annotated[FiniteFloat, Field(ge=5, le=86_400)]


class LeaseQuery(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    lease_s: Length = LEASE_S
    """The agent gives a sign of life at least so often: it asks for a turn, or extends the lease. Otherwise the episode
    goes to another agent."""
    wait_s: Annotated[FiniteFloat, Field(ge=0, le=30)] = 0.0
    """How long to wait for an episode."""


class ExtendQuery(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    lease_s: Length = LEASE_S
    """From now on."""


class FinishQuery(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    reward: Annotated[FiniteFloat, Field(ge=-MOST_SIZE, le=MOST_SIZE)] | None = None
    """What the episode was worth, within the `reward_range` of its environment; left out: what was posted with its key,
    or what `get_reward` of the job says."""


class LeaseView(View):
    """The hold that an agent has of an episode."""

    object: Literal["lease"] = "lease"
    id: str
    job_id: str
    episode: str
    attempt: int
    state: Literal["lent", "finished", "released", "expired"]
    lease_s: float
    expires_at: str
    """At the earliest, where no sign of life comes before."""


class NewLeaseView(LeaseView):
    """An episode to play."""

    task: JsonValue
    base_url: str
    """For the OpenAI dialects; without `/v1`, for Anthropic's."""
    api_key: str
    """Valid for this attempt alone."""
    model: str
    reward_key: str = ""
    """By which rewards are posted; it samples nothing."""


@router.post(
    "/{id}/episodes:lease",
    response_model=NewLeaseView,
    responses={204: {"description": "No episode waits for an agent"}, **documented(409)},
)
async def lease(
    id: str,
    query: Annotated[LeaseQuery, Query()],
    request: Request,
    response: Response,
    context: ContextOf,
    idempotency_key: IdempotencyKey = None,
) -> NewLeaseView | Response:
    """Fetch an episode to play, with its task, and the base URL and key where its turns are asked for. It is for jobs
    whose entries say `agent: {pull: true}`."""
    caller: Caller = request.scope["caller"]
    loan_id = _loan_id(caller, id, idempotency_key)
    until = context.clock() + query.wait_s
    while (lent := await context.loans.lend(id, loan_id, query.lease_s, _till(query.lease_s))) is None:
        await _expect_episodes(context, id)
        if context.clock() >= until or context.stopping.is_set():
            return Response(status_code=204)
        await asyncio.sleep(LOOK_S)
    response.headers["Cache-Control"] = "no-store"
    if lent.is_again:
        response.headers["Idempotent-Replayed"] = "true"
    return _new_view(lent)


@router.post("/{id}/leases/{lease}/extend", responses=documented(409))
async def extend(id: str, lease: LeaseId, query: Annotated[ExtendQuery, Query()], context: ContextOf) -> LeaseView:
    """Give a sign of life. Requests for turns are such signs too."""
    return await _known(context.loans.extend(id, lease, query.lease_s, _till(query.lease_s)))


@router.post("/{id}/leases/{lease}/finish", responses=documented(409))
async def finish(id: str, lease: LeaseId, query: Annotated[FinishQuery, Query()], context: ContextOf) -> LeaseView:
    """Say that the episode was played to its end. It has its outcome a moment later."""
    try:
        return await _known(context.loans.finish(id, lease, query.reward))
    except OutOfRange as error:
        message = f"{query.reward} is outside the reward_range {error.detail} of its environment; the lease goes on"
        raise RequestRefused(422, "validation_failed", message, param="reward") from None


@router.post("/{id}/leases/{lease}/release", responses=documented(409))
async def release(id: str, lease: LeaseId, context: ContextOf) -> LeaseView:
    """Give the episode back. Another agent begins it again; what was sampled for it is thrown away."""
    return await _known(context.loans.release(id, lease))


def _loan_id(caller: Caller, job: str, idempotency_key: str | None) -> str:
    if idempotency_key is None:
        return uuid4().hex
    return hashlib.sha256(f"{caller.name}\0{job}\0{idempotency_key}".encode()).hexdigest()[:32]


async def _expect_episodes(context: ApiContext, id: str) -> None:
    """Raises RequestRefused where none will ever wait."""
    job = await context.store.jobs.get(id)
    if job.status.is_terminal:
        raise RequestRefused(409, "job_over", f"{id} is over: it has no further episodes", headers=FINAL)
    spec = readable_spec(job)
    if spec is not None and not any(one.agent is not None and one.agent.pull for one in spec.environments):
        message = f"no agent of {id} fetches its episodes: its entries do not say agent: {{pull: true}}"
        raise RequestRefused(409, "agents_do_not_pull", message, headers=FINAL)


async def _known(asked: Awaitable[Loan]) -> LeaseView:
    try:
        return _view(await asked)
    except Fenced:
        message = "this lease is over: it ran out, was ended, or its episode has its outcome"
        raise RequestRefused(409, "lease_over", message, param="lease", headers=FINAL) from None


def _till(length_s: float) -> str:
    ends = datetime.fromtimestamp(time.time() + length_s, UTC)
    return ends.isoformat(timespec="seconds").replace("+00:00", "Z")


def _view(loan: Loan) -> LeaseView:
    return LeaseView(
        id=loan.id,
        job_id=loan.key.job,
        episode=str(loan.key),
        attempt=loan.attempt,
        state=loan.state.value,
        lease_s=loan.length_s,
        expires_at=loan.till,
    )


def _new_view(lent: Lent) -> NewLeaseView:
    if not lent.told:
        message = "the lease of this Idempotency-Key is over; ask for another one with a new key"
        raise RequestRefused(409, "lease_over", message, param="Idempotency-Key", headers=FINAL)
    return NewLeaseView(**dict(_view(lent.loan)), **msgspec.json.decode(lent.told))
