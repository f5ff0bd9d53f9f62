"""Erases episodes, one by one or by the user whose they are, in the queue and in batch logs, and says what stays.

Rule: the queue comes first, so what leaves it meanwhile is found in a log. What entered the weights is listed and never
said to be gone. An episode that a running job may have to train again is not erased, and the answer says so. Erasing
twice is harmless, and finishes what was begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field

from gspo_core.types import MAX_USER_CHARS, EpisodeKey
from services.api.http import audit
from services.api.http.context import ApiContext, ContextOf
from services.api.http.errors import FINAL, RequestRefused
from services.api.http.routers import v1_router
from services.api.routes.episodes import GroupNumber, MemberNumber
from services.api.views.history import EpisodeNotKept
from services.api.views.store_views import View
from services.files.job_dir import JobDir
from services.state.jobs import JobRecord

# So many are read and decoded in one go.
SEGMENTS_AT_ONCE = 64
SEALED = "its group is being written into a batch log; ask after the job's next checkpoint"

router = v1_router("episodes")


class EraseEpisodesQuery(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    user: Annotated[str, Field(min_length=1, max_length=MAX_USER_CHARS)]
    """Whose episodes are erased, as requests name them (`user`, `safety_identifier`, `metadata.user_id`): those with at
    least one turn that was asked for in that name."""


class EnteredView(View):
    """A step that an episode entered."""

    episode: str
    """`JOB/GROUP/MEMBER`."""
    step: int
    epoch: int
    in_job: str
    """Whose log holds it: the episode's job, or one that was forked from it and was brought this log."""


class InUseView(View):
    """An episode in the queue that could not be erased now."""

    episode: str
    why: str


class ErasedEpisodes(View):
    """What became of the text of episodes."""

    object: Literal["episodes.erased"] = "episodes.erased"
    queued: list[str]
    """Episodes that were played, or waited for their reward or to be trained. They have ended without an outcome and
    are gone from Redis; their groups go on without them."""
    in_use: list[InUseView]
    """Nothing of these is erased."""
    erased: list[EnteredView]
    """Their tokens, log-probs and names of users are gone from these logs; lengths, rewards and versions are not."""
    not_yet: list[EnteredView]
    """Nothing of these is erased: their job is not over and may have to train these steps again. Ask again once it has
    a later checkpoint."""
    unreadable: list[str]
    """Logs, and segments of the queue, that could not be looked into."""
    stays: list[str]
    """What erasing does not reach."""


@router.delete("/jobs/{id}/episodes")
async def erase_episodes(id: str, query: Annotated[EraseEpisodesQuery, Query()], context: ContextOf) -> ErasedEpisodes:
    """Erase what was read and said in all episodes of a user, and list the steps that they entered. Those that are not
    trained yet end, and are not trained.

    It reads every segment in the job's queue and every batch log of the job."""
    job = await context.store.jobs.get(id)
    found = _InQueue()
    await _erase_queued(context, await _of_user(context, job.id, query.user, found), found)
    return await asyncio.to_thread(_erase, context, job, query.user, found)


@router.delete("/episodes/{job}/{group}/{member}")
async def erase_episode(job: str, group: GroupNumber, member: MemberNumber, context: ContextOf) -> ErasedEpisodes:
    """Erase what was read and said in one episode, and list the steps that it entered. One that is not trained yet
    ends, and is not trained."""
    record = await context.store.jobs.get(job)
    in_queue = _InQueue()
    await _erase_queued(context, [EpisodeKey(record.id, group, member)], in_queue)
    if in_queue.in_use:
        raise _in_use(SEALED)
    found = await asyncio.to_thread(_erase, context, record, (group, member), in_queue)
    if found.not_yet:
        raise _in_use(f"step {found.not_yet[0].step} may have to be trained again; ask after the job's next checkpoint")
    if not found.erased and not found.queued:
        await _require_kept(context, record, group, member)
    return found


@dataclass
class _InQueue:
    """What was found in the queue."""

    erased: list[EpisodeKey] = field(default_factory=list)
    in_use: list[EpisodeKey] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)


async def _erase_queued(context: ApiContext, keys: Iterable[EpisodeKey], found: _InQueue) -> None:
    from services.state.queue_records import ErasedWord  # few requests need it

    into = {ErasedWord.ERASED: found.erased, ErasedWord.SEALED: found.in_use, ErasedWord.ABSENT: list[EpisodeKey]()}
    for key in keys:
        into[await context.bus.erase(key)].append(key)


async def _of_user(context: ApiContext, job: str, user: str, found: _InQueue) -> list[EpisodeKey]:
    """The episodes in the queue with a segment that was asked for in that name."""
    keys: set[EpisodeKey] = set()
    position, payloads = "0", [b""]
    while payloads:
        entries = await context.bus.read_segments(job, position, count=SEGMENTS_AT_ONCE, block_ms=0)
        position, payloads = entries[-1][0] if entries else position, [payload for _, payload in entries]
        keys.update(await asyncio.to_thread(_named, payloads, user, found))
    return sorted(keys)


def _named(payloads: Sequence[bytes], user: str, found: _InQueue) -> set[EpisodeKey]:
    from gspo_core.codec import SegmentRejected, decode  # few requests need it

    keys: set[EpisodeKey] = set()
    for payload in payloads:
        try:
            segment = decode(payload)
        except SegmentRejected as error:
            found.unreadable.append(f"a segment in the queue: {error}")
        else:
            if segment.user == user:
                keys.add(segment.key)
    return keys


def _erase(context: ApiContext, job: JobRecord, whose: str | tuple[int, int], in_queue: _InQueue) -> ErasedEpisodes:
    """In the files: of a user, or one member of a group."""
    from services.files.erasing import erase, of_member, of_user  # few requests need it

    history, wanted = context.history, of_user(whose) if isinstance(whose, str) else of_member(*whose)
    others = history.jobs_dir.accepted()
    found = erase(history.job_dir(job.id), job.id, wanted, others, safe_until=safe_until(history.job_dir(job.id), job))
    erased, not_yet = (
        [EnteredView(episode=str(one.episode), step=one.step, epoch=one.epoch, in_job=one.job) for one in entered]
        for entered in (found.erased, found.not_yet)
    )
    queued, in_use = [str(key) for key in in_queue.erased], [str(key) for key in in_queue.in_use]
    counts = {"erased": len(erased), "not_yet": len(not_yet), "queued": len(queued), "in_use": len(in_use)}
    audit.changed("episodes of job", job.id, new=counts)
    return ErasedEpisodes(
        queued=queued,
        in_use=[InUseView(episode=one, why=SEALED) for one in in_use],
        erased=erased,
        not_yet=not_yet,
        unreadable=[*in_queue.unreadable, *found.unreadable],
        stays=_stays(job, [one.step for one in (*erased, *not_yet)], is_queued=bool(queued)),
    )


def safe_until(place: JobDir, job: JobRecord) -> int | None:
    """Steps up to it are in a checkpoint; None: no step of the job will be trained again by itself."""
    from services.files.erasing import saved_step  # few requests need it

    return None if job.status.is_terminal else saved_step(place)


async def _require_kept(context: ApiContext, job: JobRecord, group: int, member: int) -> None:
    """It may have been erased before. Raises GroupNotKept, EpisodeNotKept."""
    _, found = await asyncio.to_thread(context.history.find, job, group)
    if all(one.key.member != member for one in found):
        raise EpisodeNotKept(EpisodeKey(job.id, group, member))


def _in_use(why: str) -> RequestRefused:
    return RequestRefused(409, "episode_in_use", why, headers=FINAL)


def _stays(job: JobRecord, steps: Sequence[int], *, is_queued: bool) -> list[str]:
    stays = [
        "backups, bundles, and whatever was downloaded or exported before",
        "rewards, metrics, lengths and versions of the episodes, so that steps can still be counted",
    ]
    if steps:
        stays.insert(0, f"the weights since step {min(steps)}, and all that was trained from them: they cannot forget")
    if is_queued:
        stays.append(
            "in Redis: short segments in its memory and its append-only file, until those beside them are trained, and "
            "longer ones in that file until its next rewrite"
        )
    if not job.status.is_terminal:
        stays.append("turns whose first tokens are not stored yet: they are nobody's until then; ask again")
    return stays
