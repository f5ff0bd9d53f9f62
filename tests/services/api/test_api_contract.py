"""The OpenAPI document is a promise: schemathesis (in a venv of its own) tries every operation against it."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from services.files.data_dir import EnvironmentsDir
from services.files.environments.registry import EnvironmentRegistry
from services.hosts.local import LocalHosts
from services.hosts.sites import Sites
from services.hosts.venv import Interpreters
from services.process.cancelling import cancel_all
from services.rollout.request_runner import RequestRunner
from services.state.process_requests import WorkerRequests
from services.state.queue import Bus
from services.state.server import RedisServer
from services.state.store import Store
from tests.services.api.api_kit import ApiProcess
from tests.services.api.recorded_job import record_job, write_model

PROGRAM = Path(
    os.environ.get(
        "GSPO_TEST_SCHEMATHESIS", Path(__file__).parents[3] / ".make" / "schemathesis" / "bin" / "schemathesis"
    )
)
KEY = "a-key-for-the-contract"
EXAMPLES = os.environ.get("GSPO_TEST_EXAMPLES", "60")

pytestmark = [
    pytest.mark.third_party,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PROGRAM.exists(), reason="schemathesis is not installed: make test-contract"),
]


@pytest.mark.parametrize("key", [None, KEY], ids=["without a key", "with a key"])
async def test_no_server_error_and_no_undocumented_answer(
    redis_server: RedisServer, store: Store, bus: Bus, tmp_path: Path, key: str | None
):
    with ApiProcess(redis_server.url, **({"GSPO_API_KEYS": KEY} if key else {})) as api:
        # What is asked of rollout workers is answered: without one it is 503, truly.
        sites = Sites(EnvironmentRegistry(EnvironmentsDir(api.jobs_dir.parent / "environments")))
        runner = RequestRunner(
            WorkerRequests(bus._redis), sites, LocalHosts(Interpreters(tmp_path / "venvs")), "worker-0"
        )
        running = asyncio.create_task(runner.run())
        job = await record_job(store, bus, api.jobs_dir, write_model(tmp_path / "model"), num_steps=2)
        report = tmp_path / "report.txt"
        # Streams have no end; the job is real, so that what is behind it is reached too.
        config = tmp_path / "schemathesis.toml"
        config.write_text(
            f'[parameters]\n"path.id" = "{job.id}"\n"path.job" = "{job.id}"\n"header.accept" = "application/json"\n'
        )
        with report.open("wb") as output:
            done = await asyncio.to_thread(
                subprocess.run,
                [
                    *(PROGRAM, "--config-file", config, "run", f"{api.url}/openapi.json"),
                    *("--checks", "not_a_server_error,status_code_conformance,content_type_conformance"),
                    *("--max-examples", EXAMPLES, "--seed", "1", "--no-color", "--request-timeout", "20"),
                    *(("--header", f"Authorization: Bearer {key}") if key else ()),
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=800,
                check=False,
            )
        await cancel_all([running])
        assert done.returncode == 0, report.read_text()[-6000:]
        assert not [line for line in api.log() if "request failed" in line]
