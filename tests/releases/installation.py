"""The processes of one release over one directory: engine, API, trainer, rollout worker and a Redis server.

Every path is relative to that directory, so an installation can be packed here and unpacked elsewhere. The code of a
release is a tree of its own (``PYTHONPATH``); only the Redis server is started by the present one. The present tree may
have an interpreter of its own, that has imported it already.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from services.process.ports import free_port
from services.state.server import RedisServer
from tests.chaos.jobs import job_spec
from tests.patience import HANG_S

PRESENT = Path(__file__).parents[2]
LEASE_S = "2"
DEADLINE_S = HANG_S
ENGINE, API, TRAINER, WORKER = "engine", "api", "trainer", "rollout"
COMMANDS: dict[str, tuple[str, ...]] = {
    ENGINE: ("-m", "tests.chaos.engine"),
    API: ("-m", "services.api"),
    TRAINER: ("-m", "services.trainer"),
    WORKER: ("-m", "services.rollout"),
}
# Releases up to 0.2.0 have no other way to start theirs.
ENGINE_OF_A_RELEASE = ("-c", "from tests.chaos.engine import main; raise SystemExit(main())")


class Installation:
    """``start`` what is wanted, of any tree; ``kill`` ends one or all of it with SIGKILL."""

    def __init__(self, work: Path, python: str = sys.executable) -> None:
        self.work, self._python = work, python
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._engine_port, self._api_port = free_port(), free_port()
        self._redis: RedisServer | None = None
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{self._api_port}", timeout=10.0)

    @property
    def redis_url(self) -> str:
        assert self._redis is not None
        return self._redis.url

    def start_redis(self) -> None:
        self._redis = RedisServer.spawn(self.work / "redis")

    def start(self, *names: str, tree: Path = PRESENT) -> None:
        for name in names:
            with (self.work / f"{name}.log").open("ab") as log:
                self._processes[name] = subprocess.Popen(
                    [*self._command(name, tree), *self._arguments(name)],
                    cwd=self.work,
                    env=self._environment(tree),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
        if API in names:
            self.wait_for("the API", self._answers)

    def _command(self, name: str, tree: Path) -> tuple[str, ...]:
        if tree == PRESENT:
            return (self._python, *COMMANDS[name])
        return (sys.executable, *(ENGINE_OF_A_RELEASE if name == ENGINE else COMMANDS[name]))

    def _arguments(self, name: str) -> list[str]:
        if name == ENGINE:
            return ["--model", "model", "--port", str(self._engine_port)]
        return ["--max-episodes", "8", "--drain-s", "2"] if name == WORKER else []

    def _environment(self, tree: Path) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GSPO_")}
        return kept | {
            "PYTHONPATH": str(tree),
            "OMP_NUM_THREADS": "1",
            "GSPO_DATA_DIR": "data",
            "GSPO_REDIS_URL": self.redis_url,
            "GSPO_ENGINE_URLS": f"http://127.0.0.1:{self._engine_port}",
            "GSPO_LEASE_S": LEASE_S,
            "GSPO_API_HOST": "127.0.0.1",
            "GSPO_API_PORT": str(self._api_port),
            "GSPO_API_KEYS": "",
        }

    def _answers(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return self._http.get("/readyz").status_code == 200
        return False

    def submit(self, number: int, steps: int) -> str:
        spec = job_spec(number, Path(), steps, seed=0, worlds=["Replayed"])
        spec |= {"model": "model", "environments": [{"ref": "world.py:Sums"}]}
        spec.pop("learner", None)
        return self.post(spec)

    def post(self, body: dict[str, Any] | None, path: str = "/v1/jobs") -> str:
        answer = self._http.post(path, json=body)
        answer.raise_for_status()
        return str(answer.json()["id"])

    def job(self, job: str) -> dict[str, Any]:
        answer = self._http.get(f"/v1/jobs/{job}")
        answer.raise_for_status()
        record: dict[str, Any] = answer.json()
        return record

    def wait_for(self, what: str, is_so: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
        """Raises AssertionError with the logs of what has ended."""
        deadline = time.monotonic() + deadline_s
        while not is_so():
            ended = {name: one.poll() for name, one in self._processes.items() if one.poll() is not None}
            late = time.monotonic() > deadline
            if ended or late:
                raise AssertionError(f"{what}: ended {ended}, late {late}\n{self.logs()}")
            time.sleep(0.05)

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def status(self, name: str) -> int:
        """The exit status of a process that is expected to end."""
        return self._processes.pop(name).wait(DEADLINE_S)

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.work.glob("*.log")))

    def kill(self, *names: str) -> None:
        """Without names: everything, the Redis server last."""
        for name in names or list(self._processes):
            process = self._processes.pop(name)
            process.kill()
            process.wait()
        if not names and self._redis is not None:
            assert self._redis.pid is not None
            os.kill(self._redis.pid, signal.SIGKILL)
            self._redis.close()
            self._redis = None

    def close(self) -> None:
        self.kill()
        self._http.close()


@contextlib.contextmanager
def installed(work: Path, python: str = sys.executable) -> Iterator[Installation]:
    installation = Installation(work, python)
    installation.start_redis()
    try:
        yield installation
    finally:
        installation.close()


def extract_tree(revision: str, directory: Path) -> Path:
    """The tree of ``revision``. Raises CalledProcessError where git does not have it."""
    archive = subprocess.run(["git", "archive", revision], cwd=PRESENT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(directory, filter="data")
    return directory
