"""Members of an installation as actors of a Ray cluster, each with the process of the member as its child.

Rule: one placement group holds a bundle for each node of the plan, so members of a node stay together and nothing else
takes what they will need again. An actor whose node is lost is one that has ended; started again, it waits until its
bundle is placed anew. When the program that made the group ends, however it ends, Ray ends the actors, and their
children end with them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from services.files.data_dir import DataDir
from services.launch.outside_settings import is_decided
from services.launch.placement import Member
from services.process.children import die_with_parent

MEBIBYTE = 1 << 20
PLACED_S = 600.0
# Answers of an actor that lives come at once; one that does not come now is looked for again.
POLL_S = 0.1
ANSWER_S = 10.0
LOST = 255


class Host:
    """The actor: it has one child, which dies with it."""

    def __init__(self, command: list[str], environment: dict[str, str], log: str, folder: str) -> None:
        # Only the devices among Ray's own variables concern a member; the rest would make it a part of Ray's worker.
        # Nor may what its node has set win over what the stack decides.
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("RAY_") and not is_decided(name)
        }
        with Path(log).open("ab") as output:
            self._child = subprocess.Popen(
                command,
                env={**inherited, **environment},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )

    def poll(self) -> int | None:
        return self._child.poll()

    def pid(self) -> int:
        return self._child.pid

    def ask_to_leave(self) -> None:
        self._child.terminate()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()


class RayPlace:
    """Use it as a context: at its end the group is given back, and with it every actor that is left."""

    def __init__(self, members: Sequence[Member], data_dir: DataDir, folder: Path) -> None:
        self._data_dir = data_dir
        self._folder = folder
        self._group = _group(members)

    def __enter__(self) -> RayPlace:
        return self

    def __exit__(self, *_: object) -> None:
        remove_placement_group(self._group)

    def addresses(self) -> list[str]:
        """The address of each bundle's node. Raises TimeoutError if the cluster has no room for all of them."""
        if not self._group.wait(PLACED_S):
            raise TimeoutError(
                f"the cluster has no room for {self._group.bundle_specs} within {PLACED_S:.0f} s: see ray status"
            )
        ask = ray.remote(num_cpus=0)(ray.util.get_node_ip_address)
        asked = [ask.options(scheduling_strategy=self._in(node)).remote() for node in range(self._group.bundle_count)]
        return [str(address) for address in ray.get(asked)]

    def _in(self, node: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=node)

    def start(self, member: Member, command: Sequence[str], environment: Mapping[str, str]) -> RayProcess:
        host = ray.remote(Host).options(
            name=f"gspo-{os.getpid()}-{member.name}-{os.urandom(3).hex()}",
            num_cpus=member.cpus,
            num_gpus=len(member.devices),
            memory=member.memory_mb * MEBIBYTE,
            scheduling_strategy=self._in(member.node),
        )
        log = str(self._data_dir.log_of(member.name))
        return RayProcess(host.remote([*command], {**environment}, log, str(self._folder)))


class RayProcess:
    def __init__(self, actor: Any) -> None:  # a handle has the methods of its class by name alone
        self._actor = actor
        self._code: int | None = None
        self._asked: ray.ObjectRef[int | None] | None = None

    def poll(self) -> int | None:
        """None also while Ray has not placed it yet."""
        if self._code is not None:
            return self._code
        if self._asked is None:
            self._asked = self._actor.poll.remote()
        answered, _ = ray.wait([self._asked], timeout=POLL_S)
        if answered:
            try:
                self._code = ray.get(self._asked)
            except RayError:
                self._code = LOST
            self._asked = None
        if self._code is not None:
            ray.kill(self._actor)  # what it reserved is free for the next
        return self._code

    def ask_to_leave(self) -> None:
        self._actor.ask_to_leave.remote()

    def kill(self) -> None:
        with contextlib.suppress(RayError, TimeoutError):
            ray.get(self._actor.kill.remote(), timeout=ANSWER_S)
        ray.kill(self._actor)


def _group(members: Sequence[Member]) -> PlacementGroup:
    nodes = max(member.node for member in members) + 1
    bundles = []
    for node in range(nodes):
        own = [member for member in members if member.node == node]
        bundle = {"CPU": sum(one.cpus for one in own), "memory": sum(one.memory_mb for one in own) * MEBIBYTE}
        gpus = sum(len(one.devices) for one in own)
        bundles.append({**bundle, **({"GPU": gpus} if gpus else {})})
    group: PlacementGroup = placement_group(bundles, strategy="STRICT_SPREAD" if nodes > 1 else "PACK")
    return group
