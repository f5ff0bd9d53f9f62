"""Several worker processes under one: an event loop fills one core, and a worker may have more of them.

Rule: each process is a worker with its own lease, so that its death costs only what it held; another is started in its
place. A process that was asked to leave is not replaced. They leave together. No episode passes through the watching
process.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping, Sequence

from services.process.children import die_with_parent
from services.process.telemetry import get_logger

# A worker that cannot start must not be restarted a hundred times a second.
RESTART_S = 1.0


class NotDrained(RuntimeError):
    """A process did not leave in an orderly way."""


async def watch(
    command: Sequence[str], num_processes: int, environment: Mapping[str, str], stop: asyncio.Event
) -> None:
    """Keeps them running until ``stop`` is set, then has them leave; raises ``NotDrained`` if one did not.

    Returns as well when all of them have left.
    """
    statuses = await asyncio.gather(*(_keep_running(command, environment, stop) for _ in range(num_processes)))
    if any(statuses):
        raise NotDrained(f"not all worker processes drained; exit statuses: {statuses}")


async def _keep_running(command: Sequence[str], environment: Mapping[str, str], stop: asyncio.Event) -> int:
    stopping = asyncio.create_task(stop.wait())
    try:
        while True:
            # A session of its own: an interrupt from the terminal comes through us, once.
            child = await asyncio.create_subprocess_exec(
                *command, env=dict(environment), preexec_fn=die_with_parent(), start_new_session=True
            )
            ended = asyncio.create_task(child.wait())
            try:
                await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if stop.is_set():
                    _ask_to_leave(child)
                    return await ended
            finally:
                if child.returncode is None:
                    child.kill()
                await ended
            if not child.returncode:
                get_logger().info("worker process has left", pid=child.pid)
                return 0
            get_logger().error("worker process died: starting another", pid=child.pid, status=child.returncode)
            await asyncio.wait({stopping}, timeout=RESTART_S)
            if stop.is_set():
                return 0
    finally:
        stopping.cancel()


def _ask_to_leave(child: asyncio.subprocess.Process) -> None:
    if child.returncode is None:
        child.send_signal(signal.SIGTERM)
