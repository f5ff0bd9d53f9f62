"""What the tests of the API share: an application in this process, and one in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from gspo_core.outbound import Network
from services.api.app import create_app
from services.api.http.context import Backend
from services.files.data_dir import EnvironmentsDir, HubDir
from services.files.environments.registry import EnvironmentRegistry
from services.files.job_dir import JobsDir
from services.process.children import die_with_parent
from services.state.queue import Bus
from services.state.store import Store
from tests.apparatus.warm_python import Child
from tests.patience import HANG_S

SPEC: dict[str, Any] = {"model": "m", "environments": [{"ref": "environments.calculator:Calculator"}]}
GUESS = '''
class Guess:
    """Guess the number."""
    tasks = [{"number": 3}, {"number": 5}]
    replayable = True
    reward_range = (0.0, 1.0)

    def reset(self, number: int) -> str:
        self.number, self.right = number, False
        return "Which number?"

    def guess(self, value: int) -> str:
        """Guess.

        Args:
            value: the number
        """
        self.right = value == self.number
        return "right" if self.right else "wrong"

    def get_reward(self) -> float:
        return float(self.right)

    @staticmethod
    def oracle(number):
        return [("guess", {"value": number})]
'''
JSON = {"Content-Type": "application/json"}
DEADLINE_S = HANG_S
NOWHERE = Path("/nonexistent/jobs")


@contextlib.asynccontextmanager
async def application(
    store: Store,
    *,
    jobs_dir: Path = NOWHERE,
    networks: Sequence[Network] = (),
    may_upload: bool = False,
    **options: Any,
) -> AsyncIterator[FastAPI]:
    """An application on the given store, started."""
    registry = EnvironmentRegistry(EnvironmentsDir(jobs_dir.parent / "environments"))
    redis = store._functions.redis
    backend = Backend(
        store,
        Bus(redis),
        JobsDir(jobs_dir),
        redis,
        registry=registry,
        networks=tuple(networks),
        may_upload=may_upload,
        hub=HubDir(jobs_dir.parent / "hub"),
    )
    app = create_app(lambda: contextlib.nullcontext(backend), **options)
    async with app.router.lifespan_context(app):
        yield app


@contextlib.asynccontextmanager
async def http_to(app: FastAPI, *, host: str = "127.0.0.1", key: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}", headers=headers) as http:
        yield http


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error of an answer, once its shape is known to be the one shape."""
    body = answer.json()
    assert list(body) == ["error"], body
    error: dict[str, Any] = body["error"]
    assert {"type", "code", "message", "param", "request_id", "retry_after_s"} <= error.keys()
    assert error["request_id"] == answer.headers["x-request-id"]
    assert error["request_id"].startswith("req_")
    return error


class ApiProcess:
    """`python -m services.api` on a free port of this machine, with the imports of this session done already."""

    def __init__(self, redis_url: str, *arguments: str, python: str | None = None, **settings: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GSPO_")}
        self._data = tempfile.TemporaryDirectory()
        environment |= {"GSPO_REDIS_URL": redis_url, "GSPO_API_PORT": "0", "GSPO_LOG_FORMAT": "json"}
        environment |= {"GSPO_DATA_DIR": self._data.name} | settings
        # A file, since a pipe that nobody reads would stop the process in the middle.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 closed at the end of the process
        self.process = Child(
            ["-W", "error", "-m", "services.api", *arguments],
            python=python,
            env=environment,
            stderr=self._log,
            stdout=subprocess.DEVNULL,
            preexec_fn=die_with_parent(),
        )

    def __enter__(self) -> ApiProcess:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._log.close()
        self._data.cleanup()

    def forget_jobs(self) -> None:
        """For tests that share a process: what was written down would be given back to the emptied server."""
        shutil.rmtree(self.jobs_dir, ignore_errors=True)

    @property
    def data_dir(self) -> str:
        """For another one beside it: of two directories, the one that a Redis was not given to ends its process."""
        return self._data.name

    @property
    def jobs_dir(self) -> Path:
        return Path(self._data.name) / "jobs"

    @property
    def url(self) -> str:
        """Where it listens, as soon as it does."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline and self.process.poll() is None:
            for line in self.log():
                if '"listening"' in line:
                    return str(json.loads(line)["url"])
            time.sleep(0.02)
        raise AssertionError("the API does not listen:\n" + "\n".join(self.log()))

    def log(self) -> list[str]:
        """The whole lines that it has logged so far."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode().split("\n")[:-1]

    def end(self) -> tuple[int, list[str]]:
        """The status with which it ends by itself, and its log."""
        return self.process.wait(DEADLINE_S), self.log()


def parse_frames(lines: Sequence[str]) -> list[dict[str, str]]:
    """Server-sent events by an independent reading: blocks of `name: value` between empty lines."""
    blocks = "\n".join(lines).split("\n\n")
    frames = []
    for block in blocks:
        pairs = [line.split(": ", 1) for line in block.splitlines() if line and not line.startswith(":")]
        frames.append({name: value for name, value in pairs})
    return [one for one in frames if one]
