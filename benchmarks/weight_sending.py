"""What does it cost to send a version to four engines beside one, and for how long are they paused? gloo, on a CPU.

Run: ``python -m benchmarks.weight_sending [--engines 1 4] [--rounds 5]``, which prints its rows. Real embedded engines
in bfloat16, a random Qwen3 of some 100 million parameters. *Sending* is the broadcast alone: CPU seconds of the sender
and of all engines for each GB of the model. *A version* is what a trainer does: publish, stage, prepare, pause, send,
resume; ``--pool-only`` measures that alone, and so runs on releases before the broadcast too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from services.engines.http_engine import open_http
from services.engines.sglang import EngineClient
from services.files.job_dir import JobDir
from services.files.weights import WeightStore
from services.state.queue import Bus
from services.state.server import RedisServer, connect
from services.state.store import Store
from services.trainer.fleet.engines import EnginePool
from services.trainer.fleet.weight_transport import ThroughGroup
from tests.services.engines.engine_kit import EngineProcess

SHAPE = {
    "vocab_size": 32_000,
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
FILE = "model.safetensors"


@dataclass
class Costs:
    sender: list[float] = field(default_factory=list)
    engines: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def make_models(root: Path) -> list[Path]:
    torch.manual_seed(0)
    config = Qwen3Config(**SHAPE, max_position_embeddings=512, tie_word_embeddings=True, pad_token_id=0)
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(first := root / "m0")
    shutil.copytree(first, second := root / "m1")
    tensors = load_file(first / FILE)
    save_file({name: one + 0.001 for name, one in tensors.items()}, second / FILE, metadata={"format": "pt"})
    return [first, second]


def cpu_of(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def sending(clients: list[EngineClient], engines: list[EngineProcess], models: list[Path], rounds: int) -> Costs:
    from services.engines.weight_buckets import buckets_in
    from services.engines.weight_group import WeightGroup

    costs = Costs()
    group = await WeightGroup.join(clients)
    for number in range(rounds + 1):
        buckets = buckets_in(models[number % 2])
        size_gb = sum(bucket.data.numel() for bucket in buckets) / 1e9
        await asyncio.gather(*(client.pause() for client in clients))
        before = time.process_time(), sum(cpu_of(one.process.pid) for one in engines), time.perf_counter()
        failed = await group.send(buckets, f"job/1/{number}")
        assert failed is None, failed
        after = time.process_time(), sum(cpu_of(one.process.pid) for one in engines), time.perf_counter()
        await asyncio.gather(*(client.resume() for client in clients))
        if number:  # the first one warms up
            costs.sender.append((after[0] - before[0]) / size_gb)
            costs.engines.append((after[1] - before[1]) / size_gb)
            costs.seconds.append(after[2] - before[2])
    await group.close()
    return costs


async def versions(
    redis_url: str, root: Path, urls: list[str], models: list[Path], rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds from the publication until all serve it, and the longest pause of each version."""
    took, paused = [], []
    async with connect(redis_url) as redis, open_http() as http:
        await redis.flushall()
        await Bus(redis).load_functions()
        store = Store(redis)
        job = (await store.jobs.create('{"name": "sending"}')).id
        claim = await store.jobs.claim("trainer")
        assert claim is not None
        weights = WeightStore(JobDir(root / job))
        pool = EnginePool(
            store, job, claim.token, weights, urls, lambda url: EngineClient(url, http), transport=ThroughGroup()
        )
        async with running(pool):
            for version in range(rounds + 1):
                source = models[version % 2]
                manifest = weights.write(
                    version,
                    claim.epoch,
                    version,
                    lambda to, source=source: _copy(source, to),  # type: ignore[misc]
                )
                began = time.perf_counter()
                await pool.publish(manifest)
                await pool.wait_for(manifest, num_engines=len(urls))
                if version:
                    took.append(time.perf_counter() - began)
                    paused.append(pool.last_switch_s())
            await pool.release()
    return took, paused


@contextlib.asynccontextmanager
async def running(pool: EnginePool) -> AsyncIterator[None]:
    task = asyncio.create_task(pool.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _copy(source: Path, to: Path) -> None:
    shutil.copytree(source, to, dirs_exist_ok=True)


async def measure(arguments: argparse.Namespace, root: Path) -> None:
    models = make_models(root)
    size = (models[0] / FILE).stat().st_size
    print(f"{size / 1e6:.0f} MB, load average {os.getloadavg()[0]:.0f} at the start", flush=True)
    with RedisServer.start(root / "redis") as redis:
        for num in arguments.engines:
            engines = [EngineProcess(models[0], "--dtype", "bfloat16") for _ in range(num)]
            try:
                cells = [str(num)]
                if not arguments.pool_only:
                    async with open_http() as http:
                        clients = [EngineClient(one.url, http) for one in engines]
                        costs = await sending(clients, engines, models, arguments.rounds)
                    cells += [f"{_spread(one)}" for one in (costs.sender, costs.engines, costs.seconds)]
                folder = root / f"of-{num}"
                folder.mkdir()
                took, paused = await versions(redis.url, folder, [one.url for one in engines], models, arguments.rounds)
                cells += [_spread(paused), _spread(took), f"{os.getloadavg()[0]:.0f}"]
                print("| " + " | ".join(cells) + " |", flush=True)
            finally:
                for one in engines:
                    one.close()


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pool-only", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with TemporaryDirectory() as root:
        asyncio.run(measure(arguments, Path(root)))


if __name__ == "__main__":
    main()
