"""The process that examines an environment for the API is bounded as a host is."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from services.hosts.local import LocalHosts, WallPolicy
from services.hosts.server import HostOrder
from services.hosts.venv import Interpreters
from services.hosts.walls import control_groups, tiers
from services.hosts.walls.control_groups import ALL, PREFIX
from services.hosts.walls.tiers import Tier
from services.rollout.request_runner import RequestRunner

WORLD = '''
class Seen:
    """Where it is."""

    tasks = [{"groups": open("/proc/self/cgroup").read()}]

    def reset(self, groups: str) -> str:
        return groups

    def get_reward(self) -> float:
        return 0.0
'''
MOUNTS = Path("/proc/self/mountinfo").read_text()
OFFERED, REFUSED = control_groups.offer()


@pytest.mark.skipif(
    not OFFERED or tiers.WALLS[Tier.WALL].refusal() is not None, reason=f"no wall or no control groups: {REFUSED}"
)
async def test_an_examination_is_in_a_control_group_that_goes_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "seen.py").write_text(WORLD)
    hosts = LocalHosts(Interpreters(tmp_path / "venvs"), WallPolicy(Tier.WALL))
    order = await hosts.prepared(HostOrder(f"{folder}/seen.py:Seen"))
    runner = RequestRunner(cast(Any, None), cast(Any, None), hosts, "worker-0")
    said: Any = await runner._in_a_process(order, {"do": "tasks", "split": "train", "first": 0, "count": 1})
    (task,) = said["result"]["tasks"]
    groups: str = task["groups"]
    assert f"/{ALL}/{PREFIX}" in groups
    own = [one for one in control_groups.own_folders(MOUNTS, groups).values() if one.parent.name == ALL]
    assert own
    assert [one for one in own if one.exists()] == []
