"""Which process runs where: every process has its GPUs, none has two owners, and what cannot be is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.launch.placement import (
    ENGINES,
    TRAINER,
    Member,
    PlacementError,
    PlacementRequest,
    described,
    parse_gpus,
    place,
    sharing,
)
from services.launch.topology import Share, Site


def members(kind: str, wanted: PlacementRequest, site: Site = Site.BATCH) -> list[Member]:
    return [one for one in place(wanted, site) if one.process.name == kind]


def devices(kind: str, wanted: PlacementRequest) -> list[tuple[int, tuple[int, ...]]]:
    return [(one.node, one.devices) for one in members(kind, wanted)]


def test_a_laptop_has_one_of_each() -> None:
    placed = place(PlacementRequest(), Site.LAPTOP)
    assert [one.name for one in placed] == ["redis", "engine", "api", "trainer", "rollout-0", "gateway"]
    assert [one.name for one in place(PlacementRequest(has_engines=True), Site.LAPTOP)][:2] == ["redis", "api"]


def test_eight_gpus_are_divided_as_told() -> None:
    wanted = PlacementRequest(gpus_per_node=8, gpus=parse_gpus(["trainer:0-3", "engines:4-7"]))
    assert devices("trainer", wanted) == [(0, (0, 1, 2, 3))]
    assert [one.ranks for one in members("trainer", wanted)] == [4]
    assert devices("engine", wanted) == [(0, (4,)), (0, (5,)), (0, (6,)), (0, (7,))]
    two = PlacementRequest(gpus_per_node=8, engines=2, trainers=2, gpus=wanted.gpus)
    assert devices("engine", two) == [(0, (4, 5)), (0, (6, 7))]
    assert devices("trainer", two) == [(0, (0, 1)), (0, (2, 3))]


def test_gpus_that_are_not_listed_node_by_node_are_merged() -> None:
    trainer = parse_gpus(["trainer:0-1/0-1", "trainer:0-1/2-3", "engines:2/0-3"])
    nodes = members("trainer", PlacementRequest(nodes=3, gpus_per_node=4, gpus=trainer))
    assert [(one.node, one.devices, one.ranks, one.gang) for one in nodes] == [
        (0, (0, 1, 2, 3), 4, (0, 1)),
        (1, (0, 1, 2, 3), 4, (0, 1)),
    ]
    engines = parse_gpus(["trainer:0/0-1", "engines:1/0", "engines:2/0", "engines:1/1", "engines:2/1"])
    two = PlacementRequest(nodes=3, gpus_per_node=2, engines=2, gpus=engines)
    assert devices("engine", two) == [(1, (0, 1)), (2, (0, 1))]


def test_each_of_several_trainers_keeps_the_gpus_named_for_it() -> None:
    named = parse_gpus(["trainer:0-1/0-1", "trainer:0-1/2-3", "engines:2/0-3"])
    two = members("trainer", PlacementRequest(nodes=3, gpus_per_node=4, trainers=2, gpus=named))
    assert [(one.name, one.node, one.devices) for one in two] == [
        ("trainer-0-node0", 0, (0, 1)),
        ("trainer-0-node1", 1, (0, 1)),
        ("trainer-1-node0", 0, (2, 3)),
        ("trainer-1-node1", 1, (2, 3)),
    ]


def test_without_a_division_half_is_for_each_and_on_several_nodes_the_first_trains() -> None:
    assert devices("trainer", PlacementRequest(gpus_per_node=8)) == [(0, (0, 1, 2, 3))]
    four = PlacementRequest(nodes=4, gpus_per_node=8, trainer_nodes=2, engines=4)
    assert devices("trainer", four) == [(0, tuple(range(8))), (1, tuple(range(8)))]
    assert [one.gang for one in members("trainer", four)] == [(0, 1), (0, 1)]
    assert devices("engine", four) == [(node, part) for node in (2, 3) for part in ((0, 1, 2, 3), (4, 5, 6, 7))]
    assert [one.node for one in members("rollout", four)] == [0, 1, 2, 3]


def test_one_gpu_is_shared_where_that_is_possible_and_said() -> None:
    shared = place(PlacementRequest(gpus_per_node=1, may_share=True), Site.LAPTOP)
    assert sharing(shared) == [(0, 0)]
    assert "shared: GPU 0/0" in described(shared)
    with pytest.raises(PlacementError, match="would share GPU 0/0"):
        place(PlacementRequest(gpus_per_node=1), Site.BATCH)


def test_without_gpus_they_are_counted() -> None:
    wanted = PlacementRequest(nodes=3, trainers=2, engines=2, rollout_workers=2)
    assert [(one.name, one.node) for one in members("engine", wanted)] == [("engine-0", 0), ("engine-1", 1)]
    assert [(one.name, one.node) for one in members("trainer", wanted)] == [("trainer-0", 0), ("trainer-1", 1)]
    assert [one.node for one in members("rollout", wanted)] == [0, 0, 1, 1, 2, 2]
    assert len(members("engine", PlacementRequest(nodes=3))) == 3


def test_what_is_reserved_grows_with_ranks_and_gpus() -> None:
    wanted = PlacementRequest(nodes=2, gpus_per_node=4, engines=1, shares={"engine": Share(6, 1000)})
    (engine,), (trainer,) = members("engine", wanted), members("trainer", wanted)
    assert (engine.cpus, engine.memory_mb) == (24, 4000)
    assert (trainer.cpus, trainer.memory_mb) == (4, 4 * 8192)


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (PlacementRequest(nodes=2, trainer_nodes=3), "--trainer-nodes 3"),
        (PlacementRequest(gpus_per_node=8, trainer_ranks=2), "one rank for each of its GPUs"),
        (PlacementRequest(gpus_per_node=8, engines=3), "cannot be divided evenly among 3 engines"),
        (PlacementRequest(nodes=3, gpus_per_node=2, engines=1), "GPUs of several nodes"),
        (PlacementRequest(gpus_per_node=8, gpus={TRAINER: ((0, 0),)}), "both need GPUs"),
        (PlacementRequest(gpus_per_node=2, gpus={TRAINER: ((0, 0),), ENGINES: ((0, 2),)}), "there is no GPU 0/2"),
        (PlacementRequest(gpus_per_node=2, gpus={TRAINER: ((0, 0),), ENGINES: ((0, 1), (0, 1))}), "a GPU twice"),
        (PlacementRequest(nodes=2, trainers=2, trainer_nodes=2), "each need --gpus"),
        (
            PlacementRequest(
                nodes=2, gpus_per_node=4, gpus=parse_gpus(["trainer:0/0-3", "trainer:1/0", "engines:1/1"])
            ),
            "same num",
        ),
        (PlacementRequest(has_engines=True, engines=2), "given already"),
        (PlacementRequest(engines=0), "at least one"),
    ],
)
def test_what_cannot_be_placed_is_refused_with_the_reason(wanted: PlacementRequest, reason: str) -> None:
    with pytest.raises(PlacementError, match=reason):
        place(wanted, Site.BATCH)


@pytest.mark.parametrize(
    "word",
    [
        *("trainer", "trainer:", "worker:0", "trainer:3-1", "trainer:a", "engines:0/", "trainer:-"),
        *("engines:2-99999999999", "engines:0-99999999999/0", "engines:0-9999/0-9999"),
    ],
)
def test_a_division_that_cannot_be_read_is_refused(word: str) -> None:
    with pytest.raises(PlacementError, match="--gpus"):
        parse_gpus([word])


def test_a_refusal_lists_only_the_first_of_many_gpus() -> None:
    wanted = PlacementRequest(gpus_per_node=2, gpus=parse_gpus(["trainer:0", "engines:1-60000"]))
    with pytest.raises(PlacementError, match="0/17 and 59983 more") as refused:
        place(wanted, Site.BATCH)
    assert len(str(refused.value)) < 200


@given(
    nodes=st.integers(1, 4),
    gpus_per_node=st.integers(0, 8),
    trainers=st.integers(1, 3),
    engines=st.none() | st.integers(1, 8),
    trainer_nodes=st.integers(1, 4),
)
def test_no_gpu_is_given_twice(
    nodes: int, gpus_per_node: int, trainers: int, engines: int | None, trainer_nodes: int
) -> None:
    wanted = PlacementRequest(nodes, gpus_per_node, trainers, engines, trainer_nodes)
    try:
        placed = place(wanted, Site.BATCH)
    except PlacementError:
        return
    assert sharing(placed) == []
    assert all(device < gpus_per_node for one in placed for device in one.devices)
    assert len({one.name for one in placed}) == len(placed)
    used = {(one.node, device) for one in placed for device in one.devices}
    assert len(used) == nodes * gpus_per_node, "a GPU idles"
    assert described(placed, nodes=nodes).count("\n") == len(placed) - 1
