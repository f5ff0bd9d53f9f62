"""Secrets of this installation that its processes make up by themselves and share.

The rule: the first one stands, so all processes have the same; it never leaves them. After a server was wiped, the
first process to come back brings the secret that it had, if it had one.
"""

from __future__ import annotations

import secrets

from services.state.client import RedisClient
from services.state.functions import Functions
from services.state.keys import service_keys

SIZE_BYTES = 32
# Signs the keys of agents.
AGENT_KEYS = "agent_keys"


async def shared_secret(redis: RedisClient, name: str, known: bytes | None = None) -> bytes:
    """``known``: as this process knows it from before."""
    offered = known or secrets.token_bytes(SIZE_BYTES)
    held: bytes = await Functions(redis).call("secret", service_keys(), name, offered)
    return held
