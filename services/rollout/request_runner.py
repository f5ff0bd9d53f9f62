"""Requests of the API to this worker: examine an environment, show its tools and tasks, play one episode of it,
measure its prompts; look at a model's files.

Rule: what runs an environment gets a process of its own, with bounded memory and time and nothing of ours in its
variables, and is answered however that process ends. It leaves no process behind. The report on a registered version is
stored before it is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from gspo_core.descendants import how_it_ended
from gspo_core.environment_contract import InvalidEnvironment
from gspo_core.job_spec import ChatSpec
from gspo_core.json_value import JSON
from gspo_core.model_files import refusal_of
from services.files.environments.registry import EnvironmentNotFound, ExaminationReport
from services.hosts.local import LocalHosts
from services.hosts.server import HostOrder, child_variables
from services.hosts.sites import Sites
from services.hosts.walls.control_groups import ControlGroup
from services.hosts.walls.tiers import WALLS, Program
from services.hosts.wire import HARD_MEMORY_FACTOR
from services.process.children import die_with_parent
from services.process.telemetry import get_logger
from services.state.client import Away, RedisFault
from services.state.process_requests import WorkerRequest, WorkerRequests
from services.workers.loading import JobNotServable, read_model

if TYPE_CHECKING:
    from gspo_core.environment_records import Starts

# An examination plays some dozens of episodes.
MAX_SECONDS = 120.0
PHASE_TIMEOUT_S = 5.0
# The keeper kills what an environment left behind within less.
ENDED_WITHIN_S = 4.0
MAX_ANSWER_BYTES = 8 << 20
MAX_TOGETHER = 2
AWAY_S = 1.0
REFUSED_S = 60.0
MEMORY_BYTES = 2 << 30
FILE_BYTES = 64 << 20


class RequestRunner:
    def __init__(self, worker_requests: WorkerRequests, sites: Sites, hosts: LocalHosts | None, worker: str) -> None:
        """``hosts`` is None if environments run elsewhere: then every request is refused."""
        self._worker_requests = worker_requests
        self._sites = sites
        self._hosts = hosts
        self._worker = worker
        self._room = asyncio.Semaphore(MAX_TOGETHER)

    async def run(self) -> None:
        """Until cancelled."""
        position = "0"
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._room.acquire()  # released by the request; those beyond are left to other workers
                try:
                    position, request = await self._worker_requests.next(position, self._worker)
                except Away:
                    self._room.release()
                    await asyncio.sleep(AWAY_S)
                    continue
                except RedisFault as error:  # this role may not take them, but can still play episodes
                    self._room.release()
                    get_logger().error("cannot take environment requests", error=str(error))
                    await asyncio.sleep(REFUSED_S)
                    continue
                if request is None:
                    self._room.release()
                else:
                    tasks.create_task(self._do(request), name=f"request {request.id}")

    async def _do(self, request: WorkerRequest) -> None:
        try:
            answer = await self._answer(request.order)
            with contextlib.suppress(Away):  # the caller is told that there was no answer
                await self._worker_requests.answer(request, answer)
        except Exception:
            get_logger().exception("request failed", request=request.id)
        finally:
            self._room.release()

    async def _answer(self, order: Mapping[str, JSON]) -> dict[str, JSON]:
        if order["do"] == "model":
            model, calls = Path(str(order["model"])), str(order.get("calls", "auto"))
            return {"result": {"problem": await asyncio.to_thread(refusal_of, model, calls)}}
        reference = str(order["environment"])
        try:
            if self._hosts is None:
                raise InvalidEnvironment(
                    "environments run in remote services (GSPO_ENV_HOSTS), which do not offer this yet"
                )
            config = cast(dict[str, JSON], order.get("config", {}))
            placed = await asyncio.to_thread(self._sites.placed, HostOrder(reference, config))
            walled = await self._hosts.prepared(placed)
        except InvalidEnvironment as error:
            said: dict[str, JSON] = {"error": str(error)}
        else:
            said = await self._in_a_process(walled, order)
        if order["do"] == "prompts" and "result" in said:
            chat = cast(dict[str, JSON], order["chat"])
            return await asyncio.to_thread(_longest_prompt, str(order["model"]), chat, cast("Starts", said["result"]))
        if order["do"] != "validate":
            return said
        if "error" in said:
            said = {"ok": False, "checks": [_failed(str(said["error"]))]}
        said["name"] = reference
        with contextlib.suppress(EnvironmentNotFound):  # removed meanwhile
            await asyncio.to_thread(self._write_down, reference, cast(ExaminationReport, said))
        return {"result": said}

    def _write_down(self, reference: str, report: ExaminationReport) -> None:
        registry = self._sites.registry
        registry.add_report(registry.get(reference), report)

    async def _in_a_process(self, placed: HostOrder, asked: Mapping[str, JSON]) -> dict[str, JSON]:
        loads = placed.frame()
        order = {
            **asked,
            "ref": loads["ref"],
            "config": loads["config"],
            "networks": loads["networks"],
            "agent": loads["agent"],
            "timeout_s": PHASE_TIMEOUT_S,
            "model": None,
            "bounds": [MEMORY_BYTES, FILE_BYTES],
        }
        with (
            tempfile.TemporaryFile() as given,
            tempfile.TemporaryFile() as answer,
            tempfile.TemporaryDirectory() as tmp,
            _bounded(placed) as joins,
        ):
            given.write(json.dumps({**order, "descriptor": answer.fileno()}).encode())
            given.seek(0)
            program = _examination(placed, given.fileno(), answer.fileno(), tmp, joins)
            process = subprocess.Popen(  # noqa: ASYNC220 - it starts in a few milliseconds
                program.command,
                pass_fds=program.descriptors,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=program.variables,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
            try:
                await asyncio.wait_for(asyncio.to_thread(process.wait, MAX_SECONDS), MAX_SECONDS + 1)
            except (subprocess.TimeoutExpired, TimeoutError):
                return {"error": f"it did not end within {MAX_SECONDS:g}s"}
            finally:
                await asyncio.to_thread(_end, process)
            return _read(process.returncode, answer.fileno())


def _longest_prompt(model: str, chat: Mapping[str, JSON], starts: Starts) -> dict[str, JSON]:
    """The longest first prompt in tokens of the model. Only the chat format is loaded, as for a job, and no weights. It
    compares with no limit; the asker does."""
    try:
        codec, model_tokens, _ = read_model(Path(model), ChatSpec.model_validate(chat))
        lengths = {one["task"]: len(codec.render(one["messages"], one["tools"])) for one in starts["starts"]}
    except (JobNotServable, ValueError) as error:
        return {"error": str(error)}
    if not lengths:
        return {"error": "no prompt is short enough to be handed over"}
    task = max(lengths, key=lengths.__getitem__)
    limits = cast(JSON, dict(starts["limits"]))
    return {"result": {"task": task, "tokens": lengths[task], "model_tokens": model_tokens, "limits": limits}}


@contextlib.contextmanager
def _bounded(order: HostOrder) -> Iterator[list[str]]:
    """The files of the control group of an examination, where there is one."""
    group = ControlGroup.make(order.bounds.num_processes) if order.tier else None
    if group is None:
        yield []
        return
    group.allow_memory((order.bounds.disk_mb << 20) + int(HARD_MEMORY_FACTOR * MEMORY_BYTES))
    try:
        yield group.entries
    finally:
        group.remove()


def _examination(order: HostOrder, given: int, answer: int, tmp: str, joins: Sequence[str]) -> Program:
    command = [order.python, "-m", "gspo_core.keeper", "gspo_core.testing", str(given)]
    place = {} if order.tier else {"TMPDIR": tmp}  # behind a wall it has its own
    program = Program(command, child_variables(order.paths) | place, (given, answer))
    return WALLS[order.tier].around(program, order.shown, order.bounds, joins)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(ENDED_WITHIN_S)
    process.kill()
    process.wait()


def _read(status: int, descriptor: int) -> dict[str, JSON]:
    size = os.fstat(descriptor).st_size
    if size > MAX_ANSWER_BYTES:
        return {"error": f"its answer has more than {MAX_ANSWER_BYTES} bytes"}
    text = os.pread(descriptor, size, 0)
    try:
        said: JSON = json.loads(text) if text else None
    except ValueError:
        said = None
    if isinstance(said, dict):
        return said
    return {"error": f"it ended the process that it ran in ({how_it_ended(status)})"}


def _failed(message: str) -> JSON:
    return {"id": "process", "status": "fail", "message": message, "data": {}}
