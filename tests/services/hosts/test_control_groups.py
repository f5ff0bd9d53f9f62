"""What all processes of a host take together is bounded by the kernel, where the machine lets us; else nothing is."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gspo_core.env import CallStatus, ParsedTurn, Timeouts, ToolCall
from gspo_core.types import Split, StopReason
from services.hosts.local import LocalHosts, WallPolicy
from services.hosts.server import HostOrder
from services.hosts.session import HostedEnvironment, HostedSession
from services.hosts.venv import Interpreters
from services.hosts.walls import control_groups, tiers
from services.hosts.walls.control_groups import ALL, PREFIX, ControlGroup
from services.hosts.walls.tiers import Tier
from tests.services.hosts import hogs
from tests.services.hosts.test_host import processes

OFFERED, REFUSED = control_groups.offer()
HAS_WALL = tiers.WALLS[Tier.WALL].refusal() is None
LONG = Timeouts(reset_timeout_s=60.0, step_timeout_s=60.0, score_timeout_s=60.0, close_timeout_s=10.0)
bounded = pytest.mark.skipif(
    not (HAS_WALL and "memory" in OFFERED and "processes" in OFFERED),
    reason=f"this machine bounds {OFFERED or 'nothing'} by control groups ({REFUSED or 'all that we use'})",
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    shutil.copy(hogs.__file__, folder)
    return folder


async def hosted(project: Path, **hosting: int | str) -> HostedEnvironment:
    order = HostOrder(f"{project}/hogs.py:Hog", hosting={"memory_mb": 128, "disk_mb": 16, **hosting})
    boot = LocalHosts(Interpreters(project / "venvs"), WallPolicy(Tier.WALL)).boot
    return await HostedEnvironment.open(order, boot=boot)


async def begun(environment: HostedEnvironment) -> HostedSession:
    session = environment.session(limits=LONG, episode_id="job/0/0")
    await session.start(await environment.task(Split.TRAIN, 0), seed=0)
    return session


def call(tool: str, **arguments: Any) -> ParsedTurn:
    return ParsedTurn("", (ToolCall(tool, arguments, CallStatus.OK, "", 0, 1),))


def folders_of(pid: int) -> Iterator[Path]:
    """Of the groups of ours that a process is in."""
    mounts, groups = Path("/proc/self/mountinfo").read_text(), Path(f"/proc/{pid}/cgroup").read_text()
    for folder in control_groups.own_folders(mounts, groups).values():
        if folder.parent.name == ALL:
            yield folder


def bound_in(folders: set[Path], *names: str) -> int:
    """The number in the first file that is there."""
    return next(int((folder / name).read_text()) for name in names for folder in folders if (folder / name).exists())


@bounded
async def test_a_host_is_in_a_group_of_its_own_that_goes_with_it(project: Path) -> None:
    one, two = await hosted(project, num_processes=77), await hosted(project)
    try:
        session = await begun(one)
        groups = set(folders_of((await processes(one))[0]))
        await begun(two)
        others = set(folders_of((await processes(two))[0]))
        assert groups
        assert {folder.name for folder in groups} != {folder.name for folder in others}
        assert len({folder.name for folder in groups}) == 1
        assert bound_in(groups, "pids.max") == 77
        memory = bound_in(groups, "memory.limit_in_bytes", "memory.max")
        assert (16 + 192) << 20 <= memory < (16 + 192 + 256) << 20, "disk, one process at its hard bound, the loaded"
        await begun(one)
        more = bound_in(groups, "memory.limit_in_bytes", "memory.max")
        assert more - memory == 192 << 20, "a second process adds its own"
        await session.close()
    finally:
        await one.close()
        await two.close()
    assert [folder for folder in groups | others if folder.exists()] == []


@bounded
async def test_many_processes_that_fill_the_memory_at_once_end_by_their_group(project: Path) -> None:
    """Before any watch looks: nothing of a session reaches more than its host may hold."""
    environment = await hosted(project)
    try:
        session = await begun(environment)
        observation = await session.act(call("hog_memory", num_processes=8, mb_each=100))
        assert observation.stop_reason is StopReason.ENV_CRASH or "killed" in str(observation.messages)
        again = await begun(environment)
        assert (await again.act(call("hog_memory", num_processes=1, mb_each=10))).stop_reason is None
    finally:
        await environment.close()


@bounded
@pytest.mark.parametrize("num_processes", [0, 4])
async def test_memory_that_processes_share_counts_as_theirs(project: Path, num_processes: int) -> None:
    """Where its neighbours' part of the group would be enough for it, the watch ends it."""
    environment = await hosted(project)
    try:
        sessions = [await begun(environment) for _ in range(6)]
        hog = call("hog_memory", num_processes=num_processes, mb_each=400 // max(1, num_processes), hold_s=10.0)
        observation = await sessions[0].act(hog)
        assert observation.stop_reason is StopReason.ENV_CRASH
        assert (await sessions[1].act(call("hog_memory", num_processes=1, mb_each=1))).stop_reason is None
    finally:
        await environment.close()


@bounded
async def test_a_process_that_its_group_ended_is_told_as_over_its_memory(project: Path) -> None:
    causes: list[str] = []
    order = HostOrder(f"{project}/hogs.py:Hog", hosting={"memory_mb": 256, "disk_mb": 16})
    boot = LocalHosts(Interpreters(project / "venvs"), WallPolicy(Tier.WALL)).boot
    environment = await HostedEnvironment.open(order, causes.append, boot=boot)
    try:
        session = await begun(environment)
        for folder in folders_of((await processes(environment))[0]):
            for name in ("memory.limit_in_bytes", "memory.max"):
                if (folder / name).exists():
                    (folder / name).write_text(str(64 << 20))
        observation = await session.act(call("hog_memory", num_processes=0, mb_each=200))
        assert observation.stop_reason is StopReason.ENV_CRASH
        assert "host/over_memory" in causes
    finally:
        await environment.close()


@bounded
def test_the_groups_of_a_maker_that_was_killed_are_removed_by_the_next() -> None:
    making = (
        "import os, signal; from services.hosts.walls.control_groups import ControlGroup;"
        "group = ControlGroup.make(7); print(group.entries[0], flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", making], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    left = Path(done.stdout.strip()).parent
    assert left.name.startswith(PREFIX)
    assert left.exists()
    group = ControlGroup.make(7)
    assert group is not None
    try:
        assert not left.exists()
        other = ControlGroup.make(7)
        assert other is not None
        other.remove()
        assert all(Path(entry).exists() for entry in group.entries), "one that is held is nobody else's"
    finally:
        group.remove()


def test_all_hosts_together_leave_the_services_their_part() -> None:
    group = ControlGroup.make(7)
    if group is None:
        assert REFUSED, "who has no groups is told why"
        return
    try:
        common = {Path(entry).parents[1] for entry in group.entries}
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if "memory" in OFFERED:
            assert bound_in(common, "memory.limit_in_bytes", "memory.max") <= 0.75 * machine
        if "processors" in OFFERED:
            weights = [(folder / name) for folder in common for name in ("cpu.shares", "cpu.weight")]
            ((path, folder),) = [(path, path.parent) for path in weights if path.exists()]
            num_hosts = len(list(folder.glob(f"{PREFIX}*")))
            assert num_hosts
            assert int(path.read_text()) == (50 if path.name == "cpu.weight" else 1024 * num_hosts)
    finally:
        group.remove()


MOUNTS = """\
31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 /docker/1f /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory
39 31 0:36 /other /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids
41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
"""
GROUPS = """\
8:pids:/mine
4:memory:/docker/1f/in
1:cpu,cpuacct:/user.slice
0::/user.slice/app.scope
"""


def test_the_own_group_is_found_under_what_is_mounted() -> None:
    found = control_groups.own_folders(MOUNTS, GROUPS)
    assert found["memory"] == Path("/sys/fs/cgroup/memory/in")
    assert found["cpu"] == Path("/sys/fs/cgroup/cpu,cpuacct/user.slice")
    assert "pids" not in found, "another part of the hierarchy is mounted there"
    assert found[""] == Path("/sys/fs/cgroup/unified/user.slice/app.scope")
