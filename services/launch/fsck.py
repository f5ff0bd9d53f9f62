"""``gspo fsck``: what is damaged, half-written or referred to by nothing in a data directory, and beside its Redis.

Rule: it only looks, unless it is told ``--repair``, and then removes only what is safe. Without Redis it says what it
could not judge; it starts no process of the service and may run beside all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from gspo_core.cli.command import CommandError
from services.files.data_dir import DataDir
from services.files.environments.registry import EnvironmentRegistry
from services.files.fsck import Fsck
from services.files.installation import InstallationFiles
from services.process.settings import SettingsError, load_settings
from services.state.client import Away, RedisFault, connect
from services.state.installation import InstallationGuard
from services.state.store import JobRecord, Store

HAS_TORCH = find_spec("torch") is not None
CONTACT_S = 5.0
# Signs of life come every two seconds.
SILENT_S = 10.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data-dir", help="which one (default: $GSPO_DATA_DIR or .gspo)")
    parser.add_argument("--repair", action="store_true", help="remove what is left half-written and in nobody's way")


def run(arguments: argparse.Namespace) -> int:
    root = Path(arguments.data_dir or os.environ.get("GSPO_DATA_DIR", ".gspo")).resolve()
    if not root.is_dir():
        raise CommandError(f"there is no directory {root}")
    data_dir = DataDir(root)
    fsck = Fsck(data_dir, _check_learner, lambda: _named_uploads(data_dir))
    num_left = 0
    for found in fsck.look():
        is_mended = arguments.repair and found.can_be_removed
        if is_mended:
            fsck.mend(found)
        num_left += found.kind != "unknown" and not is_mended
        note = " (removed)" if is_mended else " (--repair removes it)" if found.can_be_removed else ""
        print(f"{found.kind:13} {found.path.relative_to(root)}: {found.what}{note}")
    for kind, line in _beside_redis(data_dir):
        num_left += kind != "unknown"
        print(f"{kind:13} {line}")
    if not HAS_TORCH:
        print(f"{'unknown':13} no torch is installed here: not judged is what checkpoints hold of the learner")
    print("nothing is wrong here" if not num_left else f"{num_left} found")
    return 1 if num_left else 0


def _check_learner(directory: Path) -> None:
    if not HAS_TORCH:
        return
    from gspo_core.learner import check_state  # loads torch

    check_state(directory)


def _named_uploads(data_dir: DataDir) -> set[str]:
    return {one.upload for one in EnvironmentRegistry(data_dir.environments).all() if one.upload is not None}


def _beside_redis(data_dir: DataDir) -> Iterator[tuple[str, str]]:
    try:
        url = load_settings(is_typed=True).redis_url
    except SettingsError as error:
        raise CommandError(str(error)) from error
    if url is None:
        yield "unknown", "GSPO_REDIS_URL is not set: not judged is which jobs Redis knows, and whose Redis it is"
        return
    try:
        yield from asyncio.run(_look_into(url, data_dir))
    except (Away, RedisFault, TimeoutError) as error:
        yield "unknown", f"Redis was not looked into ({error}): not judged is which jobs it knows, and whose it is"


async def _look_into(url: str, data_dir: DataDir) -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    async with connect(url) as redis, asyncio.timeout(CONTACT_S):
        held_id, token = await InstallationGuard(redis, data_dir).held()
        files = InstallationFiles(data_dir)
        own, served = await asyncio.to_thread(files.id), await asyncio.to_thread(files.served)
        if held_id is not None and held_id != own:
            lines.append(("damaged", f"this Redis belongs to installation {held_id}, this directory to {own}"))
            return lines
        if served is not None and token not in (None, served.token) and served.age_s < SILENT_S:
            lines.append(("damaged", "another Redis serves this directory as well: end the processes of one of them"))
        known = {job.id for job in await _all_jobs(Store(redis))}
    on_disk = set(await asyncio.to_thread(data_dir.jobs.accepted))
    lines += [("damaged", f"{job}: Redis knows it, and its directory is gone") for job in sorted(known - on_disk)]
    lines += [("unknown", f"{job}: Redis has not been given it back yet") for job in sorted(on_disk - known)]
    return lines


async def _all_jobs(store: Store) -> list[JobRecord]:
    found: list[JobRecord] = []
    while some := await store.jobs.page(500, found[-1].id if found else None):
        found += some
    return found
