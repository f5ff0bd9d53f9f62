"""A program that speaks the Agent Client Protocol, asked a task: its session, from its start to its end.

Rule: whatever the program does, it is over soon after its last prompt was answered or it was cancelled: it is asked
to stop, then told to, then killed. An agent that ended a prompt, for whatever reason, has played; one that answered
with an error, died or spoke otherwise has failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from gspo_core.env.acp_client import CAPABILITIES, EpisodeClient, Permissions
from gspo_core.env.acp_messages import (
    AUTH_REQUIRED,
    MAX_LINE_BYTES,
    MAX_SHOWN_CHARS,
    AcpConnection,
    BrokenProtocol,
    RpcError,
    StreamEnded,
)
from gspo_core.env.agent_runs import MAX_LAST_WORDS_BYTES, AgentFailed, FunctionRun, end_of, remove, variables_for
from gspo_core.environment_contract import Llm, PhaseLimits
from gspo_core.json_value import JSON
from gspo_core.placeholders import NoSuchField, filled

PROTOCOL_VERSION = 1
_ONE_PROMPT = ("prompt", "question")


@dataclass(frozen=True, slots=True)
class AcpStart:
    """As the job's ``agent.acp`` says."""

    prompt: str | None = None
    permissions: Permissions = "allow"
    login: str | None = None

    @classmethod
    def from_json(cls, given: Mapping[str, JSON]) -> AcpStart:
        prompt, login = given.get("prompt"), given.get("login")
        return cls(
            str(prompt) if prompt is not None else None,
            "reject" if given.get("permissions") == "reject" else "allow",
            str(login) if login is not None else None,
        )

    def prompts_for(self, task: Mapping[str, JSON]) -> list[str]:
        """What the agent is asked, one after another. Raises ``AgentFailed``."""
        try:
            if self.prompt is not None:
                return [filled(self.prompt, task, {})]
            return _prompts_in(task) or [json.dumps(dict(task), ensure_ascii=False, allow_nan=False)]
        except NoSuchField as error:
            raise AgentFailed(f"acp.prompt: {error}") from None
        except (TypeError, ValueError) as error:
            raise AgentFailed(f"the task is not JSON: {error}") from None


def _prompts_in(task: Mapping[str, JSON]) -> list[str]:
    several = task.get("prompts")
    if isinstance(several, list | tuple) and several and all(isinstance(one, str) and one for one in several):
        return [str(one) for one in several]
    texts = (task.get(name) for name in _ONE_PROMPT)
    return [text for text in texts if isinstance(text, str) and text][:1]


def acp_run(
    command: Sequence[str],
    start: AcpStart,
    task: Mapping[str, JSON],
    llm: Llm,
    home: Path,
    folder: Path,
    *,
    limits: PhaseLimits,
) -> FunctionRun:
    """``home``: where the program runs. ``folder``: where its session works. Raises ``AgentFailed``."""
    variables = {**variables_for(task, llm), "GSPO_FOLDER": str(folder)}
    session = AcpSession(command, start.prompts_for(task), variables, home, folder, start, limits)
    return FunctionRun(session.play)


@contextlib.contextmanager
def _scratch_folder() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="agent-tmp-")
    try:
        yield folder
    finally:
        remove(Path(folder))


class AcpSession:
    def __init__(
        self,
        command: Sequence[str],
        prompts: Sequence[str],
        variables: Mapping[str, str],
        home: Path,
        folder: Path,
        start: AcpStart,
        limits: PhaseLimits,
    ) -> None:
        self._command, self._prompts, self._variables = command, prompts, variables
        self._home, self._folder, self._start = home, folder, start
        self._begin_s = limits.reset_timeout_s
        # It is waited for four times at most: for its last answer, and after each way to end it.
        self._end_s = limits.close_timeout_s / 5
        self._client = EpisodeClient(folder, start.permissions)
        self._doing = ""
        self._methods: JSON = None

    async def play(self) -> str:
        """What it said. Raises ``AgentFailed``. When this is cancelled, so is the agent's turn."""
        name = self._command[0]
        with _scratch_folder() as scratch, tempfile.TemporaryFile() as errors:
            async with self._program(scratch, errors) as (process, reader):
                assert process.stdin is not None
                try:
                    await self._converse(AcpConnection(reader, process.stdin, self._client))
                except BrokenProtocol as error:
                    raise AgentFailed(f"{name} wrote {error}") from None
                except RpcError as error:
                    words = end_of(errors, MAX_LAST_WORDS_BYTES).strip()
                    told = self._told(error) + (f"; its stderr ends with: {words}" if words else "")
                    raise AgentFailed(f"{name} answered {self._doing} with an error: {told}") from None
                except TimeoutError:
                    raise AgentFailed(f"{name} did not answer {self._doing} within {self._begin_s:g}s") from None
                except StreamEnded:
                    how = await self._how_it_ended(process)
                    words = end_of(errors, MAX_LAST_WORDS_BYTES).strip() or "no output"
                    raise AgentFailed(f"{name} {how} before it answered {self._doing}: {words}") from None
        return self._client.said

    async def _converse(self, connection: AcpConnection) -> None:
        async with asyncio.timeout(self._begin_s):
            asked: dict[str, JSON] = {"protocolVersion": PROTOCOL_VERSION, "clientCapabilities": dict(CAPABILITIES)}
            told = await self._ask(connection, "initialize", asked)
            version, self._methods = told.get("protocolVersion"), told.get("authMethods")
            if version != PROTOCOL_VERSION:
                raise AgentFailed(
                    f"{self._command[0]} speaks version {str(version)[:100]} of the protocol, not {PROTOCOL_VERSION}"
                )
            if self._start.login is not None:
                await self._ask(connection, "authenticate", {"methodId": self._start.login})
            told = await self._ask(connection, "session/new", {"cwd": str(self._folder), "mcpServers": []})
        session = told.get("sessionId")
        if not isinstance(session, str):
            raise BrokenProtocol("an answer to session/new without a sessionId")
        for prompt in self._prompts:
            self._client.begin_prompt()
            answer = await self._prompted(connection, session, prompt)
            if not isinstance(answer.get("stopReason"), str):
                raise BrokenProtocol("an answer to session/prompt without a stopReason")
            if answer["stopReason"] != "end_turn":
                break

    async def _ask(self, connection: AcpConnection, method: str, params: Mapping[str, JSON]) -> Mapping[str, JSON]:
        self._doing = method
        return await connection.request(method, params)

    async def _prompted(self, connection: AcpConnection, session: str, prompt: str) -> Mapping[str, JSON]:
        self._doing = "session/prompt"
        asked: dict[str, JSON] = {"sessionId": session, "prompt": [{"type": "text", "text": prompt}]}
        number = await connection.ask(self._doing, asked)
        try:
            return await connection.answer_to(number)
        except asyncio.CancelledError:
            self._client.is_cancelled = True
            with contextlib.suppress(TimeoutError, RpcError, BrokenProtocol, StreamEnded):
                async with asyncio.timeout(self._end_s):
                    await connection.tell("session/cancel", {"sessionId": session})
                    await connection.answer_to(number)
            raise

    def _told(self, error: RpcError) -> str:
        if error.code != AUTH_REQUIRED:
            return str(error)
        given = self._methods if isinstance(self._methods, list) else []
        methods = ", ".join(str(one.get("id")) for one in given if isinstance(one, dict))
        shown = methods[:MAX_SHOWN_CHARS] or "it has none"
        return f"{error}. It wants a login; agent.acp.login names one of its methods ({shown})"

    @contextlib.asynccontextmanager
    async def _program(
        self, scratch: str, errors: IO[bytes]
    ) -> AsyncIterator[tuple[asyncio.subprocess.Process, asyncio.StreamReader]]:
        # A pipe of our own: the library's is over when all who were given it are, and a program's children may not be.
        out, into = os.pipe()
        with os.fdopen(out, "rb", buffering=0) as output:
            try:
                process = await self._started(scratch, into, errors)
            finally:
                os.close(into)
            reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
            loop = asyncio.get_running_loop()
            pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), output)
            watching = asyncio.create_task(self._close_after(process, pipe))
            try:
                yield process, reader
            finally:
                watching.cancel()
                ending = asyncio.create_task(self._end(process))
                try:
                    await asyncio.shield(ending)
                finally:
                    await ending  # also where this was cancelled meanwhile
                    pipe.close()
                    await asyncio.sleep(0)  # the loop closes it

    async def _close_after(self, process: asyncio.subprocess.Process, pipe: asyncio.BaseTransport) -> None:
        """What a program has left running may hold its stdout open after its end, and writes nothing for it."""
        while not await self._has_ended(process):
            pass
        await asyncio.sleep(self._end_s)
        pipe.close()

    async def _started(self, scratch: str, into: int, errors: IO[bytes]) -> asyncio.subprocess.Process:
        try:
            # In the process group of the session's process, so that it ends with that at the latest.
            return await asyncio.create_subprocess_exec(
                *self._command,
                env={**os.environ, **self._variables, "TMPDIR": scratch},
                cwd=self._home,
                stdin=asyncio.subprocess.PIPE,
                stdout=into,
                stderr=errors,
            )
        except OSError as error:
            raise AgentFailed(f"{self._command[0]} cannot be started: {error}") from error

    async def _how_it_ended(self, process: asyncio.subprocess.Process) -> str:
        if not await self._has_ended(process):
            return "closed its stdout"
        status = process.returncode or 0
        return f"ended with signal {-status}" if status < 0 else f"ended with exit status {status}"

    async def _has_ended(self, process: asyncio.subprocess.Process) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._end_s):
                await process.wait()
        return process.returncode is not None

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        process.stdin.close()
        for end in (process.terminate, process.kill):
            if await self._has_ended(process):
                break
            with contextlib.suppress(ProcessLookupError):
                end()
        await self._has_ended(process)
