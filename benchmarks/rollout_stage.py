"""What the rollout benchmarks share: real queue, real workers, a fast engine, jobs whose trainer is the benchmark.

Everything but the worker runs in processes of its own, so the CPU time of this process is the worker's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from benchmarks.fast_engine import Plan
from gspo_core.chat import HermesCodec, load_tokenizer
from gspo_core.types import Split
from gspo_core.versions import WeightFile, WeightsManifest
from services.engines.http_engine import open_http
from services.engines.protocol import Generation
from services.engines.sglang import EngineClient
from services.hosts.local import LocalHosts
from services.hosts.venv import Interpreters
from services.process.children import die_with_parent
from services.rollout.attempt import EnvironmentDriver
from services.state.queue import Bus
from services.state.server import RedisServer, connect
from services.state.store import Claim, Store
from services.workers.loading import load_job
from services.workers.worker import EpisodeWorker, WorkerConfig

# Ids have five or six digits, as those of large vocabularies mostly have: their JSON is what goes over the wire.
FIRST_ID = 100_000
CONTEXT_TOKENS = 65_536
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CONTROL = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def write_model(directory: Path, words: Iterable[str] = ()) -> HermesCodec:
    """A model without weights: a tokenizer of bytes, so that lengths in tokens are known, and a configuration.

    Each of ``words`` behind a blank is one token.
    """
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = {f"unused{number}": number for number in range(FIRST_ID)}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[letter] = len(vocabulary)
    merges: dict[tuple[str, str], None] = {}
    for word in words:
        for length in range(1, len(word) + 1):
            head, letter = f"Ġ{word[: length - 1]}", word[length - 1]
            vocabulary.setdefault(head + letter, len(vocabulary))
            merges[head, letter] = None
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=bool(merges))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in _CONTROL])
    tokenizer.save(str(directory / "tokenizer.json"))
    codec = HermesCodec(load_tokenizer(directory))
    config = {
        "model_type": "qwen2",
        "max_position_embeddings": CONTEXT_TOKENS,
        "vocab_size": codec.tokenizer.vocab_size,
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    return codec


def a_call(codec: HermesCodec, num_tokens: int) -> list[int]:
    """A turn of so many ids that thinks aloud and reads a page."""
    opening, closing = codec.tokenizer.token_id("<tool_call>"), codec.tokenizer.token_id("</tool_call>")
    assert opening is not None
    assert closing is not None
    body = codec.tokenizer.encode('{"name": "read", "arguments": {"page": 7}}')
    num_words = num_tokens - len(body) - 3
    return [*codec.tokenizer.encode("so " * num_words)[:num_words], opening, *body, closing, codec.stop_ids[0]]


class CountingClient(EngineClient):
    """Counts what a worker asks of an engine."""

    turns = 0
    context_tokens = 0

    async def generate(self, input_ids: Any, **options: Any) -> Generation:
        generation = await super().generate(input_ids, **options)
        CountingClient.turns += 1
        CountingClient.context_tokens += len(input_ids) + len(generation.output_ids)
        return generation


class LoopLag:
    """How late this process's event loop is, looked at every 10 ms."""

    PERIOD_S = 0.01

    def __init__(self) -> None:
        self.late_ms: list[float] = []

    async def watch(self) -> None:
        while True:
            due = time.perf_counter() + self.PERIOD_S
            await asyncio.sleep(self.PERIOD_S)
            self.late_ms.append((time.perf_counter() - due) * 1e3)

    def percentile(self, share: float) -> float:
        return sorted(self.late_ms)[int(share * (len(self.late_ms) - 1))] if self.late_ms else 0.0


@dataclass
class Stage:
    """``redis_url`` and ``engine_urls`` may be those of proxies."""

    root: Path
    codec: HermesCodec
    redis_url: str
    bus: Bus
    store: Store
    http: httpx.AsyncClient
    num_turn_tokens: int
    engine_urls: dict[str, str] = field(default_factory=dict)
    """Of each job."""
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)

    async def submit(self, world: str = "Library", config: dict[str, Any] | None = None, **changes: Any) -> Claim:
        spec = {
            "model": str(self.root / "model"),
            "environments": [{"ref": f"benchmarks.rollout_worlds:{world}", "config": config or {}}],
        }
        await self.store.jobs.create(json.dumps(spec | changes))
        claim = await self.store.jobs.claim("trainer")
        assert claim is not None
        return claim

    async def publish(self, claim: Claim, step: int = 0) -> WeightsManifest:
        version = await self.store.versions.next(claim.job_id, claim.token)
        files = (WeightFile("model.safetensors", 1, "0" * 64),)
        manifest = WeightsManifest(claim.job_id, version, claim.epoch, step, files)
        await self.store.versions.publish(claim.job_id, claim.token, manifest)
        if url := self.engine_urls.get(claim.job_id):
            await self.http.post(f"{url}/label", json={"label": manifest.label})
        return manifest

    async def serve(self, claim: Claim, **plan: Any) -> str:
        """Starts an engine for the job and publishes its first version; returns the engine's address."""
        manifest = await self.publish(claim)
        given = Plan(**{"say": a_call(self.codec, self.num_turn_tokens), "label": manifest.label} | plan)
        with socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:
            command = [sys.executable, "-m", "benchmarks.fast_engine", "--plan", msgspec.json.encode(given).decode()]
            self.start([*command, "--fd", str(listener.fileno())], pass_fds=[listener.fileno()])
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.engine_urls[claim.job_id] = url
        return url

    def start(self, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        self.children.append(subprocess.Popen(command, preexec_fn=die_with_parent(), **options))
        return self.children[-1]

    async def dispatch(self, claim: Claim, groups: Iterator[int] | range, *, size: int, task: int = 0) -> None:
        for group in groups:
            await self.bus.dispatch(claim.job_id, claim.token, group, size=size, split=Split.TRAIN, task_index=task)

    @contextlib.asynccontextmanager
    async def working(self, **changes: Any) -> AsyncIterator[EpisodeWorker]:
        """A worker in this process."""
        given: dict[str, Any] = {
            "lease_s": 30.0,
            "engine_urls": list(self.engine_urls.values()),
            "drain_s": 0.1,
        } | changes
        config = WorkerConfig("worker-0", **given)
        async with (
            open_http(max_connections=config.max_connections) as http,
            connect(self.redis_url) as redis,
        ):
            bus, store = Bus(redis, lease_s=given["lease_s"]), Store(redis, lease_s=given["lease_s"])
            worker = EpisodeWorker(
                config,
                bus,
                store,
                lambda url: CountingClient(url, http),
                partial(load_job, boot=LocalHosts(Interpreters(self.root)).boot),
                EnvironmentDriver(),
                clock=time.monotonic,
                rng=random.Random(0),
            )
            stop = asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(worker.run(stop))
                try:
                    yield worker
                finally:
                    stop.set()


@contextlib.asynccontextmanager
async def open_stage(*, num_turn_tokens: int, words: Iterable[str] = ()) -> AsyncIterator[Stage]:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as closing:
        root = Path(folder)
        codec = write_model(root / "model", words)
        server = closing.enter_context(RedisServer.spawn(root / "redis"))
        async with connect(server.url) as redis, httpx.AsyncClient(trust_env=False) as http:
            bus, store = Bus(redis), Store(redis)
            await bus.load_functions()
            stage = Stage(root, codec, server.url, bus, store, http, num_turn_tokens)
            try:
                yield stage
            finally:
                for child in stage.children:
                    child.kill()
                    child.wait()


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def machine() -> str:
    """The conditions that stand beside every number."""
    cores, load = os.cpu_count(), os.getloadavg()[0]
    return (
        f"Python {platform.python_version()}, {platform.machine()}, {cores} cores shared with other work, load "
        f"{load:.1f} at the end"
    )
