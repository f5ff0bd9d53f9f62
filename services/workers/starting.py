"""What a process that holds episodes needs before it can begin: its functions in Redis, hosts, and where traces go.

Rule: it reads no setting by itself; each process passes those that it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pydantic import SecretStr

from services.hosts.local import LocalHosts
from services.hosts.pool import Boot
from services.hosts.remote import RemoteHosts
from services.hosts.venv import Interpreters
from services.process.telemetry import get_logger
from services.process.tracing import Traces, TracingUnavailable, open_traces
from services.state.away import NotPermitted
from services.state.queue import Bus

FUNCTIONS_WAIT_S = (0.5, 8.0)


async def functions_there(bus: Bus) -> None:
    """A worker may not load them; the API and trainers do, and perhaps start after it."""
    wait_s = FUNCTIONS_WAIT_S[0]
    while True:
        try:
            return await bus.load_functions()
        except NotPermitted:
            get_logger().info("waiting for the API or a trainer to load the functions", wait_s=wait_s)
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, FUNCTIONS_WAIT_S[1])


def boot_for(addresses: Sequence[str], token: SecretStr | None, interpreters: Interpreters) -> Boot:
    """Where environments and agents run: in services at ``addresses``, or beside this process."""
    if not addresses:
        return LocalHosts(interpreters).boot
    if token is None:
        raise SystemExit("GSPO_ENV_TOKEN is not set: the services in GSPO_ENV_HOSTS require it")
    return RemoteHosts(addresses, token.get_secret_value()).boot


def traces_to(endpoint: str | None, process: str, name: str, *, share: float) -> Traces | None:
    if endpoint is None:
        return None
    try:
        return open_traces(endpoint, process, share=share, **{"service.instance.id": name})
    except TracingUnavailable as error:
        raise SystemExit(f"GSPO_TRACE_ENDPOINT is set, but {error}") from error
