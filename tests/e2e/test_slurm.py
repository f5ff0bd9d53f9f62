"""`gspo launch slurm` on a real Slurm of this machine (`make real-slurm`): allocation, steps and signals.

The script that it writes is read without one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from gspo_core.cli import main
from services.files.batch_log import read_batch
from services.launch import slurm_run
from services.launch.crew import TRIES
from services.process.ports import free_port
from tests.apparatus.processes import commands_of, environment, pids_of, processes_of
from tests.apparatus.real_slurm import Node, RealSlurm, is_installed, real_slurm

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
needs_slurm = pytest.mark.skipif(not is_installed(), reason="needs Slurm and root: make real-slurm")
STEPS = 12
OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
DEADLINE_S = 1200.0
PORTS = ("REDIS_PORT", "API_PORT", "GATEWAY_PORT", "ENGINE_PORT", "RANKS_PORT")


def script(tmp_path: Path, *more: str) -> Path:
    path = tmp_path / "gspo.sbatch"
    where = ["--project", str(ROOT), "--data-dir", str(tmp_path / "data with a blank"), "--output", str(path)]
    assert main(["launch", "slurm", *where, *more]) == 0
    return path


@pytest.mark.parametrize(
    "more",
    [
        ("--model", "/models/a model"),
        ("--model", "m", "--nodes", "4", "--gpus-per-node", "8", "--partition", "gpu", "--job", "job's.yaml"),
        ("--model", "m", "--nodes", "3", "--trainer-nodes", "2", "--trainer-ranks", "8", "--srun", "exclusive"),
        ("--model", "m", "--engine", "python3 -m sglang.launch_server --model-path {model} --port {port}"),
    ],
)
def test_the_script_is_clean(tmp_path: Path, more: tuple[str, ...]) -> None:
    path = script(tmp_path, *more)
    done = subprocess.run([BIN / "shellcheck", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert shlex.quote(f"--model={more[1]}") in path.read_text()


def test_the_allocation_is_what_its_processes_need(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--account", "a", "--qos", "q", "--constraint", "c", "--gpu-type", "h100", "--memory", "engine=64G")
    text = script(tmp_path, "--model", "m", "--nodes", "4", "--gpus-per-node", "8", *options).read_text()
    directives = dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", text, re.MULTILINE))
    # The node of most: eight ranks, or eight engines and a rollout worker.
    assert int(directives["cpus-per-task"]) == 8 + 4
    assert directives["mem"] == f"{8 * 64 * 1024 + 2048 + 1024}M"
    assert directives["gres"] == "gpu:h100:8"
    assert (directives["account"], directives["qos"], directives["constraint"]) == ("a", "q", "c")
    assert "node 3  engine-23        GPU 7" in capsys.readouterr().err


def test_its_plan_is_printed_and_no_script_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gspo.sbatch"
    more = ("--model", "m", "--nodes", "4", "--gpus-per-node", "8", "--output", str(path), "--plan")
    assert main(["launch", "slurm", "--data-dir", str(tmp_path), *more]) == 0
    told = capsys.readouterr().out
    assert "node 3  engine-23        GPU 7" in told
    assert "#SBATCH --gres=gpu:8" in told.splitlines()
    assert not path.exists()


def test_a_container_and_further_options_are_those_of_every_step(tmp_path: Path) -> None:
    given = ("--model", "/models/m", "--container", "image.sqsh", "--srun", "exclusive", "container-writable")
    words = shlex.split(script(tmp_path, *given).read_text().split("slurm_run ", 1)[1].replace("\\\n", ""))
    assert "--container=image.sqsh" in words
    parser = argparse.ArgumentParser()
    slurm_run.add_options(parser)
    parser.add_argument("--ports")
    options = slurm_run._further(parser.parse_args(words))
    seen = {"/models", os.getcwd(), str(tmp_path / "data with a blank"), sys.prefix}
    mounts = ",".join(f"{path}:{path}" for path in sorted(seen))
    assert options == [
        "--exclusive", "--container-writable", "--container-image=image.sqsh", f"--container-mounts={mounts}",
    ]  # fmt: skip


def test_it_runs_what_the_command_runs_from_wherever_that_is_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an installation there is no checkout to name, and nothing of ours on the path."""
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "gspo.sbatch"
    assert main(["launch", "slurm", "--data-dir", "d", "--model", "m", "--output", str(path)]) == 0
    text = path.read_text()
    assert shlex.join([f"--model={tmp_path / 'm'}"]) in text
    start, words = text.split("services.launch.slurm_run ")
    assert shlex.quote(sys.executable) in start.splitlines()[-1]
    path.write_text(f"{start}services.launch.slurm_run --help")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(["bash", str(path)], cwd="/", env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(re.findall(r"^  (--[a-z-]+)", words, re.MULTILINE)) <= set(re.findall(r"--[a-z-]+", done.stdout))


def test_a_checkout_is_run_by_its_own_python_unless_another_is_named(tmp_path: Path) -> None:
    assert f"exec {ROOT}/.venv/bin/python -P" in script(tmp_path, "--model", "m").read_text()
    assert "exec /opt/python -P" in script(tmp_path, "--model", "m", "--python", "/opt/python").read_text()


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--nodes", "2", "--trainer-nodes", "3"), "--trainer-nodes 3"),
        (("--gpus-per-node", "1"), "would share GPU 0/0"),
        (("--cpus-per-task", "2"), "need 6 cores"),
        (("--mem", "4G"), "need 20480 MB"),
        (("--cpus", "engines=3"), "KIND one of"),
        (("--gpus-per-node", "8", "--engines", "2"), "the embedded engine computes on one"),
        (("--vllm",), "its own key does not guard them"),
        (("--nodes", "0"), "--nodes 0"),
        (("--gpus-per-node", "-1"), "--gpus-per-node -1"),
        (("--cpus", "engine=0"), "a process needs some"),
        (("--memory", "engine=0G"), "a process needs some"),
        (("--qos", "a\nb"), "--qos 'a\\nb' is not one word"),
        (("--container", ""), "--container '' is not one word"),
        (("--srun=--exclusive",), "given without --, such as exclusive"),
        (("--data-dir", "/d/50%j"), "has a %, which srun replaces"),
        (("--data-dir", "/d/a\\b"), "which srun replaces"),
        (("--data-dir", "/d/\udcff"), "has bytes that are no UTF-8"),
    ],
)
def test_what_cannot_be_allocated_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], told: str
) -> None:
    where = ["--data-dir", str(tmp_path), "--model", "m"]
    assert main(["launch", "slurm", *where, *more]) == 1
    assert told in capsys.readouterr().err


def test_a_script_names_its_job_by_a_key_of_its_own(tmp_path: Path) -> None:
    texts = [script(tmp_path, "--model", "m", "--job", "j").read_text() for _ in range(2)]
    keys = [re.search(r"--key=(slurm-\w+)", text) for text in texts]
    assert len({found[1] for found in keys if found}) == 2
    assert "--key=mine" in script(tmp_path, "--model", "m", "--job", "j", "--key", "mine").read_text()


def test_a_value_may_begin_with_a_dash(tmp_path: Path) -> None:
    text = script(tmp_path, "--model=-x", "--job", "j", "--key=-abc").read_text()
    parser = argparse.ArgumentParser()
    slurm_run.add_options(parser)
    parser.add_argument("--ports")
    read = parser.parse_args(shlex.split(text.split("slurm_run ", 1)[1].replace("\\\n", "")))
    assert (read.model, read.key) == ("-x", "-abc")


# --- on a real Slurm


@dataclass
class Run:
    """A submitted script, and what becomes of it."""

    slurm: RealSlurm
    id: str
    output: Path
    data: Path

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, self.told()
            assert self.slurm.state(self.id) not in OVER, self.told()
            time.sleep(0.2)

    def until_over(self) -> str:
        deadline = time.monotonic() + DEADLINE_S
        while (state := self.slurm.state(self.id)) not in OVER:
            assert time.monotonic() < deadline, self.told()
            time.sleep(0.2)
        return state

    def said(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def told(self) -> str:
        logs = {log.name: log.read_text(errors="replace")[-400:] for log in (self.data / "logs").glob("*.log")}
        return f"{self.said()[-3000:]}\n{logs}"

    def has_step(self, step: int) -> bool:
        return any(self.data.glob(f"jobs/*/batches/ep*-step{step:06d}"))

    def log(self, name: str) -> str:
        return (self.data / "logs" / f"{name}.log").read_text(errors="replace")


class Case:
    def __init__(self, slurm: RealSlurm, tmp_path: Path) -> None:
        self.slurm = slurm
        self.tmp_path = tmp_path
        self.ports = dict(zip(PORTS, map(str, sorted({free_port() for _ in range(9)})[:5]), strict=True))
        self.number = 0

    def submit(self, path: Path, *options: str) -> Run:
        self.number += 1
        output = self.tmp_path / f"output-{self.number}"
        number = self.slurm.submit(path, output, *options, settings=self.ports)
        return Run(self.slurm, number, output, self.tmp_path / "data with a blank")


@contextmanager
def on_slurm(tmp_path: Path, nodes: Sequence[Node] = (Node(),)) -> Iterator[Case]:
    folder = tmp_path / "slurm"
    folder.mkdir()
    with real_slurm(folder, nodes) as slurm:
        yield Case(slurm, tmp_path)
    assert commands_of(tmp_path) == []


def learning(tmp_path: Path, model_dir: Path, *more: str) -> Path:
    spec = yaml.safe_load((ROOT / "examples" / "demo" / "job.yaml").read_text())
    changes = {"model": str(model_dir), "steps": STEPS, "evaluation": None, "checkpoints": {"keep_batches": 1000}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(spec | changes))
    return script(tmp_path, "--model", str(model_dir), "--job", str(tmp_path / "job.yaml"), *more)


def assert_one_whole_job(data: Path) -> None:
    (job,) = (data / "jobs").iterdir()
    logged = [path.name.partition("-")[2] for path in (job / "batches").glob("ep*")]
    assert sorted(logged) == [f"step{step:06d}" for step in range(1, STEPS + 1)], "each step once"
    rows = [json.loads(line) for line in (job / "metrics.jsonl").read_text().splitlines()]
    rewards = {row["step"]: row["reward/mean"] for row in rows if "reward/mean" in row}
    means = [rewards[step] for step in sorted(rewards)]
    assert sum(means[-4:]) > sum(means[:4]), means
    batches = [read_batch(path) for path in (job / "batches").glob("ep*")]
    assert {one.attempt for batch in batches for group in batch.groups for one in group.trajectories} == {0}


@needs_slurm
@pytest.mark.slow
def test_told_to_leave_at_step_7_every_process_leaves_in_order_and_the_job_goes_on(
    tmp_path: Path, model_dir: Path
) -> None:
    path = learning(tmp_path, model_dir, "--rollout-workers", "2")
    with on_slurm(tmp_path) as case:
        first = case.submit(path)
        first.until(lambda: first.has_step(7))
        case.slurm.run("scancel", "--batch", "--signal=TERM", first.id)
        assert first.until_over() == "FAILED"  # 143
        left = re.findall(r"^\S+  (\S+) left with code (\d+)$", first.said(), re.MULTILINE)
        assert left[0][0] == "gateway"
        assert {name for name, _ in left[1:3]} == {"rollout-0", "rollout-1"}
        assert [name for name, _ in left[3:]] == ["trainer", "api", "engine", "redis"]
        assert {code for _, code in left} == {"0"}, first.told()
        for name in ("gateway", "rollout-0", "rollout-1", "trainer", "api", "engine"):
            assert "SIGTERM" in first.log(name), f"{name} does not say that it was asked"
        assert "now ready to exit" in first.log("redis")
        for _ in range(2):  # what is over is over: once more changes nothing
            again = case.submit(path)
            assert again.until_over() == "COMPLETED", again.told()
        assert_one_whole_job(first.data)


@needs_slurm
@pytest.mark.slow
def test_preempted_and_with_an_engine_killed_it_goes_on_with_the_same_job(tmp_path: Path, model_dir: Path) -> None:
    path = learning(tmp_path, model_dir)
    blocker = tmp_path / "blocker.sbatch"
    blocker.write_text("#!/bin/bash\nsleep 5\n")
    with on_slurm(tmp_path) as case:
        low = case.submit(path)
        low.until(lambda: low.has_step(3))
        high = case.submit(blocker, "--partition=high", "--exclusive")
        assert high.until_over() == "COMPLETED"
        low.until(lambda: low.has_step(6))
        assert case.slurm.described("job", low.id)[0]["Restarts"] == "1"
        (engine,) = pids_of("services.engine", tmp_path)
        os.kill(engine, signal.SIGKILL)
        low.until(lambda: "engine is running again" in low.said())
        low.until(lambda: pids_of("services.engine", tmp_path) not in ([], [engine]))
        assert low.until_over() == "COMPLETED", low.told()
        assert_one_whole_job(low.data)


OF_NO_NODE = {
    ("constraint", "nobody"): "Invalid feature specification",
    ("gpu-type", "b200"): "Requested node configuration is not available",
    ("reservation", "theirs"): "Requested reservation is invalid",
    ("partition", "nobody"): "Invalid partition name",
}


@needs_slurm
@pytest.mark.slow
def test_each_process_has_the_devices_cores_and_memory_of_the_plan(tmp_path: Path, model_dir: Path) -> None:
    """Four nodes of eight GPUs, which are other names of /dev/null: Slurm gives them out as it would real ones.

    Two nodes before them have what else is asked for only in part, and a reservation holds them all.
    """
    engine = f"{sys.executable} -m services.engine --model {{model}} --host {{host}} --port {{port}}"
    division = ("--gpus", "trainer:0/0-1", "engines:2/0-3", "engines:3/4-7", "--engines", "4")
    more = ("--nodes", "4", "--gpus-per-node", "8", *division, "--cpus", "engine=3", "--memory", "engine=5000M")
    asked = {"constraint": "nvlink", "gpu-type": "h100", "reservation": "ours", "partition": "high"}
    options = ("--model", str(model_dir), "--engine", engine, "--account", "team", *more)
    # name: node, GPUs, cores, megabytes
    plan = {f"engine-{index}": ("n4" if index < 2 else "n5", 2, 6, 10_000) for index in range(4)}
    plan |= {f"rollout-{index}": (f"n{2 + index}", 0, 1, 2048) for index in range(4)}
    plan |= {"trainer": ("n2", 2, 2, 2 * 8192), "redis": ("n2", 0, 1, 2048)}
    plan |= {"api": ("n2", 0, 1, 1024), "gateway": ("n2", 0, 1, 2048)}
    nodes = (Node(8, "h100", "old"), Node(8, "a100", "nvlink"), *[Node(8, "h100", "nvlink")] * 4)
    with on_slurm(tmp_path, nodes) as case:
        window = ("StartTime=now", "Duration=60", "Users=root", "Nodes=ALL")
        case.slurm.run("scontrol", "create", "reservation", f"ReservationName={asked['reservation']}", *window)
        for other, told in OF_NO_NODE.items():
            assert told in case.slurm.refusal(script(tmp_path, *options, *words_of(asked | dict((other,))))), other
        run = case.submit(script(tmp_path, *options, *words_of(asked)))
        run.until(lambda: "API: " in run.said() and len(steps_of(run)) == len(plan))
        assert steps_of(run) == plan
        (job,) = case.slurm.described("job", run.id)
        assert (job["Features"], job["TresPerNode"]) == ("nvlink", "gres:gpu:h100:8")
        assert (job["Reservation"], job["Partition"], job["Account"]) == ("ours", "high", "team")
        given = {one: visible(one, tmp_path) for one in plan if one.startswith(("engine", "trainer"))}
        assert {len(devices) for devices in given.values()} == {2}
        for node in ("n4", "n5"):
            on_node = [device for one, devices in given.items() if plan[one][0] == node for device in devices]
            assert len(on_node) == len(set(on_node)) == 4, "a device is given twice"
        case.slurm.run("scancel", "--batch", "--signal=TERM", run.id)
        run.until_over()
        assert "is killed" not in run.said(), run.told()


def words_of(options: Mapping[str, str]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", value)]


def steps_of(run: Run) -> dict[str, tuple[str, int, int, int]]:
    found = {}
    for step in run.slurm.described("steps"):
        resources = dict(part.split("=") for part in step.get("TRES", "").split(",") if "=" in part)
        if step["StepId"].startswith(f"{run.id}.") and "cpu" in resources:
            gpus = int(step.get("TresPerNode", "gres:gpu:0").rpartition(":")[2])
            found[step["Name"]] = step["NodeList"], gpus, int(resources["cpu"]), megabytes(resources["mem"])
    return found


def megabytes(text: str) -> int:
    return int(float(text[:-1]) * {"M": 1, "G": 1024}[text[-1]])


def visible(name: str, tmp_path: Path) -> list[str]:
    """What the processes of a step see, by the log that they write to."""
    found = set()
    for entry in processes_of(tmp_path):
        variables = environment(entry)
        if variables.get("SLURM_STEP_ID") and variables.get("CUDA_VISIBLE_DEVICES") and step_name(variables) == name:
            found.add(variables["CUDA_VISIBLE_DEVICES"])
    assert len(found) == 1, (name, found)
    return found.pop().split(",")


def step_name(variables: dict[str, str]) -> str:
    return variables.get("SLURM_JOB_NAME", "")


@needs_slurm
@pytest.mark.slow
def test_an_engine_that_cannot_start_ends_the_allocation_with_the_reason(tmp_path: Path, model_dir: Path) -> None:
    path = script(tmp_path, "--model", str(model_dir), "--engine", "bash -c 'echo no such device; exit 3'")
    with on_slurm(tmp_path) as case:
        run = case.submit(path)
        assert run.until_over() == "FAILED"
        assert "engine cannot start: it ended 3 times in a row, with code 3" in run.said()
        waited = re.findall(r"engine ended with code 3.*; restarting it in (\d+) s", run.said())
        assert waited[: TRIES - 1] == ["1", "2"], "what is left of the 30 s in which this is to be told"
        assert "no such device" in run.said()
        assert "redis left with code 0" in run.said()
