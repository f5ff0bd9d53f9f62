"""Builds the production parts of an attempt from the process settings and the job specification."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import torch

from gspo_core.learner import Learner
from gspo_core.log.settings import learner_config
from gspo_core.spec import JobSpec
from services.engines.protocol import Connect
from services.files.batch_log import BatchLog
from services.files.checkpoints import CheckpointStore
from services.files.data_dir import DataDir
from services.files.job_dir import JobDir
from services.files.weight_deltas import write_delta
from services.files.weights import WeightStore
from services.process.settings import Settings
from services.state.engine_sightings import EngineSightings
from services.state.heard_engines import HeardEngines
from services.state.queue import Bus
from services.state.store import Claim, Store
from services.trainer.device import device_of
from services.trainer.fleet.engines import EnginePool
from services.trainer.fleet.weight_transport import AsAdapters, AsDeltas, FromDisk, ThroughGroup, WeightTransport
from services.trainer.groups.intake import Intake
from services.trainer.groups.run_context import Services
from services.trainer.ranks.followers import Followers
from services.trainer.ranks.learner import AnyLearner, RankedLearner
from services.trainer.ranks.lines import RankPlace
from services.trainer.run import JobRun
from services.trainer.telling.attempt_messages import Capabilities
from services.trainer.telling.status import JobStatusBoard
from services.trainer.telling.wandb_run import WandbRun

MakeLearner: TypeAlias = Callable[[JobSpec], AnyLearner]


def make_run(
    settings: Settings,
    bus: Bus,
    store: Store,
    engine_at: Connect,
    claim: Claim,
    spec: JobSpec,
    listeners: Sequence[WandbRun],
    make: Callable[[], AnyLearner],
) -> JobRun:
    """Build the step loop of a claimed job."""
    job_dir = DataDir(settings.data_dir).jobs.job(claim.job_id)
    job_dir.path.mkdir(parents=True, exist_ok=True)
    is_delta = spec.rollout.weight_transport == "delta"
    weights = WeightStore(job_dir, write_delta=write_delta if is_delta else None)
    engines = EnginePool(
        store,
        claim.job_id,
        claim.token,
        weights,
        settings.engine_urls,
        engine_at,
        num_wanted=spec.resources.num_engines,
        sync=spec.rollout.weight_sync,
        transport=make_transport(spec),
        lease_s=settings.lease_s,
        heard=HeardEngines(EngineSightings(store.functions, time.monotonic), time.monotonic),
    )
    services = Services(
        bus=bus,
        store=store,
        status=JobStatusBoard(store, claim),
        engines=engines,
        intake=Intake(bus, claim.job_id),
        weights=weights,
        batch_log=BatchLog(job_dir),
        checkpoints=CheckpointStore(job_dir),
        job_dir=job_dir,
        budget_bytes=settings.redis_bytes_per_job,
        listeners=listeners,
    )
    return JobRun(claim, spec, services, make)


def capabilities() -> Capabilities:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "num_gpus": torch.cuda.device_count(),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
    }


def listeners(settings: Settings, job: str, spec: JobSpec) -> list[WandbRun]:
    """Build the extra receivers of every metric, beside the store and the job's files."""
    if settings.wandb_project is None:
        return []
    job_dir = DataDir(settings.data_dir).jobs.job(job)
    return [WandbRun(settings.wandb_project, settings.wandb_mode, job_dir.path, job_dir.id, spec.name)]


def make_learner(spec: JobSpec) -> Learner:
    return Learner(
        Path(spec.model),
        learner_config(spec),
        spec.training_objective,
        seed=spec.seed,
        device=device_here(spec),
    )


def make_ranked_learner(spec: JobSpec, job: JobDir, place: RankPlace, followers: Followers) -> RankedLearner:
    return RankedLearner(
        followers,
        place,
        job,
        Path(spec.model),
        learner_config(spec),
        spec.training_objective,
        seed=spec.seed,
        device=device_here(spec),
    )


def make_transport(spec: JobSpec) -> WeightTransport:
    match spec.rollout.weight_transport:
        case "group":
            return ThroughGroup(device=device_here(spec))
        case "delta":
            return AsDeltas()
        case "adapter":
            return AsAdapters()
        case "disk":
            return FromDisk()


def device_here(spec: JobSpec) -> str:
    return device_of(spec, has_gpu=torch.cuda.is_available())
