"""verifiers plays: an environment of its own with two seats, whose harness owns the rollout loop and speaks each
dialect to the package's interception, which relays to the gateway.

python play_verifiers.py AT_ONCE
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Iterable
from typing import Any

import anthropic
import openai
import verifiers.v1 as vf
from play_anthropic import Messages
from play_openai import Chat, Responses
from scenario import ByHand, Call, Report, serve, words

__all__ = ["PlayEnv", "PlayHarness", "PlayTaskset"]
# A module is imported by its name once more, as a plugin.
NAME = "play_verifiers"
PLAYING: dict[str, Playing] = {}


class PlayTask(vf.Task[vf.TaskData]):
    pass


class PlayTasksetConfig(vf.TasksetConfig):
    pass


class PlayTaskset(vf.Taskset[PlayTask, PlayTasksetConfig]):
    INFINITE = True

    def load(self) -> Iterable[PlayTask]:
        raise NotImplementedError("tasks come from outside")


class PlayHarness(vf.Harness[vf.HarnessConfig]):
    """Plays in this process what the task names, in one dialect or another."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Any,
        data: Any,
        tool_interception_url: str | None = None,
    ) -> vf.ProgramResult:
        playing: Playing = PLAYING[data.name]
        await asyncio.to_thread(playing.play, endpoint, secret)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class PlayEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())
    helper: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class PlayEnv(vf.Env[PlayEnvConfig]):
    async def run(self, task: Any, agents: Any) -> None:
        await agents.player.run(task)
        if "sub_agent" in PLAYING[task.data.name].call.features:
            await agents.helper.run(task)


class Playing:
    """One episode: first the player, then the helper where there is one."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.kind = call.rng.choice((Chat, Responses, Messages))
        self.hand: ByHand | None = None

    def play(self, endpoint: str, secret: str) -> None:
        kind: Any = self.kind
        if kind is Messages:
            client: Any = anthropic.Anthropic(base_url=endpoint.removesuffix("/v1"), api_key=secret, timeout=300)
        else:
            client = openai.OpenAI(base_url=endpoint, api_key=secret, timeout=300)
        with client:
            if self.hand is None:
                self.hand = ByHand(self.call, lambda system: kind(client, system))
                self.hand.play()
            else:
                self._help(self.hand, kind(client, words(self.hand.rng, "You check. ")))

    def _help(self, hand: ByHand, chat: Any) -> None:
        chat.user(words(hand.rng))
        hand.report.branches["sub_agent"] += 1
        for _ in range(2):
            hand.reply(chat, hand.ask(chat))


class Stage:
    """One environment for all episodes, in a loop of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        seat = {"harness": {"id": NAME}, "runtime": {"type": "subprocess"}}
        config = PlayEnvConfig.model_validate({"taskset": {"id": NAME}, "player": seat, "helper": seat})
        self.env = PlayEnv(config)
        asyncio.run_coroutine_threadsafe(self._open(), self.loop).result()

    async def _open(self) -> None:
        self._serving = self.env.serving()
        await self._serving.__aenter__()

    def play(self, call: Call) -> Report:
        name = f"episode-{call.task['number']}"
        os.environ[name] = call.api_key
        playing = PLAYING[name] = Playing(call)
        client = vf.EvalClientConfig(base_url=call.base_url, api_key_var=name)
        task = PlayTask(vf.TaskData(name=name, prompt="Play."), self.env.taskset.config.task)
        running = self.env.run_episode(task, vf.ModelContext("policy", client))
        episode = asyncio.run_coroutine_threadsafe(running, self.loop).result()
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors:
            raise RuntimeError("\n".join(f"{error.message}\n{(error.traceback or '')[-1500:]}" for error in errors))
        assert playing.hand is not None
        return playing.hand.report


def main() -> None:
    import play_verifiers

    serve(play_verifiers.Stage().play, int(sys.argv[1]))


if __name__ == "__main__":
    main()
