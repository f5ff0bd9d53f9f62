"""Replays as the API shows them: what was asked of trained steps, how far it has come, and what was found."""

from __future__ import annotations

from typing import Any, Literal

from services.api.views.store_views import View
from services.files.replays import AskedReplay

Status = Literal["waiting", "running", "interrupted", "done", "failed"]


class ReplayView(View):
    """A question about trained steps, answered by training them again."""

    object: Literal["job.replay"] = "job.replay"
    id: str
    job_id: str
    status: Status
    """`interrupted`: the process that worked on it has ended; ask again, and it begins anew."""
    first: int
    last: int
    set: dict[str, Any]
    """Settings that are to be different, by key."""
    without: list[str]
    """Groups, episodes and parts of the reward that are left out."""
    single: str | None
    """`GROUP/MEMBER` of the episode whose tokens are shown."""
    influence: bool
    """Whether each group is left out in turn."""
    from_checkpoint: int | None
    """Step of the checkpoint that it begins with; null: the base model."""
    replayed_steps: int
    """Steps that are trained again to get to the first one asked for."""
    trained_steps: int
    """Steps that are trained in all."""
    done_steps: int | None
    """How many of these are trained by now; null unless the API process that answers works on it."""
    created_at: str
    finished_at: str | None
    message: str | None
    """Why it failed; while it runs, what it said last."""


class VersionFound(View):
    """A published version beside the weights that were trained again."""

    version: int
    step: int
    epoch: int
    is_same: bool
    """Every file has the bytes that were published."""
    num_tensors: int
    num_same: int | None
    """Tensors that are bit for bit the same; null where files differ and the version is no longer kept."""
    differing_files: list[str]


class ReplayedStep(View):
    """A step that was trained again as it was."""

    step: int
    loss: float | None
    versions: list[VersionFound]


class DifferenceView(View):
    """How another way from the same weights differs from the one that was taken."""

    cosine: float | None
    """Between the two updates; null where one of them moved nothing."""
    distance: float | None
    """Between the two ends."""
    way: float | None
    """Length of the way that was taken."""
    share: float | None
    """The distance as a share of the way."""


class InfluenceView(DifferenceView):
    """Without one group."""

    group: int


class BranchSharesView(View):
    """The sampled tokens of one branch, in order: an entry for each in every column. Null: it was not trained."""

    position: list[int]
    """In the branch."""
    token: list[int]
    turn: list[int]
    version: list[int]
    staleness: list[int]
    behavior_logprob: list[float | None]
    policy_logprob: list[float | None]
    advantage: list[float | None]
    ratio: list[float | None]
    """For the unit that the token belongs to."""
    weight: list[float | None]
    kept: list[bool]
    clipped: list[bool]
    gated_by: list[list[str]]
    """The gates that closed, for each token."""
    loss: list[float | None]
    """Its share of the step's loss."""


class SingleView(View):
    """One episode in the loss of its step."""

    step: int
    episode: str
    stop_reason: str
    reward: float | None
    reward_parts: dict[str, float]
    advantage: float | None
    loss: float | None
    """Its share of the step's loss."""
    step_loss: float | None
    sum_of_shares: float | None
    """Over all tokens of the step."""
    branches: list[BranchSharesView]


class ReplayAnswer(View):
    """What was found."""

    model: str
    start: str
    """Where it came from: a checkpoint, or the base model."""
    num_replayed: int
    is_same: bool
    """Every version that was published in these steps was found again, bit for bit."""
    steps: list[ReplayedStep]
    otherwise: DifferenceView | None
    """With the change asked for."""
    losses_otherwise: list[float | None]
    influences: list[InfluenceView]
    """The largest distance first."""
    single: SingleView | None


class ReplayDetail(ReplayView):
    """A replay with its answer."""

    answer: ReplayAnswer | None


class ReplayPlan(View):
    """What a replay would take; nothing was begun."""

    object: Literal["job.replay.plan"] = "job.replay.plan"
    from_checkpoint: int | None
    replayed_steps: int
    trained_steps: int


def replay_view(job: str, found: AskedReplay, *, status: Status, said: list[str] | None = None) -> ReplayView:
    """``said``: by the process that works on it."""
    return ReplayView(**_fields(job, found, status, said))


def replay_detail(job: str, found: AskedReplay, *, status: Status, said: list[str] | None = None) -> ReplayDetail:
    answer = None if found.answered is None else found.answered.get("answer")
    return ReplayDetail(**_fields(job, found, status, said), answer=answer)


def _fields(job: str, found: AskedReplay, status: Status, said: list[str] | None) -> dict[str, Any]:
    asked, answered = found.asked, found.answered or {}
    trained: int = asked["plan"]["trained_steps"]
    return {
        "id": found.id,
        "job_id": job,
        "status": status,
        **asked["question"],
        **asked["plan"],
        "done_steps": trained if status == "done" else None if said is None else min(len(said), trained),
        "created_at": asked["created_at"],
        "finished_at": answered.get("finished_at"),
        "message": answered.get("message") or (said[-1] if said else None),
    }
