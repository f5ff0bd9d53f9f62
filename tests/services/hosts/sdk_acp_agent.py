"""An agent written with the package `agent-client-protocol`, which holds what it is sent against its own models."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from acp import (
    PROTOCOL_VERSION,
    Agent,
    InitializeResponse,
    NewSessionResponse,
    PromptResponse,
    RequestError,
    run_agent,
    start_tool_call,
    text_block,
    update_agent_message,
    update_agent_thought_text,
)
from acp.schema import PermissionOption, ToolCallUpdate

OPTIONS = [("allow_always", "always"), ("allow_once", "once"), ("reject_once", "no")]


def mark(text):
    Path(os.environ["MARK"]).write_text(text)


class Copies(Agent):
    def on_connect(self, conn):
        self._client = conn

    async def initialize(self, protocol_version, client_capabilities=None, client_info=None, **kwargs):
        assert protocol_version == PROTOCOL_VERSION
        assert client_capabilities.fs.read_text_file
        assert client_capabilities.fs.write_text_file
        assert not client_capabilities.terminal
        return InitializeResponse(protocol_version=PROTOCOL_VERSION)

    async def new_session(self, cwd, mcp_servers=None, **kwargs):
        self._folder = Path(cwd)
        assert mcp_servers == []
        return NewSessionResponse(session_id="copying")

    async def prompt(self, session_id, prompt, **kwargs):
        client, (asked,) = self._client, prompt
        if asked.text == "wait":
            self._cancelled = asyncio.Event()
            mark(str(os.getpid()))
            await self._cancelled.wait()
            mark("cancelled")
            return PromptResponse(stop_reason="cancelled")
        await client.session_update(session_id, update_agent_thought_text("Hm."))
        await client.session_update(session_id, start_tool_call("1", "copy", kind="edit", status="pending"))
        call = ToolCallUpdate(tool_call_id="1", title="copy")
        options = [PermissionOption(option_id=name, name=name, kind=kind) for kind, name in OPTIONS]
        permitted = await client.request_permission(session_id, call, options)
        source, copy = self._folder / "source", self._folder / "copy"
        source.write_text("one\ntwo\nthree\n")
        second = await client.read_text_file(session_id, str(source), line=2, limit=1)
        await client.write_text_file(session_id, str(copy), second.content)
        try:
            await client.read_text_file(session_id, "/etc/hostname")
        except RequestError as error:
            refused = error.code
        for word in (asked.text, permitted.outcome.option_id, copy.read_text().strip(), str(refused)):
            await client.session_update(session_id, update_agent_message(text_block(f"{word} ")))
        return PromptResponse(stop_reason="end_turn")

    async def cancel(self, session_id, **kwargs):
        self._cancelled.set()


if __name__ == "__main__":
    asyncio.run(run_agent(Copies()))
