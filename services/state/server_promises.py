"""The promises a Redis server must keep for us: acknowledged means durable, and nothing is ever evicted.

The rule: a server with weaker promises is reported and used as it is; its settings stay unchanged. ``server`` starts
and refuses servers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.process.telemetry import get_logger
from services.state.client import RedisClient, RedisFault

EXAMINED = ("appendonly", "appendfsync", "maxmemory-policy")
UNREADABLE = "its configuration cannot be read ({error}): make sure that it has appendfsync always and noeviction"


async def warn_if_weaker(client: RedisClient) -> list[str]:
    """Check the server once, when a process starts: log and return the promises it does not keep."""
    try:
        found = weaknesses_in({name: (await client.config_get(name)).get(name) for name in EXAMINED})
    except RedisFault as error:
        found = [UNREADABLE.format(error=error)]
    warn(found)
    return found


def warn(weaknesses: Sequence[str]) -> None:
    for weakness in weaknesses:
        get_logger().warning("the Redis server gives weaker guarantees than needed", weakness=weakness)


def weaknesses_in(config: Mapping[str, str | bytes | None]) -> list[str]:
    """Empty for a server that keeps every promise."""
    # A client may return bytes or text.
    values = {name: value.decode() if isinstance(value, bytes) else value for name, value in config.items()}
    found = []
    if values["appendonly"] != "yes" or values["appendfsync"] != "always":
        found.append(
            f"appendonly {values['appendonly']}, appendfsync {values['appendfsync']}: what it acknowledged may be lost "
            "when it is killed; set appendonly yes and appendfsync always"
        )
    if values["maxmemory-policy"] != "noeviction":
        found.append(f"maxmemory-policy {values['maxmemory-policy']}: it may evict data; set noeviction")
    return found
