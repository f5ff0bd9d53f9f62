"""What a process that holds episodes needs before it can begin: hosts, and where traces go.

Rule: it reads no setting by itself; each process passes those that it has.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import SecretStr

from services.hosts.local import LocalHosts, WallPolicy
from services.hosts.pool import Boot
from services.hosts.venv import Interpreters
from services.process.tracing import Traces, TracingUnavailable, open_traces


def boot_for(addresses: Sequence[str], token: SecretStr | None, interpreters: Interpreters, policy: WallPolicy) -> Boot:
    """Where environments and agents run: in services at ``addresses``, or beside this process."""
    if not addresses:
        policy.announce()
        return LocalHosts(interpreters, policy).boot
    if token is None:
        raise SystemExit("GSPO_ENV_TOKEN is not set: the services in GSPO_ENV_HOSTS require it")
    from services.hosts.remote import RemoteHosts  # most installations have their hosts beside their workers

    return RemoteHosts(addresses, token.get_secret_value()).boot


def traces_to(endpoint: str | None, process: str, name: str, *, share: float) -> Traces | None:
    if endpoint is None:
        return None
    try:
        return open_traces(endpoint, process, share=share, **{"service.instance.id": name})
    except TracingUnavailable as error:
        raise SystemExit(f"GSPO_TRACE_ENDPOINT is set, but {error}") from error
