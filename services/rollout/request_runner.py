"""What the API asks of this worker: to examine an environment, to show its tools and tasks, to play one episode of it.

Rule: each request runs in a process apart, with bounded memory and time and nothing of ours in its environment;
whatever becomes of it there is an answer. An examination of a registered version is written down before it is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from typing import Any

from gspo_core.env import InvalidEnvironment
from services.hosts.registry import EnvironmentNotFound
from services.hosts.server import HostOrder, child_variables
from services.hosts.sites import Sites
from services.hosts.venv import Interpreters
from services.process.children import die_with_parent
from services.process.telemetry import get_logger
from services.state.away import Away, RedisFault
from services.state.worker_requests import WorkerRequest, WorkerRequests

# An examination plays some dozens of episodes.
MAX_SECONDS = 120.0
PHASE_TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 8 << 20
MAX_TOGETHER = 2
AWAY_S = 1.0
REFUSED_S = 60.0
MEMORY_BYTES = 2 << 30
FILE_BYTES = 64 << 20


class RequestRunner:
    def __init__(
        self, worker_requests: WorkerRequests, sites: Sites, interpreters: Interpreters | None, worker: str
    ) -> None:
        """Without ``interpreters`` environments run elsewhere, and it says so."""
        self._worker_requests = worker_requests
        self._sites = sites
        self._interpreters = interpreters
        self._worker = worker
        self._room = asyncio.Semaphore(MAX_TOGETHER)

    async def run(self) -> None:
        """Until cancelled."""
        position = "0"
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._room.acquire()  # given back by the request: what does not fit is left to other workers
                try:
                    position, request = await self._worker_requests.next(position, self._worker)
                except Away:
                    self._room.release()
                    await asyncio.sleep(AWAY_S)
                    continue
                except RedisFault as error:  # a role that may not: episodes are played all the same
                    self._room.release()
                    get_logger().error("requests cannot be taken", error=str(error))
                    await asyncio.sleep(REFUSED_S)
                    continue
                if request is None:
                    self._room.release()
                else:
                    tasks.create_task(self._do(request), name=f"request {request.id}")

    async def _do(self, request: WorkerRequest) -> None:
        try:
            answer = await self._answer(request.order)
            with contextlib.suppress(Away):  # who asked is told that there was no answer
                await self._worker_requests.answer(request, answer)
        except Exception:
            get_logger().exception("request failed", request=request.id)
        finally:
            self._room.release()

    async def _answer(self, order: Mapping[str, Any]) -> dict[str, Any]:
        reference = str(order["environment"])
        try:
            if self._interpreters is None:
                raise InvalidEnvironment("environments run in services elsewhere, which cannot be asked this yet")
            placed = await asyncio.to_thread(self._sites.placed, HostOrder(reference))
            python = await self._interpreters.for_environment(placed.ref)
        except InvalidEnvironment as error:
            said: dict[str, Any] = {"error": str(error)}
        else:
            said = await self._in_a_process(python, placed, order)
        if order["do"] != "validate":
            return said
        if "error" in said:
            said = {"ok": False, "checks": [_failed(said["error"])]}
        report = {**said, "name": reference}
        with contextlib.suppress(EnvironmentNotFound):  # removed meanwhile
            await asyncio.to_thread(self._write_down, reference, report)
        return {"result": report}

    def _write_down(self, reference: str, report: Mapping[str, Any]) -> None:
        registry = self._sites.registry
        registry.add_report(registry.get(reference), report)

    async def _in_a_process(self, python: str, placed: HostOrder, asked: Mapping[str, Any]) -> dict[str, Any]:
        order = {
            **asked,
            "ref": placed.ref,
            "config": dict(placed.config),
            "networks": None if placed.networks is None else list(placed.networks),
            "timeout_s": PHASE_TIMEOUT_S,
            "model": None,
            "bounds": [MEMORY_BYTES, FILE_BYTES],
        }
        with (
            tempfile.TemporaryFile() as given,
            tempfile.TemporaryFile() as answer,
            tempfile.TemporaryDirectory() as tmp,
        ):
            given.write(json.dumps({**order, "descriptor": answer.fileno()}).encode())
            given.seek(0)
            process = subprocess.Popen(  # noqa: ASYNC220 - it starts in a few milliseconds
                [python, "-m", "gspo_core.testing", str(given.fileno())],
                pass_fds=(given.fileno(), answer.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=child_variables(placed.paths) | {"TMPDIR": tmp},
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
            try:
                await asyncio.wait_for(asyncio.to_thread(process.wait, MAX_SECONDS), MAX_SECONDS + 1)
            except (subprocess.TimeoutExpired, TimeoutError):
                return {"error": f"it did not end within {MAX_SECONDS:g}s"}
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                process.wait()
            return _read(process.returncode, answer.fileno())


def _read(status: int, descriptor: int) -> dict[str, Any]:
    size = os.fstat(descriptor).st_size
    if size > MAX_ANSWER_BYTES:
        return {"error": f"its answer has more than {MAX_ANSWER_BYTES} bytes"}
    text = os.pread(descriptor, size, 0)
    try:
        said = json.loads(text) if text else None
    except ValueError:
        said = None
    if isinstance(said, dict):
        return said
    how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    return {"error": f"it ends the process that it runs in ({how})"}


def _failed(message: str) -> dict[str, Any]:
    return {"id": "process", "status": "fail", "message": message, "data": {}}
