"""`python -m services.api`: the one place that connects the API to its real Redis, files and sockets."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable

from gspo_core.outbound import parse_networks
from services.api.app import create_app
from services.api.http.access import Access, AccessRefused, is_loopback, require_safe_bind
from services.api.http.audit import Audit
from services.api.http.context import Backend
from services.api.http.key_ring import KeyRing
from services.files.data_dir import DataDir
from services.files.environments.registry import EnvironmentRegistry
from services.process.settings import Settings, SettingsError, load_settings
from services.process.telemetry import configure_logging, tell_unread_settings
from services.state.client import Away, RedisClient, connect
from services.state.queue import Bus
from services.state.store import Store

# Requests are short and streams end by themselves; whatever is open after this is cut. Deployments allow more, for
# downloads and large answers over slow lines.
GRACE_S = 3
# Further time to close what belongs to the process.
LEAVING_S = 3
FIRST_CONTACT_S = 3.0
# Returning a connection takes some rounds of the event loop, and rounds are long under hundreds of requests: with few
# connections Redis would idle while requests wait. Without a bound a crowd would open one each.
MAX_CONNECTIONS = 256
WAIT_S = 10.0


async def serve(settings: Settings, stop: asyncio.Event, grace_s: int = GRACE_S) -> None:
    """Serve until `stop` is set."""
    # Late, like all that nothing else needs at the start.
    from services.api.forgetting import Forgetting
    from services.files.audit_log import AuditLog
    from services.process.cancelling import first_to_end, unless_set
    from services.process.http_server import serve_http
    from services.state.installation import InstallationGuard

    keys = [key.get_secret_value() for key in settings.api_keys]
    data_dir = DataDir(settings.data_dir)
    ring = KeyRing(data_dir.keys)
    require_safe_bind(settings.api_host, Access(keys, ring))
    redis_url = settings.redis_url
    if redis_url is None:
        raise SettingsError("GSPO_REDIS_URL is not set: name the Redis that all processes share (`gspo up` starts one)")

    async with connect(redis_url, max_connections=MAX_CONNECTIONS, wait_s=WAIT_S) as redis, connect(redis_url) as news:
        store = Store(redis, lease_s=settings.lease_s, jobs_dir=data_dir.jobs)
        installation = InstallationGuard(redis, data_dir)
        # A server that cannot hold our functions ends this process, with the reason; so does one of another
        # installation. One that is away does not.
        await unless_set(stop, _meet(redis, store, installation.check))
        backend = Backend(
            store,
            Bus(redis, lease_s=settings.lease_s),
            data_dir.jobs,
            redis,
            registry=EnvironmentRegistry(data_dir.environments),
            networks=parse_networks(settings.outbound_networks),
            may_upload=settings.env_uploads,
            hub=data_dir.hub,
            news=Store(news),
        )
        app = create_app(
            lambda: contextlib.nullcontext(backend),
            keys=keys,
            ring=ring,
            may_be_open=is_loopback(settings.api_host),
            audit=Audit(AuditLog(data_dir.audit).append),
            stopping=stop,
            lease_s=settings.lease_s,
        )
        address = settings.api_host, settings.api_port
        serving = serve_http(app, *address, stop, grace_s=grace_s, settings="GSPO_API_HOST, GSPO_API_PORT")
        forgetting = Forgetting(store, data_dir.jobs).run(settings.episodes_keep_days)
        await first_to_end(serving, installation.run(), forgetting)


async def _meet(redis: RedisClient, store: Store, check: Callable[[], Awaitable[None]]) -> None:
    from services.state.server_promises import warn_if_weaker

    with contextlib.suppress(Away, TimeoutError):
        async with asyncio.timeout(FIRST_CONTACT_S) as contact:
            await store.load_functions()
            contact.reschedule(None)
            await check()
            contact.reschedule(asyncio.get_running_loop().time() + FIRST_CONTACT_S)
            await warn_if_weaker(redis)
            await store.rebuild()


def main() -> int:
    from services.process.lifecycle import run_until_signalled
    from services.state.installation import WrongInstallation

    parser = argparse.ArgumentParser(prog="python -m services.api", description="Serve the API and the viewer.")
    parser.add_argument("--grace-s", type=int, default=GRACE_S, help="seconds to finish open requests after a signal")
    grace_s = parser.parse_args().grace_s
    try:
        settings = load_settings()
        configure_logging("api", level=settings.log_level, log_format=settings.log_format)
        tell_unread_settings()
        return run_until_signalled(lambda stop: serve(settings, stop, grace_s), grace_s=grace_s + LEAVING_S)
    except (SettingsError, AccessRefused, WrongInstallation) as error:
        print(f"services.api: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
