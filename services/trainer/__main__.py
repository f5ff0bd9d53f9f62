"""``python -m services.trainer``: the one place that builds the real parts of a trainer."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch

from gspo_core.learner import Learner
from gspo_core.spec import JobSpec
from services.batch_log import BatchLog
from services.bus import Bus
from services.engine_beats import EngineBeats
from services.engine_client import EngineClient, open_http
from services.health import Health
from services.process import run_until_signalled
from services.redis_server import connect, warn_if_weaker
from services.settings import Settings, load_settings
from services.store import Claim, Store
from services.telemetry import configure_logging
from services.trainer.checkpoints import CheckpointStore
from services.trainer.engines import Engines
from services.trainer.intake import Intake
from services.trainer.run import JobRun, Services
from services.trainer.status import JobStatusBoard
from services.trainer.tuning import learner_config
from services.trainer.wandb_run import WandbRun, require_wandb
from services.trainer.weight_transport import FromDisk, ThroughGroup, WeightTransport
from services.trainer.worker import TrainerWorker
from services.weights import WeightStore


async def main(stop: asyncio.Event) -> None:
    settings = load_settings()
    configure_logging("trainer", level=settings.log_level, log_format=settings.log_format)
    if settings.redis_url is None:
        raise SystemExit("GSPO_REDIS_URL is not set: a trainer needs the Redis of its installation")
    if settings.wandb_project is not None:
        require_wandb()
    # The intra-op threads follow OMP_NUM_THREADS; a second pool would fight it.
    torch.set_num_interop_threads(1)
    async with connect(settings.redis_url) as redis, open_http() as http:
        bus = Bus(redis, lease_s=settings.lease_s)
        store = Store(
            redis,
            lease_s=settings.lease_s,
            max_attempts=settings.max_attempts,
            jobs_dir=settings.data_dir / "jobs",
            waits_for_room=True,
        )
        await bus.load_functions()
        await warn_if_weaker(redis)
        await store.rebuild()

        def make_run(claim: Claim, spec: JobSpec) -> JobRun:
            job_dir = settings.data_dir / "jobs" / claim.job_id
            job_dir.mkdir(parents=True, exist_ok=True)
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
                metrics_path=job_dir / "metrics.jsonl",
                budget_bytes=settings.redis_bytes_per_job,
                listeners=listeners(settings, job_dir, spec),
            )
            return JobRun(claim, spec, services, lambda: make_learner(spec))

        name = f"trainer-{socket.gethostname()}-{os.getpid()}"
        beats = EngineBeats(store, [EngineClient(url, http) for url in settings.engine_urls], lease_s=settings.lease_s)
        beating = asyncio.create_task(beats.run(), name="engine beats")
        try:
            worker = TrainerWorker(store, name, make_run, lease_s=settings.lease_s, capabilities=capabilities())
            async with Health(settings.health_file, stop) as health:
                health.is_ready = True
                await worker.run(stop)
        finally:
            beating.cancel()


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


def listeners(settings: Settings, job_dir: Path, spec: JobSpec) -> list[WandbRun]:
    """Who is told every number, besides the store and the files of the job."""
    if settings.wandb_project is None:
        return []
    return [WandbRun(settings.wandb_project, settings.wandb_mode, job_dir, job_dir.name, spec.name)]


def make_learner(spec: JobSpec) -> Learner:
    return Learner(
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
        raise RuntimeError("resources.device is cuda, but the trainer that took the job has no GPU")
    return "cuda" if has_gpu and wanted != "cpu" else "cpu"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m services.trainer", description="Trains jobs, one at a time.")
    parser.add_argument("--grace-s", type=float, default=30.0, help="time to end a step when asked to leave")
    sys.exit(run_until_signalled(main, grace_s=parser.parse_args().grace_s))
