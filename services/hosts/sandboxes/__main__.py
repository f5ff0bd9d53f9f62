"""``python -m services.hosts.sandboxes``: serves sandboxes of this machine to workers elsewhere."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Iterator

from environments.sandbox.contract import Sandboxes
from environments.sandbox.local import LocalSandboxes
from services.hosts.sandboxes.container import ContainerSandboxes
from services.hosts.sandboxes.server import SandboxServer
from services.hosts.sandboxes.table import Table
from services.hosts.sandboxes.warm import WarmSandboxes
from services.hosts.walls import scratch
from services.process.lifecycle import run_until_signalled, tell_of_root
from services.process.settings import Settings, SettingsError, load_settings
from services.process.telemetry import configure_logging, get_logger, tell_unread_settings


@contextlib.contextmanager
def _kind(name: str, settings: Settings) -> Iterator[Sandboxes]:
    if name == "container":
        yield ContainerSandboxes(settings.sandbox_images)
        return
    folder = scratch.new_path()
    scratch.sweep(folder.parent)  # those of servers that were killed
    lock = scratch.make(str(folder))
    try:
        yield LocalSandboxes(below=str(folder))
    finally:
        folder.rmdir()
        os.close(lock)


@contextlib.contextmanager
def _warmed(kind: Sandboxes, num_ready: int) -> Iterator[Sandboxes]:
    if not num_ready:
        yield kind
        return
    with contextlib.closing(WarmSandboxes(kind, num_ready)) as warm:
        yield warm


async def serve(settings: Settings, arguments: argparse.Namespace, stop: asyncio.Event) -> None:
    key_sha256 = settings.sandbox_key_sha256
    if key_sha256 is None:
        raise SettingsError("GSPO_SANDBOX_KEY_SHA256 is not set: without it anyone could run commands here")
    with _kind(arguments.kind, settings) as kind, _warmed(kind, settings.sandboxes_ready) as sandboxes:
        if refusal := kind.refusal():
            raise SettingsError(f"there are no sandboxes of the kind {arguments.kind} here: {refusal}")
        table = Table(sandboxes, arguments.lease_s, arguments.most)
        server = SandboxServer((arguments.host, arguments.port), table, key_sha256)
        serving = threading.Thread(target=server.serve_forever, name="sandboxes", daemon=True)
        serving.start()
        get_logger().info("listening", port=server.server_address[1], kind=arguments.kind)
        tell_of_root()
        try:
            await stop.wait()
        finally:
            server.shutdown()
            server.server_close()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m services.hosts.sandboxes", description="Serve sandboxes to workers elsewhere."
    )
    parser.add_argument("--kind", choices=("local", "container"), default="local")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8030, help="port to bind; 0 picks a free one")
    parser.add_argument("--lease-s", type=float, default=60.0, help="a sandbox that nobody renews ends after this time")
    parser.add_argument("--most", type=int, default=256, help="sandboxes at once (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        settings = load_settings()
        configure_logging("sandboxes", level=settings.log_level, log_format=settings.log_format)
        tell_unread_settings()
        return run_until_signalled(lambda stop: serve(settings, arguments, stop))
    except (SettingsError, OSError) as error:
        print(f"services.hosts.sandboxes: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
