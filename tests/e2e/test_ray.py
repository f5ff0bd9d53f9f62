"""`gspo launch ray` on a real Ray cluster of three nodes on this machine (`make real-ray`)."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from gspo_core.cli import main
from gspo_core.client import Client
from services.launch.launchers import ray as ray_launcher
from services.launch.placement import place
from services.launch.placement_options import cluster_wanted
from services.launch.topology import Site
from services.process.ports import free_port
from tests.apparatus.processes import command, commands_of, environment, pids_of

ROOT = Path(__file__).parents[2]
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: make real-ray")
# Until the job is told to end: on a quiet machine its first twelve are over before a lost node has been replaced.
MANY_STEPS = 10_000
STEPS_AFTER = 6
LEAST_STEPS = 12
DEADLINE_S = 900.0
# Of a node that only plays episodes; what is on the first one fits nowhere else.
SMALL = {"num_cpus": 2, "memory": 8 << 30, "object_store_memory": 80 << 20}
LARGE = {"num_cpus": 8, "memory": 64 << 30, "object_store_memory": 80 << 20}
ALL_GPUS = [str(number) for number in range(8)]


@contextmanager
def three_nodes(small: Mapping[str, int] = SMALL, **more: int) -> Iterator[tuple[Any, list[Any]]]:
    """The cluster and its nodes after the first."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**LARGE, **more})
    try:
        yield cluster, [cluster.add_node(**{**small, **more}) for _ in range(2)]
    finally:
        cluster.shutdown()


class Launched:
    def __init__(self, address: str, tmp_path: Path, *more: str) -> None:
        self.tmp_path = tmp_path
        self.data = tmp_path / "data"
        self.output = tmp_path / "output"
        ports = ",".join(str(free_port()) for _ in range(5))
        entry = "import sys; from gspo_core.cli import main; sys.exit(main())"
        words = ["launch", "ray", "--address", address, "--data-dir", str(self.data), "--ports", ports, *more]
        with self.output.open("wb") as output:
            argv = [sys.executable, "-P", "-c", entry, *words]
            # From anywhere: what runs is what the command runs from.
            self.process = subprocess.Popen(argv, cwd=tmp_path, stdout=output, stderr=output)

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, self.told()
            assert self.process.poll() is None, self.told()
            time.sleep(0.2)

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def told(self) -> str:
        logs = {log.name: log.read_text(errors="replace")[-400:] for log in (self.data / "logs").glob("*.log")}
        return f"{self.said()[-3000:]}\n{logs}"

    def has_step(self, step: int) -> bool:
        return any(self.data.glob(f"jobs/*/batches/ep*-step{step:06d}"))

    def end_job(self, *, after: int) -> int:
        """The number of steps that the job has then."""
        (told,) = re.findall(r"^API: (\S+) \(key: (.+)\)$", self.said(), re.MULTILINE)
        with Client(told[0], api_key=Path(told[1]).read_text().strip()) as client:
            (job,) = client.jobs()
            steps = max(LEAST_STEPS, job["step"] + after)
            client.change(job["id"], {"steps": steps})
        return steps


def learning(tmp_path: Path, model_dir: Path) -> tuple[str, ...]:
    spec = yaml.safe_load((ROOT / "examples" / "demo" / "job.yaml").read_text())
    changes = {"model": str(model_dir), "steps": MANY_STEPS, "evaluation": None, "checkpoints": {"keep_batches": 1000}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(spec | changes))
    return "--model", str(model_dir), "--job", str(tmp_path / "job.yaml"), "--nodes", "3", "--engines", "1"


@needs_ray
@pytest.mark.slow
def test_a_job_learns_while_a_node_goes_with_its_worker_and_comes_back(tmp_path: Path, model_dir: Path) -> None:
    with three_nodes() as (cluster, small):
        launched = Launched(cluster.address, tmp_path, *learning(tmp_path, model_dir))
        launched.until(lambda: launched.has_step(2))
        before = set(pids_of("services.rollout", tmp_path))
        assert len(before) == 3
        cluster.remove_node(small[0], allow_graceful=False)
        launched.until(lambda: len(pids_of("services.rollout", tmp_path)) == 2)
        launched.until(lambda: "ended with code 255; restarting" in launched.said())
        cluster.add_node(**SMALL)
        launched.until(lambda: len(pids_of("services.rollout", tmp_path)) == 3)
        assert len(set(pids_of("services.rollout", tmp_path)) - before) == 1
        num_steps = launched.end_job(after=STEPS_AFTER)
        assert launched.process.wait(DEADLINE_S) == 0, launched.told()
        assert commands_of(tmp_path) == [], "something is left"
    (job,) = (launched.data / "jobs").iterdir()
    rows = [json.loads(line) for line in (job / "metrics.jsonl").read_text().splitlines()]
    means = [row["reward/mean"] for row in rows if "reward/mean" in row]
    assert len(means) == num_steps
    assert sum(means[-4:]) > sum(means[:4]), means
    assert "is killed" not in launched.said()


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("manner", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_however_the_command_ends(manner: signal.Signals, tmp_path: Path, model_dir: Path) -> None:
    with three_nodes() as (cluster, _):
        launched = Launched(cluster.address, tmp_path, "--model", str(model_dir), "--nodes", "3", "--engines", "1")
        launched.until(lambda: "API: " in launched.said())
        launched.process.send_signal(manner)
        assert launched.process.wait(DEADLINE_S) in (143, -signal.SIGKILL)
        deadline = time.monotonic() + DEADLINE_S
        while left := commands_of(tmp_path):
            assert time.monotonic() < deadline, left
            time.sleep(0.2)
        if manner is signal.SIGTERM:
            assert "redis left with code 0" in launched.said()


@needs_ray
@pytest.mark.slow
def test_each_process_has_the_gpus_of_the_plan_and_none_is_given_twice(tmp_path: Path, model_dir: Path) -> None:
    """Logical GPUs, which Ray gives out as it would real ones: nobody computes on them."""
    engine = f"{sys.executable} -m services.engine --model {{model}} --host {{host}} --port {{port}}"
    division = ("--gpus", "trainer:0/0-1", "engines:1/0-3", "engines:2/4-7", "--engines", "4")
    nodes = ("--nodes", "3", "--gpus-per-node", str(len(ALL_GPUS)), *division)
    # name: node, number of GPUs
    plan = {"trainer": (0, 2), **{f"engine-{index}": (1 + index // 2, 2) for index in range(4)}}
    plan |= {f"rollout-{node}": (node, 0) for node in range(3)}
    plan |= {name: (0, 0) for name in ("redis", "api", "gateway")}
    with three_nodes(LARGE, num_gpus=len(ALL_GPUS)) as (cluster, _):
        more = ("--model", str(model_dir), "--engine", engine, *nodes)
        launched = Launched(cluster.address, tmp_path, *more)
        launched.until(lambda: "API: " in launched.said() and seen(tmp_path).keys() == plan.keys())
        given = seen(tmp_path)
        assert {name: len(one.devices) for name, one in given.items()} == {
            name: number for name, (_, number) in plan.items()
        }
        for node in range(3):
            here = {name: given[name] for name, (where, _) in plan.items() if where == node}
            assert len({one.raylet for one in here.values()}) == 1, given
            devices = [device for one in here.values() for device in one.devices]
            assert len(devices) == len(set(devices)), f"a GPU is given twice: {given}"
            assert {*devices} <= {*ALL_GPUS}, given
        assert len({one.raylet for one in given.values()}) == 3, given
        launched.process.send_signal(signal.SIGTERM)
        assert launched.process.wait(DEADLINE_S) == 143, launched.told()
        assert "is killed" not in launched.said(), launched.told()
        assert commands_of(tmp_path) == [], "something is left"


class Given(NamedTuple):
    raylet: int
    """The process of Ray that all actors of a node come from."""
    devices: list[str]


def seen(tmp_path: Path) -> dict[str, Given]:
    """What each member was given, by the log that it writes to."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            actor = parent(entry)
            log = (entry / "fd" / "1").readlink()
            if log.parent == tmp_path / "data" / "logs" and "ray::Host" in command(actor):
                found[log.stem] = Given(int(parent(actor).name), devices_of(entry))
        except OSError:
            continue
    return found


def devices_of(entry: Path) -> list[str]:
    """All of the node's where nothing says which: so would CUDA."""
    variables = environment(entry)
    if "PATH" not in variables:  # Redis has its title there
        return []
    return [one for one in variables.get("CUDA_VISIBLE_DEVICES", ",".join(ALL_GPUS)).split(",") if one]


def parent(entry: Path) -> Path:
    return entry.parent / (entry / "stat").read_text().rpartition(")")[2].split()[1]


def test_its_plan_is_printed_without_ray(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--data-dir", str(tmp_path), "--model", "m", "--nodes", "2", "--gpus-per-node", "8"]
    assert main(["launch", "ray", *where, "--engines", "2", "--sglang", "--plan"]) == 0
    assert "node 1  engine-1         GPU 4,5,6,7" in capsys.readouterr().out
    assert main(["launch", "ray", *where, "--engines", "3", "--plan"]) == 1
    assert "cannot be divided evenly among 3 engines" in capsys.readouterr().err
    assert main(["launch", "ray", *where, "--vllm", "--plan"]) == 1
    assert "its own key does not guard them" in capsys.readouterr().err


def test_the_cluster_of_the_example_has_room_for_its_plan(capsys: pytest.CaptureFixture[str]) -> None:
    spec = yaml.safe_load((ROOT / "examples" / "kuberay" / "rayjob.yaml").read_text())["spec"]
    words = shlex.split(spec["entrypoint"])
    assert words.pop(0) == "gspo"
    assert main([*words, "--plan"]) == 0
    plan = capsys.readouterr().out
    assert "8 ranks" in plan
    assert plan.count("engine-") == 16
    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    parser = argparse.ArgumentParser()
    ray_launcher.add_options(parser)
    members = place(cluster_wanted(parser.parse_args(words[2:])), Site.BATCH)
    limits = container["resources"]["limits"]
    for node in range(group["replicas"]):
        own = [member for member in members if member.node == node]
        assert sum(member.cpus for member in own) <= int(limits["cpu"])
        assert sum(member.memory_mb for member in own) <= int(limits["memory"].removesuffix("Gi")) * 1024
        assert sum(len(member.devices) for member in own) == int(limits["nvidia.com/gpu"])
    assert spec["rayClusterSpec"]["rayVersion"] in (ROOT / "constraints.txt").read_text()
