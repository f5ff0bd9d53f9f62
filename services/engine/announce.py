"""``python -m services.engine.announce URL...``: makes engines known that no process was configured with.

Beside an SGLang server or an embedded engine, for as long as this runs and the engine answers, jobs may bind it; when
it is stopped, the engine is taken off the list. An engine itself knows nothing of Redis.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from services.engine_beats import EngineBeats
from services.engine_client import EngineClient, open_http
from services.process import run_until_signalled
from services.redis_server import connect
from services.settings import load_settings
from services.store import Store
from services.telemetry import configure_logging, get_logger


async def announce(urls: Sequence[str], stop: asyncio.Event) -> None:
    settings = load_settings()
    configure_logging("announce", level=settings.log_level, log_format=settings.log_format)
    if settings.redis_url is None:
        raise SystemExit("GSPO_REDIS_URL is not set: engines are announced in the Redis of an installation")
    async with connect(settings.redis_url) as redis, open_http() as http:
        store = Store(redis, lease_s=settings.lease_s)
        await store.load_functions()
        beating = asyncio.create_task(
            EngineBeats(store, [EngineClient(url, http) for url in urls], lease_s=settings.lease_s).run()
        )
        get_logger().info("announcing", urls=list(urls))
        await stop.wait()
        beating.cancel()
        for url in urls:
            await store.remove_engine(url.rstrip("/"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m services.engine.announce", description=__doc__)
    parser.add_argument("urls", nargs="+", metavar="URL", help="such as http://127.0.0.1:30000")
    arguments = parser.parse_args()
    return run_until_signalled(lambda stop: announce(arguments.urls, stop))


if __name__ == "__main__":
    sys.exit(main())
