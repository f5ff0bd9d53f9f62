"""The main loop of a trainer process, wherever its attempts run: claims jobs, watches engines, reports health.

Rule: it does not import torch, so the process stays small when attempts run in their own processes.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Mapping
from functools import partial

from services.engines.keys import EngineKeys
from services.engines.kinds import open_engines
from services.engines.protocol import info_calls
from services.files.data_dir import DataDir
from services.process.cancelling import cancel_all, first_to_end
from services.process.health import Health
from services.process.lifecycle import tell_of_root
from services.process.settings import Settings
from services.state.client import connect
from services.state.engine_beats import ANSWER_S, EngineBeats
from services.state.engine_sightings import EngineSightings
from services.state.heard_engines import HeardEngines, seldom_asked
from services.state.installation import InstallationGuard
from services.state.process_requests import Drains
from services.state.queue import Bus
from services.state.retry import first_contact
from services.state.server_promises import warn_if_weaker
from services.state.store import Store
from services.trainer.device import unfit
from services.trainer.telling.wandb_run import require_wandb
from services.trainer.worker import Attempts, TrainerWorker


def check_settings(settings: Settings) -> None:
    """Raise if a trainer cannot work with these settings."""
    if settings.redis_url is None:
        raise SystemExit("GSPO_REDIS_URL is not set: a trainer needs the Redis of its installation")
    if settings.wandb_project is not None:
        require_wandb()


async def serve(
    settings: Settings, stop: asyncio.Event, attempts: Attempts, capabilities: Mapping[str, str | int]
) -> None:
    assert settings.redis_url is not None
    async with connect(settings.redis_url) as redis, open_engines(EngineKeys.read(settings.engine_keys)) as engine_at:
        bus = Bus(redis, lease_s=settings.lease_s)
        store = Store(
            redis,
            lease_s=settings.lease_s,
            max_attempts=settings.max_attempts,
            jobs_dir=DataDir(settings.data_dir).jobs,
            waits_for_room=True,
        )
        installation = InstallationGuard(redis, DataDir(settings.data_dir))

        async def meet() -> bool:
            await bus.load_functions()
            await installation.check()
            await warn_if_weaker(redis)
            await store.rebuild()
            return True

        if not await first_contact(stop, meet):
            return
        tell_of_root()
        name = f"trainer-{socket.gethostname()}-{os.getpid()}"
        heard = HeardEngines(EngineSightings(store.functions, time.monotonic), time.monotonic)
        engines = seldom_asked(info_calls(map(engine_at, settings.engine_urls), ANSWER_S), heard)
        beats = EngineBeats(store.fleet, engines, lease_s=settings.lease_s)
        beating = asyncio.create_task(beats.run(), name="engine beats")
        from services.trainer.exporting import ExportErrands  # late: nothing waits for it at the start

        exporting = asyncio.create_task(ExportErrands(DataDir(settings.data_dir).jobs).run(), name="exports")
        leaving = asyncio.Event()
        asking = asyncio.create_task(Drains(redis).wait(name, leaving), name="drain")
        worker = TrainerWorker(
            store,
            bus,
            name,
            attempts,
            lease_s=settings.lease_s,
            capabilities=capabilities,
            unfit=partial(unfit, has_gpu=capabilities["device"] == "cuda", num_ranks=int(capabilities["num_ranks"])),
            yield_after_s=settings.yield_after_s,
        )
        try:
            async with Health(settings.health_file, stop) as health:
                health.is_ready = True
                await first_to_end(worker.run(stop, leaving), installation.run())
        finally:
            await cancel_all([beating, asking, exporting], again_after_s=0.1)
