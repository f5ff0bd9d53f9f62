"""Which process runs where: the members of an installation on one or several machines, each with its GPUs.

Every launcher starts what ``place`` returns, in its order, and prints ``described`` before it starts anything. Rule: it
is a pure function of what was asked for. No GPU has two members unless the caller said so, and what cannot be placed
is refused with the reason. How a member is started, and by whom, is the launcher's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from services.launch import topology
from services.launch.topology import Process, Share, Site

TRAINER, ENGINES = "trainer", "engines"
_ROLES = {"trainer": TRAINER, "trainers": TRAINER, "engine": ENGINES, "engines": ENGINES}
_GPUS = re.compile(r"([a-z]+):(?:([\d,-]+)/)?([\d,-]+)")
# More than any cluster has; a digit too many must not fill the memory.
_MOST_GPUS = 1 << 16
_MOST_DIGITS = 5
# In a message.
_MOST_LISTED = 16

Gpu = tuple[int, int]
"""A node's number and a device's number there."""


class PlacementError(ValueError):
    """What was asked for cannot be placed; the message says why."""


@dataclass(frozen=True)
class PlacementRequest:
    """What a user asks for; ``None`` leaves it to the defaults."""

    nodes: int = 1
    gpus_per_node: int = 0
    trainers: int = 1
    engines: int | None = None
    trainer_nodes: int = 1
    """Nodes, from the first, that train where ``gpus`` does not say it."""
    trainer_ranks: int = 1
    """Processes of a trainer on each of its nodes, where there are no GPUs; with GPUs it has one for each."""
    rollout_workers: int = 1
    """On each node."""
    gpus: Mapping[str, tuple[Gpu, ...]] = field(default_factory=dict)
    """What ``parse_gpus`` read; empty for the default division."""
    shares: Mapping[str, Share] = field(default_factory=dict)
    """CPUs and memory by the name of a process, where the topology's are not enough."""
    has_engines: bool = False
    """Engines already run elsewhere: none is placed."""
    may_share: bool = False
    """Whether a GPU may have a trainer and an engine, which then divide its memory."""


@dataclass(frozen=True)
class Member:
    """One process, or the ranks of a trainer on one node, which one command starts."""

    name: str
    process: Process
    node: int = 0
    devices: tuple[int, ...] = ()
    index: int = 0
    """Its number among its kind: a port of its own comes from it."""
    ranks: int = 1
    gang: tuple[int, ...] = ()
    """Nodes of all members of its trainer."""
    share: Share = field(default_factory=Share)
    """For each of its ranks or GPUs."""

    @property
    def cpus(self) -> int:
        return self.share.cpus * max(self.ranks, len(self.devices))

    @property
    def memory_mb(self) -> int:
        return self.share.memory_mb * max(self.ranks, len(self.devices))


def place(wanted: PlacementRequest, site: Site) -> tuple[Member, ...]:
    """The members in the order of their start. Raises PlacementError."""
    _check_counts(wanted)
    division = wanted.gpus or _divided(wanted)
    _check_division(division, wanted)
    placed: list[Member] = []
    for process in topology.processes(site, has_engines=wanted.has_engines):
        if process.health is not None:
            share = wanted.shares.get(process.name, process.share)
            placed += [replace(one, share=share) for one in _members(process, wanted, division)]
    return tuple(placed)


def _members(process: Process, wanted: PlacementRequest, division: Mapping[str, tuple[Gpu, ...]]) -> list[Member]:
    if process is topology.ENGINE:
        return _engines(process, wanted, division.get(ENGINES, ()))
    if process is topology.TRAINER:
        return _trainers(process, wanted, division.get(TRAINER, ()))
    if process is topology.ROLLOUT:
        places = [node for node in range(wanted.nodes) for _ in range(wanted.rollout_workers)]
        return [Member(f"{process.name}-{index}", process, node, index=index) for index, node in enumerate(places)]
    return [Member(process.name, process)]


def _engines(process: Process, wanted: PlacementRequest, gpus: Sequence[Gpu]) -> list[Member]:
    if not gpus:
        number = wanted.engines if wanted.engines is not None else wanted.nodes
        places: list[tuple[int, tuple[int, ...]]] = [(index % wanted.nodes, ()) for index in range(number)]
    else:
        places = []
        for part in _parts(_by_node(gpus), wanted.engines or len(gpus), "engines"):
            if len({node for node, _ in part}) > 1:
                raise PlacementError(
                    f"an engine would have GPUs of several nodes ({_listed(part)}): an engine runs on one; "
                    f"ask for more engines than {wanted.engines}"
                )
            places.append((part[0][0], tuple(device for _, device in part)))
    return [
        Member(_numbered(process.name, index, len(places)), process, node, devices, index)
        for index, (node, devices) in enumerate(places)
    ]


def _trainers(process: Process, wanted: PlacementRequest, gpus: Sequence[Gpu]) -> list[Member]:
    if gpus:
        gangs = [
            [(node, tuple(device for _, device in own)) for node, own in groupby(_by_node(part), key=_node)]
            for part in _parts(gpus, wanted.trainers, "trainers")
        ]
    elif wanted.trainer_nodes > 1:
        if wanted.trainers > 1:
            raise PlacementError("several trainers on several nodes each need --gpus, which divides them")
        gangs = [[(node, ()) for node in range(wanted.trainer_nodes)]]
    else:
        gangs = [[(index % wanted.nodes, ())] for index in range(wanted.trainers)]
    members = []
    for index, gang in enumerate(gangs):
        ranks = {len(devices) or wanted.trainer_ranks for _, devices in gang}
        if len(ranks) > 1:
            raise PlacementError(f"a trainer has the same number of GPUs on each of its nodes, not {sorted(ranks)}")
        name = _numbered(process.name, index, len(gangs))
        nodes = tuple(node for node, _ in gang)
        for number, (node, devices) in enumerate(gang):
            own = f"{name}-node{number}" if len(gang) > 1 else name
            members.append(Member(own, process, node, devices, index, max(ranks), nodes))
    return members


def _numbered(name: str, index: int, number: int) -> str:
    return f"{name}-{index}" if number > 1 else name


def _node(gpu: Gpu) -> int:
    return gpu[0]


def _by_node(gpus: Sequence[Gpu]) -> list[Gpu]:
    """Those of a node together, in the order in which they were named."""
    return sorted(gpus, key=_node)


def _parts(gpus: Sequence[Gpu], number: int, what: str) -> list[Sequence[Gpu]]:
    each, rest = divmod(len(gpus), number)
    if rest or not each:
        raise PlacementError(f"{len(gpus)} GPUs ({_listed(gpus)}) cannot be divided evenly among {number} {what}")
    return [gpus[start : start + each] for start in range(0, len(gpus), each)]


def _divided(wanted: PlacementRequest) -> dict[str, tuple[Gpu, ...]]:
    """Without ``--gpus``: on one node half for each, on several the first nodes for trainers."""
    every = [(node, device) for node in range(wanted.nodes) for device in range(wanted.gpus_per_node)]
    if not every:
        return {}
    if wanted.has_engines:
        return {TRAINER: tuple(every)}
    if len(every) == 1:
        return {TRAINER: tuple(every), ENGINES: tuple(every)}
    first = wanted.trainer_nodes * wanted.gpus_per_node if wanted.nodes > 1 else (len(every) + 1) // 2
    return {TRAINER: tuple(every[:first]), ENGINES: tuple(every[first:])}


def _check_counts(wanted: PlacementRequest) -> None:
    if wanted.nodes < 1 or wanted.gpus_per_node < 0:
        raise PlacementError(f"--nodes {wanted.nodes} --gpus-per-node {wanted.gpus_per_node}: there is nothing to use")
    if not 1 <= wanted.trainer_nodes <= wanted.nodes or wanted.trainer_ranks < 1:
        raise PlacementError(
            f"a trainer needs at least one rank on at least one of the {wanted.nodes} nodes; "
            f"not --trainer-nodes {wanted.trainer_nodes} --trainer-ranks {wanted.trainer_ranks}"
        )
    if wanted.gpus_per_node and wanted.trainer_ranks > 1:
        raise PlacementError("a trainer has one rank for each of its GPUs: say which with --gpus, not --trainer-ranks")
    counts = {"--trainers": wanted.trainers, "--engines": wanted.engines, "--rollout-workers": wanted.rollout_workers}
    for option, count in counts.items():
        if count is not None and count < 1:
            raise PlacementError(f"{option} {count}: there has to be at least one")
    if wanted.has_engines and wanted.engines is not None:
        raise PlacementError("--engines starts engines, but they are given already, by their addresses")


def _check_division(division: Mapping[str, tuple[Gpu, ...]], wanted: PlacementRequest) -> None:
    for role, gpus in division.items():
        if len(set(gpus)) < len(gpus):
            raise PlacementError(f"--gpus gives {role} a GPU twice: {_listed(gpus)}")
        absent = [gpu for gpu in gpus if gpu[0] >= wanted.nodes or gpu[1] >= wanted.gpus_per_node]
        if absent:
            raise PlacementError(f"there is no GPU {_listed(absent)}: {_what_there_is(wanted)}")
    if wanted.has_engines and wanted.gpus.get(ENGINES):
        raise PlacementError("--gpus gives GPUs to engines, but engines are given already, by their addresses")
    if division and not (division.get(TRAINER) and (wanted.has_engines or division.get(ENGINES))):
        raise PlacementError("the trainer and the engines both need GPUs: --gpus trainer:0-3 engines:4-7")
    both = sorted({*division.get(TRAINER, ())} & {*division.get(ENGINES, ())})
    if both and not wanted.may_share:
        raise PlacementError(f"trainer and engines would share GPU {_listed(both)}, which is not possible here")


def _what_there_is(wanted: PlacementRequest) -> str:
    if not wanted.gpus_per_node:
        return "there are none at all (CUDA_VISIBLE_DEVICES, --gpus-per-node)"
    each = f" on each of {wanted.nodes} nodes" if wanted.nodes > 1 else ""
    return f"there are {wanted.gpus_per_node}{each}, counted from 0 as NODE/GPU"


def parse_gpus(words: Iterable[str]) -> dict[str, tuple[Gpu, ...]]:
    """``trainer:0-3 engines:4-7`` on one node, ``trainer:0/0-7 engines:1-3/0-7`` on several. Raises PlacementError."""
    found: dict[str, tuple[Gpu, ...]] = {}
    for word in words:
        matched = _GPUS.fullmatch(word)
        role = _ROLES.get(matched[1]) if matched else None
        if matched is None or role is None:
            raise PlacementError(f"--gpus {word}: say trainer:0-3 or engines:1-2/0-7 (nodes/GPUs)")
        nodes, devices = _numbers(matched[2] or "0", word), _numbers(matched[3], word)
        if len(nodes) * len(devices) > _MOST_GPUS:
            raise PlacementError(f"--gpus {word}: that is {len(nodes) * len(devices)} GPUs, more than {_MOST_GPUS}")
        found[role] = found.get(role, ()) + tuple((node, device) for node in nodes for device in devices)
    return found


def _numbers(text: str, word: str) -> list[int]:
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if max(len(first), len(last)) > _MOST_DIGITS:
            raise PlacementError(f"--gpus {word}: no node and no GPU has a number of more than {_MOST_DIGITS} digits")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise PlacementError(f"--gpus {word}: {part!r} is neither a number nor a range such as 0-3")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def _listed(gpus: Sequence[Gpu]) -> str:
    more = f" and {len(gpus) - _MOST_LISTED} more" if len(gpus) > _MOST_LISTED else ""
    return ", ".join(f"{node}/{device}" for node, device in gpus[:_MOST_LISTED]) + more


def described(members: Sequence[Member], *, nodes: int = 1) -> str:
    """The plan for a terminal: one line for each member."""
    rows = []
    for one in members:
        devices = ",".join(map(str, one.devices))
        what = f"GPU {devices}" if devices else "CPU"
        ranks = f", {one.ranks} ranks" if one.ranks > 1 else ""
        where = f"node {one.node}  " if nodes > 1 else ""
        rows.append(f"  {where}{one.name:<16} {what}{ranks}")
    shared = sharing(members)
    if shared:
        rows.append(f"  shared: GPU {_listed(shared)} (give each its part of the memory: docs/launch.md)")
    return "\n".join(rows)


def sharing(members: Sequence[Member]) -> list[Gpu]:
    """GPUs with more than one member."""
    every = [(one.node, device) for one in members for device in one.devices]
    return sorted({gpu for gpu in every if every.count(gpu) > 1})
