"""Orders to a line, and messages that are whole and wrong: each is refused by the check that it is meant for."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

import httpx
import msgspec
import numpy as np
import pytest

from gspo_core.codec import SegmentRejected, decode, encode
from gspo_core.types import EpisodeKey, Segment
from gspo_core.versions import EngineLabel
from services.engines.protocol import EngineProtocolError, EngineUnavailable
from services.engines.sglang import EngineClient
from services.process.ports import free_port
from services.state.client import connect
from services.state.keys import job_key
from services.state.server import RedisServer
from tests.chaos.damage import damage_record
from tests.chaos.engine import serve
from tests.chaos.lies import ANSWER_MARK, LIES, bit_turned
from tests.chaos.lines import Line, Order, to_port
from tests.chaos.talk import write_tokenizer

LABEL = "job_01m817nc94cha430km0z6vq20j/2/17"


async def ask(engine: EngineClient) -> set[str]:
    """The labels of an answer."""
    generation = await engine.generate([1, 2, 3], max_new_tokens=4, temperature=1.0, stop_token_ids=[])
    return {span.label for span in generation.spans}


async def load_when_it_is_up(engine: EngineClient, weights: Path) -> None:
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(EngineUnavailable):
                return await engine.load_weights(weights, LABEL)
            await asyncio.sleep(0.05)


async def test_an_engine_lies_once_and_tells_the_truth_again(tmp_path: Path) -> None:
    """Through a real line: the label is another job's, or of a version that is none, or a log-prob is out of range."""
    write_tokenizer(tmp_path / "model")
    (weights := tmp_path / "v17").mkdir()
    port, stop, done = free_port(), asyncio.Event(), list[str]()
    serving = asyncio.create_task(serve(tmp_path / "model", port, 0.0, stop))
    line = await Line(to_port(port)).open()
    async with httpx.AsyncClient() as http:
        engine = EngineClient(f"http://127.0.0.1:{line.port}", http)
        await load_when_it_is_up(engine, weights)
        for lie, change in LIES.items():
            line.order(Order(ANSWER_MARK, reply=change, done=lambda lie=lie: done.append(lie)))  # type: ignore[misc]
            if lie == "improbable":
                with pytest.raises(EngineProtocolError, match="out of range"):
                    await ask(engine)
            else:
                (label,) = await ask(engine)
                found, true = EngineLabel.parse(label), EngineLabel.parse(LABEL)
                assert (found.job == true.job, found.version == true.version) == (
                    lie != "another job",
                    lie != "no version",
                )
            assert await ask(engine) == {LABEL}
    assert done == list(LIES)
    stop.set()
    await serving
    await line.close()


def segment() -> Segment:
    return Segment(
        key=EpisodeKey("job_a", 7, 1),
        attempt=0,
        branch=0,
        index=0,
        turn=0,
        version=3,
        temperature=1.0,
        engine_id="http://e",
        token_ids=np.arange(40, dtype=np.int32),
        action_mask=np.arange(40) >= 20,
        behavior_logprobs=np.where(np.arange(40) >= 20, -1.0, 0.0).astype(np.float32),
    )


@pytest.mark.parametrize("place", [0.0, 0.3, 0.999])
def test_a_turned_bit_is_one_that_the_checksum_finds(place: float) -> None:
    payload, told = encode(segment()), list[tuple[str, int]]()
    change = bit_turned(place, lambda job, group: told.append((job, group)))
    request = b"*9\r\n$5\r\nFCALL\r\n$6\r\nappend\r\n$%d\r\n%b\r\n" % (len(payload), payload)
    changed = change(request)
    assert changed is not None
    assert told == [("job_a", 7)]
    assert sum(one != other for one, other in zip(request, changed, strict=True)) == 1
    with pytest.raises(SegmentRejected):
        decode(changed[changed.index(b"GSEG") : changed.index(b"GSEG") + len(payload)])
    assert change(request[: len(request) // 2]) is None  # the rest is in the next piece
    assert change(b"GSEG") is None
    assert len(told) == 1


async def test_only_a_record_that_is_there_becomes_garbage(tmp_path: Path) -> None:
    key = job_key("job_a", "episodes")
    with RedisServer.spawn(tmp_path / "redis") as server:
        client = connect(server.url)
        told = list[int]()
        assert await damage_record(client, "job_a", "episodes", random.Random(1), told.append) is None
        ended = msgspec.msgpack.encode({"done": True})
        await client.hset(key, "7:0", ended)
        assert await damage_record(client, "job_a", "episodes", random.Random(1), told.append) is None
        assert told == []
        await client.hset(key, "12:1", b"a record")
        assert await damage_record(client, "job_a", "episodes", random.Random(1), told.append) == 12
        assert told == [12]
        assert await client.hget(key, "12:1") != b"a record"
        await client.aclose()
