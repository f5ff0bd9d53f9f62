"""Weights that the service's own sender sends to the scripted engine are compared with what is published."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path

import httpx

from services.engines.protocol import EngineUnavailable
from services.engines.sglang import EngineClient
from services.engines.weight_buckets import buckets_in
from services.engines.weight_group import WeightGroup
from services.process.ports import free_port
from tests.apparatus.warm_python import program
from tests.chaos.model import write_model
from tests.chaos.receiver import OTHERS, WEIGHTS

ROOT = Path(__file__).parents[2]
JOB = "job_01m817nc94cha430km0z6vq20j"


async def test_what_was_sent_is_noted_as_what_was_published_or_as_something_else(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    loads, data = tmp_path / "loads.jsonl", tmp_path / "data"
    write_model(folder := data / "jobs" / JOB / "weights" / "v3")
    port = free_port()
    # A process of its own: torch keeps one list of groups in each.
    process = await asyncio.create_subprocess_exec(
        *(program(), "-m", "tests.chaos.engine"),
        *("--model", str(tmp_path / "model"), "--port", str(port), "--loads", str(loads), "--data", str(data)),
        cwd=ROOT,
    )
    try:
        async with httpx.AsyncClient() as http:
            engine = EngineClient(f"http://127.0.0.1:{port}", http)
            await until_it_answers(engine)
            group = await WeightGroup.join([engine])
            assert await group.send(buckets_in(folder), f"{JOB}/1/3") is None
            assert (await engine.info()).label == f"{JOB}/1/3"
            others = buckets_in(folder)
            others[0].data.zero_()
            assert await group.send(others, f"{JOB}/1/3") is None
            await group.close()
    finally:
        process.terminate()
        await process.wait()
    first, second = [json.loads(line) for line in loads.read_text().splitlines()]
    assert (first["label"], first["path"]) == (f"{JOB}/1/3", str(folder))
    assert first["files"][WEIGHTS] == hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    assert second["files"] == {WEIGHTS: OTHERS}


async def until_it_answers(engine: EngineClient) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                await engine.info()
                return
            except EngineUnavailable:
                await asyncio.sleep(0.05)
