"""The batch script of `gspo launch slurm`: clean, and with a stand-in for srun the stack that it starts trains."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from gspo_core.cli import main
from services.files.batch_log import read_batch

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
# Everything runs here, as the process that Slurm would start elsewhere.
SRUN = """#!/bin/bash
output=/dev/null
while [[ ${1:-} == --* ]]; do
  [[ $1 == --output=* ]] && output=${1#--output=}
  shift
done
exec "$@" >> "$output" 2>&1
"""
SCONTROL = "#!/bin/bash\necho 127.0.0.1\n"
STEPS = 12


def script(tmp_path: Path, *more: str) -> Path:
    path = tmp_path / "gspo.sbatch"
    arguments = [
        "--project",
        str(ROOT),
        "--data-dir",
        str(tmp_path / "data with a blank"),
        "--output",
        str(path),
        *more,
    ]
    assert main(["launch", "slurm", *arguments]) == 0
    return path


@pytest.mark.parametrize(
    "more",
    [
        ("--model", "/models/a model"),
        ("--model", "m", "--nodes", "4", "--gpus-per-node", "8", "--partition", "gpu", "--job", "job's.yaml"),
        ("--model", "m", "--nodes", "3", "--trainer-nodes", "2", "--trainer-ranks", "8"),
        ("--model", "m", "--engine", "python3 -m sglang.launch_server --model-path {model} --port {port}"),
    ],
)
def test_the_script_is_clean(tmp_path: Path, more: tuple[str, ...]) -> None:
    path = script(tmp_path, *more)
    done = subprocess.run([BIN / "shellcheck", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert shlex.quote(more[1]) in path.read_text()


def test_a_trainer_on_more_nodes_than_there_are_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError):
        script(tmp_path, "--model", "m", "--nodes", "2", "--trainer-nodes", "3")
    assert "--trainer-nodes 3" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_stack_that_it_starts_trains_a_job_and_leaves_nothing(
    tmp_path: Path, model_dir: Path, num_ranks: int
) -> None:
    spec = yaml.safe_load((ROOT / "examples" / "demo" / "job.yaml").read_text())
    changes = {"model": str(model_dir), "steps": STEPS, "evaluation": {"tasks": 64, "every": STEPS}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(spec | changes))
    ranks = "--trainer-ranks", str(num_ranks)
    path = script(tmp_path, "--model", str(model_dir), "--job", str(tmp_path / "job.yaml"), *ranks)
    done = run(path, tmp_path)
    output, _ = done.communicate(timeout=900)
    logs = {log.name: log.read_text()[-500:] for log in (tmp_path / "data with a blank" / "logs").iterdir()}
    assert done.returncode == 0, (output, logs)
    (job,) = (tmp_path / "data with a blank" / "jobs").iterdir()
    rows = [json.loads(line) for line in (job / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "reward/mean" in row]  # the others are evaluations
    assert sorted(row["step"] for row in rows) == list(range(1, STEPS + 1))
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[-4:]) > sum(rewards[:4]), rewards
    assert processes_of(tmp_path) == []


def test_a_script_names_its_job_by_a_key_of_its_own(tmp_path: Path) -> None:
    keys = [
        line
        for _ in range(2)
        for line in script(tmp_path, "--model", "m").read_text().splitlines()
        if "KEY=slurm-" in line
    ]
    assert len(set(keys)) == 2
    assert 'submit "$JOB" --key "$KEY"' in script(tmp_path, "--model", "m").read_text()


@pytest.mark.slow
def test_ended_in_the_middle_and_submitted_again_it_goes_on_with_the_same_job(tmp_path: Path, model_dir: Path) -> None:
    spec = yaml.safe_load((ROOT / "examples" / "demo" / "job.yaml").read_text())
    changes = {"model": str(model_dir), "steps": STEPS, "evaluation": None, "checkpoints": {"keep_batches": 1000}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(spec | changes))
    workers = "--rollout-workers", "2"
    path = script(tmp_path, "--model", str(model_dir), "--job", str(tmp_path / "job.yaml"), *workers)
    first = run(path, tmp_path)
    deadline = time.monotonic() + 600
    while not (found := list((tmp_path / "data with a blank" / "jobs").glob("*/batches/ep*-step000003"))):
        assert time.monotonic() < deadline
        assert first.poll() is None, first.stdout and first.stdout.read()
        time.sleep(0.2)
    first.send_signal(signal.SIGTERM)
    output, _ = first.communicate(timeout=180)
    assert first.returncode == 143, output
    assert processes_of(tmp_path) == []
    for _ in range(2):  # what is over is over: once more changes nothing
        again = run(path, tmp_path)
        output, _ = again.communicate(timeout=900)
        assert again.returncode == 0, output
    (job,) = (tmp_path / "data with a blank" / "jobs").iterdir()
    assert job == found[0].parents[1]
    logged = [path.name.partition("-")[2] for path in (job / "batches").glob("ep*")]
    assert len(logged) == len(set(logged))  # no step was taken twice
    batches = [read_batch(path) for path in (job / "batches").glob("ep*")]
    assert {one.attempt for batch in batches for group in batch.groups for one in group.trajectories} == {0}


@pytest.mark.slow
def test_who_is_told_to_leave_leaves_nothing(tmp_path: Path, model_dir: Path) -> None:
    done = run(script(tmp_path, "--model", str(model_dir)), tmp_path)
    deadline = time.monotonic() + 120
    assert done.stdout is not None
    for line in done.stdout:
        assert time.monotonic() < deadline
        if line.startswith("API: "):
            break
    done.send_signal(signal.SIGTERM)
    done.communicate(timeout=120)
    assert done.returncode == 143
    assert processes_of(tmp_path) == []


def run(path: Path, tmp_path: Path) -> subprocess.Popen[str]:
    fakes = tmp_path / "bin"
    fakes.mkdir(exist_ok=True)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (fakes / name).write_text(text)
        (fakes / name).chmod(0o755)
    kept = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
    ports = dict(zip(("REDIS_PORT", "API_PORT", "ENGINE_PORT", "RANKS_PORT"), map(str, free_ports(4)), strict=True))
    environment = {"PATH": f"{fakes}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        ["bash", path], env=kept | ports | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def processes_of(tmp_path: Path) -> list[str]:
    """Those whose environment or command names the directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                text = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(tmp_path).encode() in text:
                found.append((entry / "cmdline").read_text().replace("\0", " "))
    return found
