"""``python -m services.engine.announce URL...``: registers engines that no process was configured with.

Runs beside an engine of any kind, or once for all that there may be: only those that answer are listed. While both
run, jobs may bind the engine; when this stops, the engine leaves the list, with ``--drain-within`` after its work is
done. An engine itself knows nothing of Redis. A rollout worker's rights are enough.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from services.engines.keys import EngineKeys
from services.engines.kinds import open_engines
from services.engines.protocol import info_calls
from services.process.health import Health
from services.process.lifecycle import run_until_signalled
from services.process.settings import load_settings
from services.process.telemetry import configure_logging, get_logger
from services.state.client import connect
from services.state.engine_beats import ANSWER_S, EngineBeats
from services.state.engine_leaving import drain
from services.state.functions import functions_there
from services.state.store import Store

# To leave the list, beside the time to drain.
_LEAVE_S = 30.0


async def announce(urls: Sequence[str], drain_within_s: float, stop: asyncio.Event) -> None:
    settings = load_settings()
    configure_logging("announce", level=settings.log_level, log_format=settings.log_format)
    if settings.redis_url is None:
        raise SystemExit("GSPO_REDIS_URL is not set: engines are announced in the Redis of an installation")
    async with connect(settings.redis_url) as redis, open_engines(EngineKeys.read(settings.engine_keys)) as engine_at:
        store = Store(redis, lease_s=settings.lease_s)
        await functions_there(store)
        engines = info_calls(map(engine_at, urls), ANSWER_S)
        beating = asyncio.create_task(EngineBeats(store.fleet, engines, lease_s=settings.lease_s).run())
        get_logger().info("announcing", urls=list(urls))
        names = [url.rstrip("/") for url in urls]
        try:
            async with Health(settings.health_file, stop) as health:
                health.is_ready = True
                await stop.wait()
                if drain_within_s:
                    await drain(store.fleet, names, drain_within_s)
        finally:
            beating.cancel()
            for name in names:
                await store.fleet.remove_engine(name)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m services.engine.announce", description=__doc__)
    parser.add_argument("urls", nargs="+", metavar="URL", help="such as http://127.0.0.1:30000")
    parser.add_argument(
        "--drain-within",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="when told to stop, let jobs give the engines back first, for so long at most (default: leave at once)",
    )
    arguments = parser.parse_args()
    return run_until_signalled(
        lambda stop: announce(arguments.urls, arguments.drain_within, stop),
        grace_s=arguments.drain_within + _LEAVE_S,
    )


if __name__ == "__main__":
    sys.exit(main())
