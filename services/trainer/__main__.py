"""``python -m services.trainer``: the one place that builds the real parts of a trainer.

Under torchrun the first rank is the trainer; the others hold their parts of the learner and follow it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import httpx
import torch
from pydantic import ValidationError

from gspo_core.learner import Learner
from gspo_core.spec import JobSpec
from services.batch_log import BatchLog
from services.bus import Bus
from services.cancelling import cancel_all
from services.checkpoints import CheckpointStore
from services.data_dir import DataDir
from services.drains import Drains
from services.engine_beats import EngineBeats
from services.engine_client import EngineClient, open_http
from services.health import Health
from services.job_dir import JobDir
from services.process import run_until_signalled
from services.process_group import in_own_thread
from services.redis_server import connect, warn_if_weaker
from services.settings import Settings, load_settings
from services.store import Claim, Store
from services.telemetry import configure_logging, get_logger
from services.trainer.engines import Engines
from services.trainer.follower import FirstRankLost, Follower
from services.trainer.followers import Followers, RanksLost
from services.trainer.intake import Intake
from services.trainer.rank_calls import LINES
from services.trainer.rank_lines import Place, meet
from services.trainer.ranked_learner import RankedLearner
from services.trainer.run import JobRun, Services
from services.trainer.status import JobStatusBoard
from services.trainer.tuning import learner_config
from services.trainer.wandb_run import WandbRun, require_wandb
from services.trainer.weight_transport import FromDisk, ThroughGroup, WeightTransport
from services.trainer.worker import TrainerWorker
from services.weights import WeightStore


class NoSuchDevice(RuntimeError):
    """A job wants another kind of device than this trainer has."""


async def lead(place: Place, stop: asyncio.Event) -> None:
    """The first rank, or the only one."""
    settings = _prepared()
    if place.num_ranks == 1:
        await train(settings, stop, place, None)
        return
    meeting = asyncio.ensure_future(in_own_thread(lambda: meet(place, LINES)))
    leaving = asyncio.ensure_future(stop.wait())
    await asyncio.wait({meeting, leaving}, return_when=asyncio.FIRST_COMPLETED)
    leaving.cancel()
    if not meeting.done():
        meeting.cancel()
        return
    followers = Followers(meeting.result())
    await in_own_thread(lambda: followers.look(DataDir(settings.data_dir)))
    get_logger().info("all ranks are here", num_ranks=place.num_ranks)
    await train(settings, stop, place, followers)
    await in_own_thread(followers.end)


async def follow(place: Place) -> None:
    """Another rank. Once they have met it leaves with the first one, which alone knows when nothing is lost by it:
    signals are not for it."""
    settings = _prepared()
    lines = await in_own_thread(lambda: meet(place, LINES))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, get_logger().info, "left to the first rank")
    # One probe looks at one file on each machine.
    async with Health(settings.health_file if place.local_rank == 0 else None, asyncio.Event()) as health:
        health.is_ready = True
        await in_own_thread(Follower(lines, place).follow)


def _prepared() -> Settings:
    settings = load_settings()
    configure_logging("trainer", level=settings.log_level, log_format=settings.log_format)
    # The intra-op threads follow OMP_NUM_THREADS; a second pool would fight it.
    torch.set_num_interop_threads(1)
    return settings


async def train(settings: Settings, stop: asyncio.Event, place: Place, followers: Followers | None) -> None:
    if settings.redis_url is None:
        raise SystemExit("GSPO_REDIS_URL is not set: a trainer needs the Redis of its installation")
    if settings.wandb_project is not None:
        require_wandb()
    async with connect(settings.redis_url) as redis, open_http() as http:
        bus = Bus(redis, lease_s=settings.lease_s)
        store = Store(
            redis,
            lease_s=settings.lease_s,
            max_attempts=settings.max_attempts,
            jobs_dir=DataDir(settings.data_dir).jobs,
            waits_for_room=True,
        )
        await bus.load_functions()
        await warn_if_weaker(redis)
        await store.rebuild()

        begin = partial(make_run, settings, bus, store, http, place, followers)
        name = f"trainer-{socket.gethostname()}-{os.getpid()}"
        beats = EngineBeats(store, [EngineClient(url, http) for url in settings.engine_urls], lease_s=settings.lease_s)
        beating = asyncio.create_task(beats.run(), name="engine beats")
        leaving = asyncio.Event()
        asking = asyncio.create_task(Drains(redis).wait(name, leaving), name="drain")
        try:
            worker = TrainerWorker(
                store,
                name,
                begin,
                lease_s=settings.lease_s,
                capabilities=capabilities() | {"num_ranks": place.num_ranks},
                check=followers.check if followers is not None else lambda: None,
                unfit=unfit,
            )
            async with Health(settings.health_file, stop) as health:
                health.is_ready = True
                await worker.run(stop, leaving)
        finally:
            await cancel_all([beating, asking], again_after_s=0.1)


def make_run(
    settings: Settings,
    bus: Bus,
    store: Store,
    http: httpx.AsyncClient,
    place: Place,
    followers: Followers | None,
    claim: Claim,
    spec: JobSpec,
) -> JobRun:
    """An attempt at a claimed job, with what it needs of this process."""
    job_dir = DataDir(settings.data_dir).jobs.job(claim.job_id)
    job_dir.path.mkdir(parents=True, exist_ok=True)
    weights = WeightStore(job_dir)
    engines = Engines(
        store,
        claim.job_id,
        claim.token,
        weights,
        settings.engine_urls,
        lambda url: EngineClient(url, http),
        num_wanted=spec.resources.num_engines,
        sync=spec.rollout.weight_sync,
        transport=make_transport(spec),
        lease_s=settings.lease_s,
    )
    intake = Intake(bus, claim.job_id)
    services = Services(
        bus=bus,
        store=store,
        status=JobStatusBoard(store, claim),
        engines=engines,
        intake=intake,
        weights=weights,
        batch_log=BatchLog(job_dir),
        checkpoints=CheckpointStore(job_dir),
        job_dir=job_dir,
        budget_bytes=settings.redis_bytes_per_job,
        listeners=listeners(settings, job_dir, spec),
    )
    if followers is None:
        return JobRun(claim, spec, services, lambda: make_learner(spec))
    return JobRun(claim, spec, services, lambda: make_ranked_learner(spec, place, followers))


def capabilities() -> dict[str, Any]:
    """What a person wants to know of a trainer before giving it a job."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "num_gpus": torch.cuda.device_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


@lru_cache(maxsize=1000)
def unfit(spec: str) -> str | None:
    """Why this trainer cannot train a job of this specification."""
    try:
        device_for(JobSpec.model_validate_json(spec))
    except NoSuchDevice as error:
        return str(error)
    except ValidationError:
        return None  # whoever claims it says what is wrong
    return None


def listeners(settings: Settings, job_dir: JobDir, spec: JobSpec) -> list[WandbRun]:
    """Who is told every number, besides the store and the files of the job."""
    if settings.wandb_project is None:
        return []
    return [WandbRun(settings.wandb_project, settings.wandb_mode, job_dir.path, job_dir.id, spec.name)]


def make_learner(spec: JobSpec) -> Learner:
    return Learner(
        Path(spec.model),
        learner_config(spec),
        spec.training_objective,
        seed=spec.seed,
        device=device_for(spec),
    )


def make_ranked_learner(spec: JobSpec, place: Place, followers: Followers) -> RankedLearner:
    return RankedLearner(
        followers,
        place,
        Path(spec.model),
        learner_config(spec),
        spec.training_objective,
        seed=spec.seed,
        device=device_for(spec),
    )


def make_transport(spec: JobSpec) -> WeightTransport:
    return ThroughGroup(device=device_for(spec)) if spec.rollout.weight_transport == "group" else FromDisk()


def device_for(spec: JobSpec) -> str:
    wanted, has_gpu = spec.resources.device, torch.cuda.is_available()
    if wanted == "cuda" and not has_gpu:
        raise NoSuchDevice("resources.device is cuda: it waits for a trainer that has a GPU")
    return "cuda" if has_gpu and wanted != "cpu" else "cpu"


def run() -> int:
    parser = argparse.ArgumentParser(prog="python -m services.trainer", description="Trains jobs, one at a time.")
    parser.add_argument("--grace-s", type=float, default=30.0, help="time to end a step when asked to leave")
    grace_s, place = parser.parse_args().grace_s, Place.of_this_process()
    try:
        if place.is_first:
            return run_until_signalled(partial(lead, place), grace_s=grace_s)
        asyncio.run(follow(place))
        return 0
    except (RanksLost, FirstRankLost) as error:
        get_logger().error("this process ends, for all to be started again", rank=place.rank, message=str(error))
        return 1


if __name__ == "__main__":
    sys.exit(run())
