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
from collections.abc import Coroutine, Sequence
from functools import partial
from urllib.parse import urlsplit

import httpx
from starlette.middleware import Middleware
from starlette.types import ASGIApp

from gspo_core.outbound import parse_networks
from services.engines.keys import EngineKeys
from services.engines.kinds import open_engines
from services.episodes.keys import Keys
from services.files.data_dir import DataDir
from services.files.environments.registry import EnvironmentRegistry
from services.gateway.agent.attempt import AgentDriver
from services.gateway.agent.door import Entrances, EpisodeRouter
from services.gateway.agent.judging import JudgeKeys, Judges
from services.gateway.agent.outbound_http import outbound_http
from services.gateway.agent.pulled import LoanBoard
from services.gateway.agent.rewards import LateRewards
from services.gateway.agent.talk_jobs import TalkJobs
from services.gateway.agent.talking import Talking
from services.gateway.agent.traffic import NoRedactor, Redactor, forget_for_ever, load_redactor
from services.gateway.http.app import build_app
from services.gateway.http.forwarding import ForwardingMiddleware, Neighbours, between_gateways
from services.hosts.local import WallPolicy
from services.hosts.pool import Boot
from services.hosts.sites import Sites
from services.hosts.venv import Interpreters
from services.process.cancelling import cancel_all
from services.process.http_server import serve_http
from services.process.lifecycle import run_until_signalled
from services.process.place import hold_place
from services.process.settings import Settings, SettingsError, load_settings
from services.process.telemetry import configure_logging, get_logger, tell_unread_settings
from services.state.client import RedisClient, connect
from services.state.functions import Functions, functions_there
from services.state.loans import Loans
from services.state.process_requests import Drains
from services.state.queue import Bus
from services.state.retry import Retrier, first_contact
from services.state.shared_secrets import AGENT_KEYS, shared_secret
from services.state.store import Store
from services.state.talks import Talks, TrafficRetention
from services.workers.loading import boot_for, load_job, traces_to
from services.workers.worker import EpisodeWorker, WorkerConfig, with_name_of_its_own

# Open requests are answered when their episodes have stopped.
REQUESTS_END_S = 2
# After the drain: for closing sessions and handing back episodes, with a Redis that restarts meanwhile, and for these.
LEAVING_S = 12.0 + REQUESTS_END_S
ALL_ADDRESSES = ("0.0.0.0", "[::]", "::")  # noqa: S104 - what is bound elsewhere is named here
# A gateway mostly waits: each of its episodes is a conversation, and an agent beside it.
MAX_EPISODES = 256
# A large body is read in a thread, and the event loop waits for that so long each time it has waited for anything else:
# several times in one small request. The interpreter's own 5 ms are for threads that all have much to do.
TURN_OF_A_THREAD_S = 0.0005


async def work(settings: Settings, fd: int | None, config: WorkerConfig, stop: asyncio.Event) -> None:
    if settings.redis_url is None:
        raise SettingsError("GSPO_REDIS_URL is not set: a gateway needs the Redis of its installation")
    url = settings.gateway_url or f"http://{settings.gateway_bind}"
    own_url = settings.gateway_own_url or url
    keys_of_engines = EngineKeys.read(settings.engine_keys)
    async with (
        connect(settings.redis_url) as redis,
        open_engines(keys_of_engines, max_connections=config.max_connections) as engine_at,
        between_gateways() as http,
        outbound_http(parse_networks(settings.outbound_networks)) as outbound,
    ):
        bus, store = Bus(redis, lease_s=settings.lease_s), Store(redis, lease_s=settings.lease_s)
        secret = await first_contact(stop, partial(_meet, bus, redis))
        if secret is None:
            return
        keys = Keys(secret)
        door = EpisodeRouter(keys, now=time.time, leaving=stop)
        traces = traces_to(settings.trace_endpoint, "gateway", config.name, share=settings.trace_share)
        judges = Judges(outbound, JudgeKeys(settings.judge_keys), random.Random())
        worker = EpisodeWorker(
            config,
            bus,
            store,
            engine_at,
            partial(load_job, boot=await boot_here(settings, own_url)),
            AgentDriver(door, f"{url}/v1", time.time, LoanBoard(Loans(Functions(redis))), judges, f"{own_url}/v1"),
            clock=time.monotonic,
            rng=random.Random(),
            spans=traces,
            joined=partial(renew, keys, redis),
        )
        door.late = LateRewards(bus, Retrier(worker.counters, random.Random()), worker.counters, time.time)
        neighbours = Neighbours(config.name, bus, store.fleet, time.monotonic)
        forwarding = _forwarding(config.name, keys, door, neighbours, http, stop)
        talk_jobs = TalkJobs(store, config.engine_urls, engine_at, time.monotonic, random.Random())
        talks, keep = Talks(Functions(redis)), TrafficRetention(settings.traffic_keep_bytes, settings.traffic_keep_days)
        talking = Talking(talks, talk_jobs, keep, time.time, redact=redactor_of(settings))
        app = build_app(
            Entrances(door, talking), is_ready=lambda: not stop.is_set(), stopping=stop, forwarding=forwarding
        )
        has_ended = asyncio.Event()
        serving = answer(app, settings.gateway_bind, fd, has_ended)
        get_logger().info("agents are sent here", url=url)
        try:
            forgetting = [forget_for_ever(talks, keep), talking.leave_ended_for_ever()]
            beside = [Drains(redis).wait(config.name, stop), *forgetting]
            await work_and_answer(worker, serving, has_ended, beside, stop)
        finally:
            await talking.close()
            if traces is not None:
                await asyncio.to_thread(traces.close)


def _forwarding(
    name: str, keys: Keys, door: EpisodeRouter, neighbours: Neighbours, http: httpx.AsyncClient, leaving: asyncio.Event
) -> Middleware:
    return Middleware(
        ForwardingMiddleware,
        name=name,
        keys=keys,
        absent=door.absent,
        neighbours=neighbours,
        http=http,
        leaving=leaving,
    )


async def answer(app: ASGIApp, bind: str, fd: int | None, has_ended: asyncio.Event) -> None:
    host, _, port = bind.rpartition(":")
    named, grace_s = "GSPO_GATEWAY_BIND", REQUESTS_END_S
    fd = None if fd is None else os.dup(fd)  # what is served is closed; under another name it is served again
    await serve_http(app, host, int(port), has_ended, grace_s=grace_s, settings=named, lifespan=False, fd=fd)


async def _meet(bus: Bus, redis: RedisClient) -> bytes:
    await functions_there(bus)
    return await shared_secret(redis, AGENT_KEYS)


async def work_and_answer(
    worker: EpisodeWorker,
    serving: Coroutine[None, None, None],
    has_ended: asyncio.Event,
    beside: Sequence[Coroutine[None, None, None]],
    stop: asyncio.Event,
) -> None:
    """Requests are answered until the worker is done: episodes that end meanwhile need their agents' last ones."""
    async with asyncio.TaskGroup() as tasks:
        answering = tasks.create_task(serving, name="answering")
        others = [tasks.create_task(one) for one in beside]
        try:
            await worker.run(stop)
            has_ended.set()
            await answering
        finally:
            await cancel_all([answering, *others], again_after_s=0.1)


async def renew(keys: Keys, redis: RedisClient) -> None:
    """A server that was wiped has no secret, or one that a gateway made up which has started since."""
    keys.renew(await shared_secret(redis, AGENT_KEYS, keys.secret))


def redactor_of(settings: Settings) -> Redactor | None:
    try:
        return None if settings.traffic_redactor is None else load_redactor(settings.traffic_redactor)
    except NoRedactor as error:
        raise SettingsError(f"GSPO_TRAFFIC_REDACTOR: {error}") from None


async def boot_here(settings: Settings, own_url: str) -> Boot:
    """How agents' processes are started, and what they may reach."""
    data_dir = DataDir(settings.data_dir)
    interpreters = Interpreters(data_dir.venvs, settings.env_install)
    boot = boot_for(settings.env_hosts, settings.env_token, interpreters, WallPolicy.of(settings))
    sites = Sites(
        EnvironmentRegistry(data_dir.environments),
        settings.outbound_networks,
        elsewhere=bool(settings.env_hosts),
        for_agents=await asyncio.to_thread(networks_of, own_url),
    )
    return sites.booting(boot)


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


def address_of(bind: str) -> str:
    """How neighbours reach what binds this."""
    host, _, port = bind.rpartition(":")
    return f"{socket.gethostname()}:{port}" if host in ALL_ADDRESSES else bind


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m services.gateway", description="Answer agents that play episodes.")
    parser.add_argument(
        "--max-episodes", type=int, default=MAX_EPISODES, help="episodes held at once (default: %(default)s)"
    )
    parser.add_argument("--drain-s", type=float, default=8.0, help="seconds to reach a turn boundary after SIGTERM")
    parser.add_argument("--fd", type=int, help="a socket that listens on GSPO_GATEWAY_BIND, of whoever started this")
    arguments = parser.parse_args()
    sys.setswitchinterval(TURN_OF_A_THREAD_S)
    try:
        settings = load_settings()
        name = f"gateway-{socket.gethostname()}-{os.getpid()}"
        configure_logging("gateway", level=settings.log_level, log_format=settings.log_format, worker=name)
        tell_unread_settings()
        with hold_place("gateway", settings.gateway_bind) as place:
            config = WorkerConfig(
                name=name,
                max_episodes=arguments.max_episodes,
                lease_s=settings.lease_s,
                drain_s=arguments.drain_s,
                engine_urls=settings.engine_urls,
                kind="gateway",
                address=settings.gateway_own_url or f"http://{address_of(settings.gateway_bind)}",
                place=place,
            )
            working = partial(with_name_of_its_own, partial(work, settings, arguments.fd), config)
            return run_until_signalled(working, grace_s=arguments.drain_s + LEAVING_S)
    except SettingsError as error:
        print(f"services.gateway: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
