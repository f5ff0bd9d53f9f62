"""Secrets of this installation that its processes make up by themselves and share.

The rule: the first one stands, so all processes have the same; it never leaves them. A server that was wiped has a new
one: what was signed before is then no longer known.
"""

from __future__ import annotations

import secrets

from services.state.client import RedisClient
from services.state.functions import Functions
from services.state.keys import service_keys

SIZE_BYTES = 32
# Signs the keys of agents.
AGENT_KEYS = "agent_keys"


async def shared_secret(redis: RedisClient, name: str) -> bytes:
    held: bytes = await Functions(redis).call("secret", service_keys(), name, secrets.token_bytes(SIZE_BYTES))
    return held
