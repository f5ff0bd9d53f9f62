"""``python -m services.engine.announce URL...``: registers engines that no process was configured with.

Runs beside an engine of any kind. While both run, jobs may bind the engine; when this stops, the engine leaves the
list. An engine itself knows nothing of Redis.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from services.engines.kinds import open_engines
from services.engines.protocol import info_calls
from services.process.lifecycle import run_until_signalled
from services.process.settings import load_settings
from services.process.telemetry import configure_logging, get_logger
from services.state.client import connect
from services.state.engine_beats import ANSWER_S, EngineBeats
from services.state.store import Store


async def announce(urls: Sequence[str], stop: asyncio.Event) -> None:
    settings = load_settings()
    configure_logging("announce", level=settings.log_level, log_format=settings.log_format)
    if settings.redis_url is None:
        raise SystemExit("GSPO_REDIS_URL is not set: engines are announced in the Redis of an installation")
    async with connect(settings.redis_url) as redis, open_engines() as engine_at:
        store = Store(redis, lease_s=settings.lease_s)
        await store.load_functions()
        engines = info_calls(map(engine_at, urls), ANSWER_S)
        beating = asyncio.create_task(EngineBeats(store.fleet, engines, lease_s=settings.lease_s).run())
        get_logger().info("announcing", urls=list(urls))
        await stop.wait()
        beating.cancel()
        for url in urls:
            await store.fleet.remove_engine(url.rstrip("/"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m services.engine.announce", description=__doc__)
    parser.add_argument("urls", nargs="+", metavar="URL", help="such as http://127.0.0.1:30000")
    arguments = parser.parse_args()
    return run_until_signalled(lambda stop: announce(arguments.urls, stop))


if __name__ == "__main__":
    sys.exit(main())
