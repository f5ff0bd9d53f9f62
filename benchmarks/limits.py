"""How far is each stage from what the machine can do? ``python -m benchmarks.limits [--output FILE]``.

A stage's limit is its arithmetic (operations, bytes, round trips) at the rate that the same machine reaches in the same
run with nothing around it: a large matrix product, a raw XADD with fsync, a bare interpreter. Time is that of the
processor of the processes that work, so that neighbours on a shared machine disturb little; where a stage waits for a
disk, raw and ours go in turns. One thread each; medians of rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import engine, learner, streams
from services.engines.http_engine import open_http
from services.state.server import RedisServer

# As wide as the learner's table has it, where products are not the thin ones of a demo.
VOCABULARY = 32_000
LENGTH = 512
SEGMENTS = 256
CONCURRENCIES = (1, 32, 128)
ROUNDS = 5
WAYS = (streams.raw_round, streams.bus_round)

HEAD = """# How far each stage is from the machine

`python -m benchmarks.limits`. torch {torch}, Python {python}, {machine}, {cores} cores, load {load:.1f}
at the start; one thread a process. The limit is what the stage's arithmetic takes at the rate that the same run
measured: a product of 1024 x 1024 x 1024 in float32 does {gflops:.0f} GFLOP a second of CPU time here.

| stage | what it must do | limit | reached | of the limit |
|---|---|---|---|---|"""


@dataclass(frozen=True)
class Stage:
    """``limit`` and ``reached`` are rates in ``unit``."""

    name: str
    arithmetic: str
    limit: float
    reached: float
    unit: str

    def __str__(self) -> str:
        share = f"{self.reached / self.limit:.0%}"
        return f"| {self.name} | {self.arithmetic} | {self.limit:,.0f} {self.unit} | {self.reached:,.0f} | {share} |"


def of_the_learner(folder: Path, rate: float) -> Iterator[Stage]:
    """An update of one group of eight: forward, backward, and the head's forward again."""
    hidden = learner.SHAPES[VOCABULARY]
    learner.make_model(folder, VOCABULARY, hidden)
    batch = learner.make_batch(VOCABULARY, LENGTH)
    num_tokens = sum(len(prompt) + len(answer) for prompt, answer, _ in batch["sequences"])
    runs = [learner.run_parts(folder, batch, LENGTH) for _ in range(ROUNDS)]
    for part in ("head", "layers, packing and the rest"):
        operations = runs[0][f"operations/{part}"]
        seconds = statistics.median(one[f"seconds/{part}"] for one in runs)
        yield Stage(
            f"training: {part}",
            f"{operations / num_tokens / 1e6:.0f} MFLOP a token",
            rate / (operations / num_tokens),
            num_tokens / seconds,
            "tokens/s",
        )


def operations_of(config: object, prompt: int, sampled: int) -> float:
    """Floating-point operations of one request; what is sampled is what has logits."""
    shape = engine_shape(config)
    hidden, weights = shape["hidden_size"], shape["weights"]
    total = prompt + sampled
    attention = 4 * shape["num_attention_heads"] * shape["head_dim"] * total**2 / 2
    return shape["num_hidden_layers"] * (2 * weights * total + attention) + 2 * hidden * shape["vocab_size"] * sampled


def engine_shape(config: object) -> dict[str, int]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    shape = {name: int(getattr(config, name)) for name in (*names, "num_key_value_heads", "head_dim", "vocab_size")}
    heads = 2 * shape["num_attention_heads"] + 2 * shape["num_key_value_heads"]
    shape["weights"] = shape["hidden_size"] * (shape["head_dim"] * heads + 3 * shape["intermediate_size"])
    return shape


async def of_sampling(folder: Path, rate: float) -> list[Stage]:
    """The embedded engine over HTTP: prompts of 200 tokens, answers of 40, no common prefix."""
    config, stages = engine.make_model(folder).config, []
    operations = operations_of(config, 200, 40) / 40
    async with open_http() as http:
        server = engine.Engine(folder, http)
        try:
            while not await server.client.is_ready():
                await asyncio.sleep(0.2)
            await server.rate(engine.make_asks(8, ragged=False, seed=0), 8)
            for concurrency in CONCURRENCIES:
                asks = engine.make_asks(max(8, concurrency), ragged=False, seed=concurrency)
                reached = statistics.median([(await server.rate(asks, concurrency)).cpu for _ in range(ROUNDS)])
                arithmetic = f"{operations / 1e6:.1f} MFLOP a sampled token, its share of the prompt included"
                stages.append(
                    Stage(f"sampling, {concurrency} at once", arithmetic, rate / operations, reached, "tokens/s")
                )
        finally:
            server.process.terminate()
            server.process.wait()
    return stages


async def of_the_queue(folder: Path) -> list[Stage]:
    """Appending segments of 16 KiB that are on the disk when the call returns, beside raw XADD in turns."""
    stages, payload = [], os.urandom(streams.PAYLOAD_BYTES)
    for batch in (1, streams.BATCH):
        with RedisServer.spawn(folder / f"redis-{batch}") as server:
            bench = await streams.open_bench(server)
            await bench.redis.config_set("appendfsync", "always")
            rates = [[await one(bench, 1, batch, payload, SEGMENTS) for one in WAYS] for _ in range(ROUNDS + 1)]
            await bench.redis.aclose()
        # The first round warms up.
        raw, ours = (statistics.median(one) for one in zip(*rates[1:], strict=True))
        arithmetic = f"{batch} XADD, one round trip, one fsync"
        stages.append(Stage(f"storing, {batch} a call", arithmetic, raw, ours, "segments/s"))
    return stages


def of_commands() -> Iterator[Stage]:
    """CPU time of a command that asks nobody, beside an interpreter that does nothing."""
    bare = cpu_ms([sys.executable, "-c", "pass"])
    help_of = "from gspo_core.cli import main; main(['--help'])"
    for name, code in (("gspo --help", help_of), ("importing the API", "import services.api.app")):
        took = cpu_ms([sys.executable, "-c", code])
        arithmetic = f"an interpreter: {bare:.0f} ms, ours {took:.0f} ms"
        yield Stage(f"starting: {name}", arithmetic, 1000 / bare, 1000 / took, "starts/s")


def cpu_ms(command: Sequence[str]) -> float:
    def once() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return 1e3 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)

    once()
    return statistics.median(once() for _ in range(ROUNDS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    output: Path | None = parser.parse_args().output
    torch.set_num_threads(1)
    load, rate = os.getloadavg()[0], learner.product_rate(1024, 1024, 1024)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stages = [
            *of_the_learner(folder / "learner", rate),
            *asyncio.run(of_sampling(folder / "engine", rate)),
            *asyncio.run(of_the_queue(folder)),
            *of_commands(),
        ]
    conditions = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
    head = HEAD.format(**conditions, cores=os.cpu_count(), load=load, gflops=rate / 1e9)
    page = "\n".join([head, *map(str, stages)]) + "\n"
    print(page)
    if output:
        output.write_text(page)


if __name__ == "__main__":
    main()
