"""Engines of a running job die, lie, join and are shared; what was trained stays true."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.demo.demo import NO_KEYS, demo_spec
from examples.demo.provenance import check_provenance
from gspo_core.client import Client
from services.files.batch_log import BatchLog
from services.files.job_dir import JobDir
from services.launch.stack import Stack, StackConfig
from services.launch.topology import TRAINER
from services.process.children import die_with_parent
from tests.e2e.test_learning import changed
from tests.services.engines.engine_kit import EngineProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

CHANGES: dict[str, Any] = {
    "evaluation": None,
    "groups_per_step": 4,
    "checkpoints": {"keep_versions": 1000},
    "sampling": {"temperature": 1.0, "max_new_tokens": 64},
}
LEASE_S = "3"


@contextlib.contextmanager
def engines(model_dir: Path, number: int) -> Iterator[list[EngineProcess]]:
    started: list[EngineProcess] = []
    try:
        for _ in range(number):
            started.append(EngineProcess(model_dir))
        yield started
    finally:
        for engine in started:
            engine.close()


def stack_on(tmp_path: Path, model_dir: Path, *urls: str) -> Stack:
    environment = {**NO_KEYS, "GSPO_LEASE_S": LEASE_S}
    return Stack(StackConfig(tmp_path, model_dir, port=0, environment=environment, engine_urls=urls))


def trained_by(job_dir: Path) -> dict[str, set[int]]:
    """Engine -> the steps whose batch holds tokens that it sampled."""
    found: dict[str, set[int]] = {}
    log = BatchLog(JobDir(job_dir))
    for epoch, step in log.steps():
        for group in log.read(epoch, step).groups:
            for trajectory in group:
                for segment in trajectory.segments:
                    if segment.num_actions:
                        found.setdefault(segment.engine_id, set()).add(step)
    return found


def assert_true_tokens(job_dir: Path) -> None:
    provenance = check_provenance(JobDir(job_dir), 150, seed=0)
    assert provenance.num_equal == provenance.num_tokens == 150


def test_an_engine_dies_and_another_joins_while_the_job_goes_on(model_dir: Path, tmp_path: Path) -> None:
    spec = changed(demo_spec(model_dir, 0), CHANGES | {"steps": 14})
    with engines(model_dir, 3) as (first, second, late), contextlib.ExitStack() as stack:
        local = stack.enter_context(stack_on(tmp_path, model_dir, first.url, second.url))
        client = stack.enter_context(Client(local.api_url))
        job = client.create_job(spec)["id"]
        for event in client.events(job):
            if event.type != "step":
                continue
            if event.data["step"] == 3:
                first.process.send_signal(signal.SIGKILL)
            if event.data["step"] == 5:
                argv = [sys.executable, "-m", "services.engine.announce", late.url]
                environment = {**os.environ, "GSPO_REDIS_URL": local.redis_url, "GSPO_LEASE_S": LEASE_S}
                announcing = subprocess.Popen(argv, env=environment, preexec_fn=die_with_parent())
                stack.callback(announcing.wait)
                stack.callback(announcing.terminate)
        record = client.job(job)
        assert record["status"] == "succeeded", record["status_reason"]
        assert record["attempt"] == 1
    steps = trained_by(tmp_path / "jobs" / job)
    assert steps.keys() == {first.url, second.url, late.url}
    assert max(steps[first.url]) < 14  # what it had sampled was trained, it samples no more
    assert max(steps[late.url]) == 14
    assert_true_tokens(tmp_path / "jobs" / job)


def test_two_jobs_on_two_engines_never_mix(model_dir: Path, tmp_path: Path) -> None:
    spec = changed(demo_spec(model_dir, 0), CHANGES | {"steps": 6})
    with engines(model_dir, 2) as (first, second), contextlib.ExitStack() as stack:
        local = stack.enter_context(stack_on(tmp_path, model_dir, first.url, second.url))
        local._spawn("trainer", [], {**local._environment(TRAINER), "OMP_NUM_THREADS": "1"}, name="trainer-1")
        client = stack.enter_context(Client(local.api_url))
        jobs = [client.create_job(changed(spec, {"seed": seed, "name": f"job {seed}"}))["id"] for seed in (1, 2)]
        for job in jobs:
            for _ in client.events(job):
                pass  # until it is over
        records = [client.job(job) for job in jobs]
        assert [record["status"] for record in records] == ["succeeded"] * 2, records
    for job in jobs:
        assert_true_tokens(tmp_path / "jobs" / job)
    used = [set(trained_by(tmp_path / "jobs" / job)) for job in jobs]
    assert all(used)
    assert used[0] | used[1] == {first.url, second.url}  # both engines worked: the jobs ran side by side


class Liar(http.server.ThreadingHTTPServer):
    """Stands before an engine and has it load other weights than it is told, from the third load on."""

    daemon_threads = True

    def __init__(self, engine_url: str, other_weights: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Forward)
        self.engine_url, self.other_weights = engine_url, other_weights
        self.num_loads = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Forward(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Liar

    def do_GET(self) -> None:
        self._forward(None)

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/update_weights_from_disk":
            self.server.num_loads += 1
            if self.server.num_loads >= 3:
                content = json.dumps(json.loads(content) | {"model_path": str(self.server.other_weights)}).encode()
        self._forward(content)

    def _forward(self, content: bytes | None) -> None:
        request = urllib.request.Request(self.server.engine_url + self.path, data=content, method=self.command)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                status, body = answer.status, answer.read()
        except urllib.error.HTTPError as refusal:
            status, body = refusal.code, refusal.read()
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_args: object) -> None:
        pass


def test_an_engine_with_other_weights_under_the_right_label_ends_the_job_with_the_reason(
    model_dir: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(model_dir, tmp_path / "other")
    torch.manual_seed(0)
    tensors = {name: one + 0.05 * torch.randn_like(one) for name, one in load_file(other / "model.safetensors").items()}
    save_file(tensors, other / "model.safetensors")
    spec = changed(demo_spec(model_dir, 0), CHANGES | {"steps": 12})
    with engines(model_dir, 1) as (engine,):
        liar = Liar(engine.url, other)
        threading.Thread(target=liar.serve_forever, daemon=True).start()
        with stack_on(tmp_path, model_dir, liar.url) as local, Client(local.api_url) as client:
            job = client.create_job(spec)["id"]
            steps = [event.data["step"] for event in client.events(job) if event.type == "step"]
            record = client.job(job)
        liar.shutdown()
        liar.server_close()
    assert record["status"] == "failed"
    assert record["status_reason"]["code"] == "engine_mismatch"
    assert "does not hold" in record["status_reason"]["message"]
    # versions 0 and 1 were loaded truly; version 2, published after step 2, is the first lie
    assert max(steps) <= 4
