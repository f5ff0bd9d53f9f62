"""Opens a model of this machine for ``gspo eval``: its engine is a child process, for as long as it is open.

Rule: the child never outlives its parent, and what it said last is the reason where it ends by itself.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pydantic import ValidationError

from gspo_core.environment_contract import Llm
from gspo_core.evaluation.policy import EvaluatedPolicy, LocalPolicyOrder, PolicyUnusable
from gspo_core.spec import ChatSpec, EpisodeLimits
from services.engines.keys import SETTING
from services.engines.kinds import open_engines
from services.engines.protocol import Engine
from services.evaluation.conversation import TokenConversation, TokenSampler
from services.evaluation.models import FoundModel, find_model
from services.process.children import die_with_parent
from services.process.ports import free_port
from services.process.settings import SECRETS_SETTING
from services.workers.loading import JobNotServable, read_model

START_TIMEOUT_S = 600.0
POLL_S = 0.1
STOP_TIMEOUT_S = 10.0
_LAST_WORDS_BYTES = 2000


@asynccontextmanager
async def open_policy(order: LocalPolicyOrder) -> AsyncIterator[EvaluatedPolicy]:
    """Raises ``PolicyUnusable``."""
    found = await asyncio.to_thread(find_model, order.model, order.api_url)
    try:
        chat = ChatSpec.model_validate({**found.chat, **order.chat})
        codec, context_tokens, vocab_size = read_model(found.directory, chat)
    except (JobNotServable, ValidationError) as error:
        raise PolicyUnusable(str(error)) from error
    with _engine_process(found, order) as child:
        async with open_engines() as connect:
            engine = connect(child.url)
            await child.ready(engine)
            sampler = TokenSampler(codec, engine, order.temperature, context_tokens, vocab_size)
            yield LocalPolicy(sampler, order.seed)


@dataclass(frozen=True, slots=True)
class LocalPolicy:
    """A model of this machine."""

    sampler: TokenSampler
    seed: int

    def converse(self, name: str, seed: int, limits: EpisodeLimits) -> TokenConversation:
        return TokenConversation(self.sampler, name, self.seed, limits)

    def llm(self, name: str) -> Llm:
        raise PolicyUnusable(
            "an agent that owns its loop asks an address, and a model of this machine has none: serve it with an "
            "engine that speaks OpenAI's chat completions, and name that as https://host/v1#MODEL"
        )


@dataclass(frozen=True, slots=True)
class _Child:
    url: str
    process: subprocess.Popen[bytes]
    log: IO[bytes]

    async def ready(self, engine: Engine) -> None:
        async with asyncio.timeout(START_TIMEOUT_S):
            while not await engine.is_ready():
                if (status := self.process.poll()) is not None:
                    raise PolicyUnusable(f"the engine ended with code {status}:\n{self._last_words()}")
                await asyncio.sleep(POLL_S)

    def _last_words(self) -> str:
        size = self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, size - _LAST_WORDS_BYTES))
        return self.log.read().decode("utf-8", "replace").strip()


@contextmanager
def _engine_process(found: FoundModel, order: LocalPolicyOrder) -> Iterator[_Child]:
    port = free_port()
    device = _device(order.device)
    options = {
        "model": found.directory,
        "port": port,
        "device": device,
        "dtype": "bfloat16" if device.startswith("cuda") else "float32",
        "threads": os.cpu_count() or 1,
        "random-seed": order.seed,
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            # -P keeps the caller's folder off the path: a user's own `services` must not shadow ours.
            [sys.executable, "-P", "-m", "services.engine", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # This caller's own, on loopback: it asks for none of the keys that other engines have.
            env={name: value for name, value in os.environ.items() if name not in (SETTING, SECRETS_SETTING)},
            preexec_fn=die_with_parent(),
        )
        try:
            yield _Child(f"http://127.0.0.1:{port}", process, log)
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _device(asked: str) -> str:
    if asked != "auto":
        return asked
    return "cuda" if Path("/dev/nvidiactl").exists() else "cpu"
