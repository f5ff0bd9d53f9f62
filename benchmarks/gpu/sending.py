"""Weights that a trainer sends to an engine, beside the same weights read from disk: by NCCL to another GPU.

Two processes of one GPU cannot meet by NCCL, so there, as on a CPU, gloo carries them.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu.check import Differs, Found, Place, largest, require_close
from services.engines.http_engine import open_http
from services.engines.sglang import EngineClient
from services.engines.weight_buckets import buckets_in
from services.engines.weight_group import WeightGroup
from services.process.children import die_with_parent
from services.process.ports import free_port
from tests.core.learner_support import write_model

_TIMEOUT_S = 60.0
# The same bits in the same arithmetic.
BOUND = 1e-6
IDS = list(range(2, 40))


def sending(place: Place) -> Found:
    """The log-probs of an engine after a version was sent to it, and after it read that version."""
    first, second = (write_model(place.folder / f"sent-{seed}", seed=seed) for seed in (1, 2))
    is_on_another = place.device != "cpu" and place.num_gpus > 1
    return sent(first, second, place, engine=1 if is_on_another else 0, through="cuda:0" if is_on_another else "cpu")


def sent(first: Path, second: Path, place: Place, *, engine: int, through: str, bucket_bytes: int = 2**16) -> Found:
    """``engine``: the number of its GPU, where there is one; ``through``: where tensors are sent from."""
    port = free_port()
    device = place.device if place.device == "cpu" else f"cuda:{engine}"
    command = [sys.executable, "-m", "services.engine", "--model", str(first), "--port", str(port), "--device", device]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, preexec_fn=die_with_parent())
    try:
        return asyncio.run(_compare(process, f"http://127.0.0.1:{port}", first, second, through, bucket_bytes))
    finally:
        process.terminate()
        process.wait()


async def _compare(
    process: subprocess.Popen[bytes], url: str, first: Path, second: Path, through: str, bucket_bytes: int
) -> Found:
    async with open_http() as http, asyncio.timeout(_TIMEOUT_S):
        engine = EngineClient(url, http)
        while not await engine.is_ready():
            if process.poll() is not None:
                raise Differs(f"the engine ended with {process.returncode} before it was ready")
            await asyncio.sleep(0.1)
        before, _ = await engine.score(IDS)
        await engine.pause()
        group = await WeightGroup.join([engine], device=through)
        buckets = buckets_in(second, bucket_bytes)
        began = time.perf_counter()
        if failed := await group.send(buckets, "job/1/1"):
            raise Differs(f"sending failed: {failed.why}")
        seconds = time.perf_counter() - began
        await engine.resume()
        sent, label = await engine.score(IDS)
        if label != "job/1/1":
            raise Differs(f"the engine calls what was sent {label!r}")
        await group.close()
        await engine.load_weights(second, "job/1/2")
        read, _ = await engine.score(IDS)
    if largest(abs(one - two) for one, two in zip(before, read, strict=True)) <= BOUND:
        raise Differs("both models have the same log-probs: nothing was compared")
    apart = largest(abs(one - two) for one, two in zip(sent, read, strict=True))
    num = sum(bucket.data.numel() for bucket in buckets)
    said = f"{num / 2**20:.2f} MiB in {len(buckets)} blocks, {seconds:.2f} s"
    return Found(f"{require_close(apart, BOUND, 'log-probs')}; {said}", {"bytes_per_s": num / seconds})
