"""Runs a trainer as several processes under torchrun: the first rank leads, the others follow.

The ranks connect before there is a job, so all attempts share the same processes. Rule: an attempt leaves no work
running when the next one begins. The trainer waits for its threads; if that takes too long, all processes exit and
torchrun restarts them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from gspo_core.spec import JobSpec
from services.engines.process_group import in_own_thread
from services.files.data_dir import DataDir
from services.process.health import Health
from services.process.lifecycle import run_until_signalled
from services.process.settings import Settings, load_settings
from services.process.telemetry import configure_logging, get_logger
from services.state.store import Claim
from services.trainer.attempt import run_attempt
from services.trainer.building import capabilities, make_ranked_learner
from services.trainer.ranks.calls import LINES
from services.trainer.ranks.follower import FirstRankLost, Follower
from services.trainer.ranks.followers import Followers
from services.trainer.ranks.learner import RankedLearner
from services.trainer.ranks.lines import RankPlace, meet
from services.trainer.serving import check_settings, serve
from services.trainer.telling.attempt_messages import AttemptEnd
from services.trainer.telling.failure import RanksLost

# Time for leftover work of an ended attempt to finish: a few micro-batches, a file.
LEFT_BEHIND_S = 60.0


class RankedAttempts:
    """Runs attempts in this process and those of the other ranks."""

    def __init__(self, settings: Settings, place: RankPlace, followers: Followers) -> None:
        self._settings, self._place, self._followers = settings, place, followers

    def is_ready(self) -> bool:
        """Return True. Raises RanksLost."""
        self._followers.check()
        return True

    async def run(self, claim: Claim, _spec: JobSpec, stop: asyncio.Event, leaving: asyncio.Event) -> AttemptEnd:
        loop = asyncio.get_running_loop()
        threads = ThreadPoolExecutor(thread_name_prefix="attempt")
        loop.set_default_executor(threads)
        try:
            return await run_attempt(
                self._settings,
                claim,
                stop,
                leaving,
                make=partial(self._make, claim),
                check=self._followers.check,
            )
        finally:
            loop.set_default_executor(ThreadPoolExecutor())
            await self._wait_for(threads)

    def _make(self, claim: Claim, spec: JobSpec) -> RankedLearner:
        job = DataDir(self._settings.data_dir).jobs.job(claim.job_id)
        return make_ranked_learner(spec, job, self._place, self._followers)

    async def _wait_for(self, threads: ThreadPoolExecutor) -> None:
        """Wait for leftover threads, even if cancelled."""
        waiting = asyncio.ensure_future(in_own_thread(lambda: threads.shutdown(cancel_futures=True)))
        deadline, was_cancelled = asyncio.get_running_loop().time() + LEFT_BEHIND_S, False
        while not waiting.done() and (left_s := deadline - asyncio.get_running_loop().time()) > 0:
            try:
                await asyncio.wait({waiting}, timeout=left_s)
            except asyncio.CancelledError:
                was_cancelled = True
        if not waiting.done():
            waiting.cancel()
            self._followers.give_up(f"work of an attempt was still running {LEFT_BEHIND_S:.0f} s after its end")
        if was_cancelled:
            raise asyncio.CancelledError


async def lead(place: RankPlace, stop: asyncio.Event) -> None:
    settings = _prepared()
    check_settings(settings)
    meeting = asyncio.ensure_future(in_own_thread(lambda: meet(place, LINES)))
    leaving = asyncio.ensure_future(stop.wait())
    await asyncio.wait({meeting, leaving}, return_when=asyncio.FIRST_COMPLETED)
    leaving.cancel()
    if not meeting.done():
        meeting.cancel()
        return
    followers = Followers(meeting.result())
    await in_own_thread(lambda: followers.look(DataDir(settings.data_dir)))
    get_logger().info("all ranks have joined", num_ranks=place.num_ranks)
    attempts = RankedAttempts(settings, place, followers)
    await serve(settings, stop, attempts, capabilities() | {"num_ranks": place.num_ranks})
    await in_own_thread(followers.end)


async def follow(place: RankPlace) -> None:
    """Follow the first rank. It alone handles signals, because only it knows when ending loses nothing."""
    settings = _prepared()
    lines = await in_own_thread(lambda: meet(place, LINES))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, get_logger().info, "left to the first rank")
    # Each machine has one probe, which reads one file.
    async with Health(settings.health_file if place.local_rank == 0 else None, asyncio.Event()) as health:
        health.is_ready = True
        await in_own_thread(Follower(lines, place).follow)


def _prepared() -> Settings:
    settings = load_settings()
    configure_logging("trainer", level=settings.log_level, log_format=settings.log_format)
    # OMP_NUM_THREADS sizes the intra-op pool; a second pool would compete with it.
    torch.set_num_interop_threads(1)
    return settings


def run(grace_s: float) -> int:
    place = RankPlace.of_this_process()
    try:
        if place.is_first:
            return run_until_signalled(partial(lead, place), grace_s=grace_s, computes=True)
        asyncio.run(follow(place))
        return 0
    except (RanksLost, FirstRankLost) as error:
        get_logger().error("exiting so that all ranks are restarted", rank=place.rank, message=str(error))
        sys.stderr.flush()
        # A clean exit would wait for the attempt's threads, which may never end.
        os._exit(1)
