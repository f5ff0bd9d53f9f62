"""How fast is the embedded engine, over HTTP and with log-probs, beside ``model.generate`` in static batches?

Run: ``python -m benchmarks.engine [--rounds 3] [--output benchmarks/results/engine.md]``. Both sides have one thread
and alternate within one run; the best round of each counts. Rates are given per second of wall clock and per second of
CPU time of the process that computes: on a quiet machine the two agree, on a busy one only the second is comparable.
``generate`` computes no log-probs and talks no HTTP, which favours it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import torch

from services.engines.http_engine import open_http
from services.engines.protocol import PauseMode
from services.engines.sglang import EngineClient
from services.process.children import die_with_parent

VOCAB_SIZE = 600
CONCURRENCIES = (1, 8, 32, 128)
_BATCHES = {1: 6, 8: 4, 32: 3, 128: 2}  # how many times the concurrency is served in a round


@dataclass(frozen=True)
class Ask:
    prompt: list[int]
    max_new_tokens: int


def make_model(directory: Path) -> Any:
    """The shape of the demo: four layers, hidden size 128, under a million parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config).eval()
    model.save_pretrained(directory)
    return model


def make_asks(num: int, *, ragged: bool, seed: int) -> list[Ask]:
    generator = random.Random(seed)

    def length(mean: int) -> int:
        return generator.randint(mean // 2, mean + mean // 2) if ragged else mean

    return [Ask([generator.randrange(VOCAB_SIZE) for _ in range(length(200))], length(40)) for _ in range(num)]


@dataclass(frozen=True, order=True)
class Rate:
    """Sampled tokens per second of CPU time of the computing process, and per second of wall clock."""

    cpu: float
    wall: float

    def __str__(self) -> str:
        return f"{self.cpu:,.0f} | {self.wall:,.0f}"


class Stopwatch:
    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._cpu_s, self._wall_s = self._cpu(), time.perf_counter()

    def rate(self, num_tokens: int) -> Rate:
        return Rate(num_tokens / (self._cpu() - self._cpu_s), num_tokens / (time.perf_counter() - self._wall_s))

    def _cpu(self) -> float:
        fields = Path(f"/proc/{self._pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Engine:
    """The server process and its client."""

    def __init__(self, model_dir: Path, http: httpx.AsyncClient) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "services.engine", "--model", str(model_dir), "--port", str(port)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, env=environment, preexec_fn=die_with_parent())
        self.client = EngineClient(f"http://127.0.0.1:{port}", http)

    async def stopwatch(self) -> Stopwatch:
        await self.client.flush_cache(timeout_s=10)
        return Stopwatch(self.process.pid)

    async def rate(self, asks: Sequence[Ask], concurrency: int) -> Rate:
        slots = asyncio.Semaphore(concurrency)

        async def one(ask: Ask) -> int:
            async with slots:
                answer = await self.client.generate(
                    ask.prompt, max_new_tokens=ask.max_new_tokens, temperature=1.0, stop_token_ids=[]
                )
                return len(answer.output_ids)

        stopwatch = await self.stopwatch()
        return stopwatch.rate(sum(await asyncio.gather(*(one(ask) for ask in asks))))


@torch.inference_mode()
def generate_rate(model: Any, asks: Sequence[Ask], batch_size: int) -> Rate:
    """Static batches, padded on the left; each runs until its longest member is done, wanted tokens count."""
    stopwatch = Stopwatch(os.getpid())
    for first in range(0, len(asks), batch_size):
        batch = asks[first : first + batch_size]
        longest, length = max(len(ask.prompt) for ask in batch), max(ask.max_new_tokens for ask in batch)
        ids = torch.tensor([[0] * (longest - len(ask.prompt)) + ask.prompt for ask in batch])
        mask = torch.tensor([[0] * (longest - len(ask.prompt)) + [1] * len(ask.prompt) for ask in batch])
        model.generate(ids, attention_mask=mask, do_sample=True, max_new_tokens=length, min_new_tokens=length)
    return stopwatch.rate(sum(ask.max_new_tokens for ask in asks))


async def episodes_rate(engine: Engine, *, reuse: bool, num: int, turns: int, seed: int) -> tuple[Rate, float]:
    """(rate, share of prompt tokens from the cache): a shared system prompt, turns of 40 sampled and 30 read tokens."""
    generator = random.Random(seed)
    system = [generator.randrange(VOCAB_SIZE) for _ in range(150)]
    prompt_tokens = cached_tokens = 0

    async def episode(number: int) -> int:
        nonlocal prompt_tokens, cached_tokens
        prompt = system + [generator.randrange(VOCAB_SIZE) for _ in range(40)]
        for turn in range(turns):
            space = None if reuse else f"{seed}/{number}/{turn}"
            answer = await engine.client.generate(
                prompt, max_new_tokens=40, temperature=1.0, stop_token_ids=[], extra_key=space
            )
            prompt_tokens += len(prompt)
            cached_tokens += answer.cached_tokens
            prompt = prompt + answer.output_ids + [generator.randrange(VOCAB_SIZE) for _ in range(30)]
        return 40 * turns

    stopwatch = await engine.stopwatch()
    sampled = sum(await asyncio.gather(*(episode(number) for number in range(num))))
    return stopwatch.rate(sampled), cached_tokens / prompt_tokens


async def updates(engine: Engine, model_dir: Path, mode: PauseMode, seed: int) -> tuple[Rate, float, int]:
    """(rate, seconds paused for one update, tokens computed again) with 64 requests in flight and five updates."""
    asks = [Ask(ask.prompt, 4 * ask.max_new_tokens) for ask in make_asks(64, ragged=True, seed=seed)]
    working = asyncio.create_task(engine.rate(asks, 64))
    paused_s, num_again = [], 0
    for number in range(5):
        await asyncio.sleep(0.3)
        if mode == "retract":
            num_again += (await engine.client.loads())["loads"][0]["num_used_tokens"]
        started = time.perf_counter()
        await engine.client.pause(mode)
        await engine.client.load_weights(model_dir, f"{mode}/{seed}/{number}", flush_cache=mode == "retract")
        await engine.client.resume()
        paused_s.append(time.perf_counter() - started)
    return await working, min(paused_s), num_again


def conditions() -> str:
    return (
        f"torch {torch.__version__}, transformers {version('transformers')}, {platform.machine()}, "
        f"{os.cpu_count()} logical CPUs, load average {os.getloadavg()[0]:.1f} at the start; one thread on each side."
    )


async def measure(rounds: int, print_line: Callable[[str], None]) -> None:
    torch.set_num_threads(1)
    print_line("# Embedded engine beside `model.generate`\n")
    print_line(f"Qwen3 shape, 4 layers, hidden size 128, vocabulary 600, float32. {conditions()}")
    with tempfile.TemporaryDirectory() as folder:
        model_dir = Path(folder)
        model = make_model(model_dir)
        async with open_http() as http:
            engine = Engine(model_dir, http)
            try:
                while not await engine.client.is_ready():
                    await asyncio.sleep(0.2)
                await engine.rate(make_asks(8, ragged=False, seed=0), 8)
                await compare(engine, model, rounds, print_line)
                await reuse_and_updates(engine, model_dir, rounds, print_line)
            finally:
                engine.process.terminate()
                engine.process.wait()


async def compare(engine: Engine, model: Any, rounds: int, print_line: Callable[[str], None]) -> None:
    for ragged in (False, True):
        lengths = "Ragged lengths (prompt 100-300, output 20-60)" if ragged else "Equal lengths (prompt 200, output 40)"
        print_line(f"\n{lengths}, no common prefix; sampled tokens per second (CPU, wall clock):\n")
        print_line("| concurrency | engine, CPU | wall | `generate` in such batches, CPU | wall | ratio, CPU | wall |")
        print_line("|---|---|---|---|---|---|---|")
        for concurrency in CONCURRENCIES:
            ours, theirs = [], []
            for number in range(rounds):
                asks = make_asks(concurrency * _BATCHES[concurrency], ragged=ragged, seed=number)
                ours.append(await engine.rate(asks, concurrency))
                theirs.append(generate_rate(model, asks, concurrency))
            best, other = max(ours), max(theirs)
            ratio = f"{best.cpu / other.cpu:.1f} | {best.wall / other.wall:.1f}"
            print_line(f"| {concurrency} | {best} | {other} | {ratio} |")


async def reuse_and_updates(engine: Engine, model_dir: Path, rounds: int, print_line: Callable[[str], None]) -> None:
    print_line("\nEpisodes of 4 turns, 64 at a time, shared system prompt of 150 tokens:\n")
    print_line("| prefix cache | sampled tokens/s, CPU | wall | prompt tokens from the cache |\n|---|---|---|---|")
    for reuse in (True, False):
        runs = [await episodes_rate(engine, reuse=reuse, num=64, turns=4, seed=number) for number in range(rounds)]
        rate, share = max(runs)
        print_line(f"| {'on' if reuse else 'off'} | {rate} | {share:.0%} |")
    print_line("\nFive weight updates while 64 requests are in flight:\n")
    print_line(
        "| pause mode | sampled tokens/s, CPU | wall | shortest pause, ms | tokens computed again, all updates |"
    )
    print_line("|---|---|---|---|---|")
    modes: tuple[PauseMode, ...] = ("retract", "in_place")
    for mode in modes:
        pauses = [await updates(engine, model_dir, mode, number) for number in range(rounds)]
        rate, paused_s, num_again = max(one[0] for one in pauses), min(one[1] for one in pauses), pauses[0][2]
        print_line(f"| {mode} | {rate} | {1e3 * paused_s:.0f} | {num_again:,} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    lines: list[str] = []

    def print_line(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    asyncio.run(measure(arguments.rounds, print_line))
    if arguments.output:
        arguments.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
