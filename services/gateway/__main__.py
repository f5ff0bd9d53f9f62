"""``python -m services.gateway``: the one place that builds the real parts of a gateway."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import os
import random
import socket
import sys
import time
from functools import partial
from urllib.parse import urlsplit

from services.engines.kinds import open_engines
from services.files.data_dir import DataDir
from services.gateway.app import build_app
from services.gateway.attempt import AgentDriver
from services.gateway.door import Door
from services.gateway.keys import Keys
from services.hosts.registry import EnvironmentRegistry
from services.hosts.sites import Sites
from services.hosts.venv import Interpreters
from services.process.cancelling import cancel_all
from services.process.http_server import serve_http
from services.process.lifecycle import run_until_signalled
from services.process.settings import Settings, SettingsError, load_settings
from services.process.telemetry import configure_logging, get_logger
from services.state.client import connect
from services.state.drains import Drains
from services.state.queue import Bus
from services.state.shared_secrets import AGENT_KEYS, shared_secret
from services.state.store import Store
from services.workers.loading import load_job
from services.workers.starting import boot_for, functions_there, traces_to
from services.workers.worker import Worker, WorkerConfig

# After the drain: for closing sessions and handing back episodes.
LEAVING_S = 4.0
# Open requests are answered when their episodes have stopped.
REQUESTS_END_S = 2
# A gateway mostly waits: each of its episodes is a conversation, and an agent beside it.
MAX_EPISODES = 256


async def work(settings: Settings, config: WorkerConfig, stop: asyncio.Event) -> None:
    if settings.redis_url is None:
        raise SettingsError("GSPO_REDIS_URL is not set: a gateway needs the Redis of its installation")
    host, _, port = settings.gateway_bind.rpartition(":")
    url = settings.gateway_url or f"http://{settings.gateway_bind}"
    async with connect(settings.redis_url) as redis, open_engines(max_connections=config.max_connections) as engine_at:
        bus, store = Bus(redis, lease_s=settings.lease_s), Store(redis, lease_s=settings.lease_s)
        await functions_there(bus)
        door = Door(Keys(await shared_secret(redis, AGENT_KEYS)), now=time.time)
        data_dir = DataDir(settings.data_dir)
        boot = boot_for(settings.env_hosts, settings.env_token, Interpreters(data_dir.venvs, settings.env_install))
        sites = Sites(
            EnvironmentRegistry(data_dir.environments),
            settings.outbound_networks,
            elsewhere=bool(settings.env_hosts),
            for_agents=await asyncio.to_thread(networks_of, url),
        )
        traces = traces_to(settings.trace_endpoint, "gateway", config.name, share=settings.trace_share)
        worker = Worker(
            config,
            bus,
            store,
            engine_at,
            partial(load_job, boot=sites.booting(boot)),
            AgentDriver(door, f"{url}/v1", time.time),
            clock=time.monotonic,
            rng=random.Random(),
            spans=traces,
        )
        app = build_app(door, is_ready=lambda: not stop.is_set(), stopping=stop)
        has_ended = asyncio.Event()
        serving = serve_http(
            app, host, int(port), has_ended, grace_s=REQUESTS_END_S, settings="GSPO_GATEWAY_BIND", lifespan=False
        )
        get_logger().info("agents are sent here", url=url)
        async with asyncio.TaskGroup() as tasks:
            answering = tasks.create_task(serving, name="answering")
            draining = tasks.create_task(Drains(redis).wait(config.name, stop), name="drain")
            try:
                await worker.run(stop)
                # Until now: episodes that end meanwhile need their agents' last requests.
                has_ended.set()
                await answering
            finally:
                await cancel_all([answering, draining], again_after_s=0.1)
                if traces is not None:
                    await asyncio.to_thread(traces.close)


def networks_of(url: str) -> tuple[str, ...]:
    """The addresses of the gateway itself, which agents behind a wall may connect to. It asks a resolver."""
    parts = urlsplit(url)
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port or 443, type=socket.SOCK_STREAM)
    except OSError as error:
        get_logger().warning(
            "agents that may reach few networks will not reach this gateway", url=url, error=str(error)
        )
        return ()
    return tuple(sorted({str(ipaddress.ip_network(str(address[0]).partition("%")[0])) for *_, address in found}))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m services.gateway", description="Answer agents that play episodes.")
    parser.add_argument(
        "--max-episodes", type=int, default=MAX_EPISODES, help="episodes held at once (default: %(default)s)"
    )
    parser.add_argument("--drain-s", type=float, default=8.0, help="seconds to reach a turn boundary after SIGTERM")
    arguments = parser.parse_args()
    try:
        settings = load_settings()
        name = f"gateway-{socket.gethostname()}-{os.getpid()}"
        configure_logging("gateway", level=settings.log_level, log_format=settings.log_format, worker=name)
        config = WorkerConfig(
            name=name,
            max_episodes=arguments.max_episodes,
            lease_s=settings.lease_s,
            drain_s=arguments.drain_s,
            engine_urls=settings.engine_urls,
            kind="gateway",
        )
        return run_until_signalled(lambda stop: work(settings, config, stop), grace_s=arguments.drain_s + LEAVING_S)
    except SettingsError as error:
        print(f"services.gateway: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
