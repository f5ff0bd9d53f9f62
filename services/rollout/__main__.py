"""``python -m services.rollout``: the one place that builds the real parts of a rollout worker, or starts several.

Rule: an event loop fills one core, and a worker may have more of them. Each process is a worker with its own lease, so
that its death costs only what it held; another is started in its place. A process that was asked to leave is not
replaced. They leave together. No episode passes through the watching process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial

from services.engines.keys import EngineKeys
from services.engines.kinds import open_engines
from services.files.data_dir import DataDir
from services.files.environments.registry import EnvironmentRegistry
from services.hosts.local import LocalHosts, WallPolicy
from services.hosts.sites import Sites
from services.hosts.venv import Interpreters
from services.process.cancelling import cancel_all
from services.process.children import die_with_parent
from services.process.health import Health
from services.process.lifecycle import run_until_signalled
from services.process.settings import Settings, SettingsError, load_settings
from services.process.telemetry import configure_logging, get_logger, tell_unread_settings
from services.rollout.attempt import EnvironmentDriver
from services.rollout.request_runner import RequestRunner
from services.state.client import connect
from services.state.functions import functions_there
from services.state.process_requests import Drains, WorkerRequests
from services.state.queue import Bus
from services.state.retry import first_contact
from services.state.store import Store
from services.workers.loading import boot_for, load_job, traces_to
from services.workers.worker import EpisodeWorker, WorkerConfig, with_name_of_its_own

# After the drain: for closing sessions and handing back episodes, with a Redis that restarts meanwhile.
LEAVING_S = 12.0
# A worker that cannot start must not be restarted a hundred times a second.
RESTART_S = 1.0


class NotDrained(RuntimeError):
    """A process did not leave in an orderly way."""


async def work(settings: Settings, config: WorkerConfig, stop: asyncio.Event) -> None:
    if settings.redis_url is None:
        raise SystemExit("GSPO_REDIS_URL is not set: a rollout worker needs the Redis of its installation")
    keys = EngineKeys.read(settings.engine_keys)
    async with (
        connect(settings.redis_url) as redis,
        open_engines(keys, max_connections=config.max_connections) as engine_at,
    ):
        bus, store = Bus(redis, lease_s=settings.lease_s), Store(redis, lease_s=settings.lease_s)
        if await first_contact(stop, lambda: functions_there(bus)) is None:
            return
        interpreters = Interpreters(DataDir(settings.data_dir).venvs, settings.env_install)
        registry = EnvironmentRegistry(DataDir(settings.data_dir).environments)
        sites = Sites(registry, settings.outbound_networks, elsewhere=bool(settings.env_hosts))
        policy = WallPolicy.of(settings)
        here = None if settings.env_hosts else LocalHosts(interpreters, policy)
        runner = RequestRunner(WorkerRequests(redis), sites, here, config.name)
        traces = traces_to(settings.trace_endpoint, "rollout", config.name, share=settings.trace_share)
        boot = boot_for(settings.env_hosts, settings.env_token, interpreters, policy)
        worker = EpisodeWorker(
            config,
            bus,
            store,
            engine_at,
            partial(load_job, boot=sites.booting(boot)),
            EnvironmentDriver(),
            clock=time.monotonic,
            rng=random.Random(),
            spans=traces,
        )
        async with Health(settings.health_file, stop) as health:
            health.is_ready = True
            async with asyncio.TaskGroup() as tasks:
                beside = [
                    tasks.create_task(runner.run(), name="errands"),
                    tasks.create_task(Drains(redis).wait(config.name, stop), name="drain"),
                ]
                try:
                    await worker.run(stop)
                finally:
                    await cancel_all(beside, again_after_s=0.1)
                    if traces is not None:
                        await asyncio.to_thread(traces.close)


async def work_in_processes(settings: Settings, arguments: argparse.Namespace, stop: asyncio.Event) -> None:
    command = [sys.executable, "-m", "services.rollout", "--max-episodes", str(arguments.max_episodes)]
    command += ["--drain-s", str(arguments.drain_s)]
    environment = {name: value for name, value in os.environ.items() if name != "GSPO_HEALTH_FILE"}
    async with Health(settings.health_file, stop) as health:
        health.is_ready = True
        await watch(command, arguments.processes, environment, stop)


async def watch(
    command: Sequence[str], num_processes: int, environment: Mapping[str, str], stop: asyncio.Event
) -> None:
    """Keeps them running until ``stop`` is set, then has them leave; raises ``NotDrained`` if one did not.

    Returns as well when all of them have left.
    """
    statuses = await asyncio.gather(*(_keep_running(command, environment, stop) for _ in range(num_processes)))
    if any(statuses):
        raise NotDrained(f"not all worker processes drained; exit statuses: {statuses}")


async def _keep_running(command: Sequence[str], environment: Mapping[str, str], stop: asyncio.Event) -> int:
    stopping = asyncio.create_task(stop.wait())
    try:
        while True:
            # A session of its own: an interrupt from the terminal comes through us, once.
            child = await asyncio.create_subprocess_exec(
                *command, env=dict(environment), preexec_fn=die_with_parent(), start_new_session=True
            )
            ended = asyncio.create_task(child.wait())
            try:
                await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if stop.is_set():
                    _ask_to_leave(child)
                    return await ended
            finally:
                if child.returncode is None:
                    child.kill()
                await ended
            if not child.returncode:
                get_logger().info("worker process has left", pid=child.pid)
                return 0
            get_logger().error("worker process died: starting another", pid=child.pid, status=child.returncode)
            await asyncio.wait({stopping}, timeout=RESTART_S)
            if stop.is_set():
                return 0
    finally:
        stopping.cancel()


def _ask_to_leave(child: asyncio.subprocess.Process) -> None:
    if child.returncode is None:
        child.send_signal(signal.SIGTERM)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m services.rollout", description="Play episodes of running jobs.")
    parser.add_argument("--max-episodes", type=int, default=64, help="episodes held at once (default: %(default)s)")
    parser.add_argument(
        "--processes", type=int, default=1, help="worker processes, each holding that many episodes (default: 1)"
    )
    parser.add_argument("--drain-s", type=float, default=8.0, help="seconds to reach a turn boundary after SIGTERM")
    arguments = parser.parse_args()
    try:
        settings = load_settings()
    except SettingsError as error:
        print(f"services.rollout: {error}", file=sys.stderr)
        return 2
    grace_s = arguments.drain_s + LEAVING_S
    if arguments.processes > 1:
        configure_logging(
            "rollout", level=settings.log_level, log_format=settings.log_format, num_processes=arguments.processes
        )
        return run_until_signalled(partial(work_in_processes, settings, arguments), grace_s=grace_s + LEAVING_S)
    name = f"rollout-{socket.gethostname()}-{os.getpid()}"
    configure_logging("rollout", level=settings.log_level, log_format=settings.log_format, worker=name)
    tell_unread_settings()
    config = WorkerConfig(
        name=name,
        max_episodes=arguments.max_episodes,
        lease_s=settings.lease_s,
        drain_s=arguments.drain_s,
        engine_urls=settings.engine_urls,
    )
    return run_until_signalled(partial(with_name_of_its_own, partial(work, settings), config), grace_s=grace_s)


if __name__ == "__main__":
    sys.exit(main())
