"""The scripted engine does what it is told: answers, clock, faults, versions of SGLang; and its page is true."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.engines.protocol import EngineDirty, EngineProtocolError, EngineUnavailable, Generation
from services.engines.sglang import EngineClient
from tests.apparatus.scripted_engine import Fault, ScriptedEngine, ScriptedTransport
from tests.patience import HANG_S

ROOT = Path(__file__).parents[3]


@pytest.fixture
async def network() -> AsyncIterator[tuple[ScriptedTransport, httpx.AsyncClient]]:
    transport = ScriptedTransport({})
    async with httpx.AsyncClient(transport=transport) as http:
        yield transport, http


def ask(client: EngineClient, num: int = 5, **changes: Any) -> asyncio.Task[Generation]:
    return asyncio.create_task(
        client.generate([1, 2, 3], **{"max_new_tokens": num, "temperature": 1.0, "stop_token_ids": [], **changes})
    )


async def until_asked(engine: ScriptedEngine) -> None:
    async with asyncio.timeout(HANG_S):
        while not (engine.waiting or engine.running):
            await asyncio.sleep(0)


async def test_a_tick_is_a_token_and_nothing_happens_between_two(
    network: tuple[ScriptedTransport, httpx.AsyncClient],
) -> None:
    transport, http = network
    engine = transport.engines["e"] = ScriptedEngine("w", tick_s=None)
    call = ask(EngineClient("http://e", http))
    await until_asked(engine)
    await engine.advance(4)
    await asyncio.sleep(0.05)
    assert not call.done()
    assert len(engine.running[0].output_ids) == 4
    await engine.advance(1)
    assert len((await call).output_ids) == 5


async def test_a_seed_and_a_request_id_decide_what_is_said(
    network: tuple[ScriptedTransport, httpx.AsyncClient],
) -> None:
    transport, http = network
    said = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        engine = transport.engines[name] = ScriptedEngine("w", seed=seed, tick_s=None)
        call = ask(EngineClient(f"http://{name}", http), rid="0" * 32)
        await until_asked(engine)
        await engine.advance(5)
        said.append((await call).output_ids)
    assert said[0] == said[1] != said[2]


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("drop", EngineUnavailable),
        ("error", EngineUnavailable),
        ("die", EngineUnavailable),
        ("garbage", EngineProtocolError),
    ],
)
async def test_a_fault_strikes_when_it_is_due_and_as_often_as_told(
    network: tuple[ScriptedTransport, httpx.AsyncClient], kind: Any, error: type[Exception]
) -> None:
    transport, http = network
    engine = transport.engines["e"] = ScriptedEngine("w", faults=[Fault("/generate", kind, after=1)])
    ticking = asyncio.create_task(engine.run())
    client = EngineClient("http://e", http)
    assert len((await ask(client)).output_ids) == 5
    with pytest.raises(error):
        await ask(client)
    if kind == "die":
        with pytest.raises(EngineUnavailable):
            await ask(client)
    else:
        assert len((await ask(client)).output_ids) == 5
    ticking.cancel()


@pytest.mark.parametrize(
    ("profile", "ready", "session", "old"),
    [("0.5.19", 404, 404, 200), ("0.5.20", 200, 404, 200), ("0.5.21", 200, 200, 404)],
)
async def test_it_plays_other_versions_of_sglang(
    network: tuple[ScriptedTransport, httpx.AsyncClient], profile: str, ready: int, session: int, old: int
) -> None:
    transport, http = network
    transport.engines["e"] = ScriptedEngine("w", profile=profile)
    assert (await http.get("http://e/ready")).status_code == ready
    assert (await http.post("http://e/begin_weight_update", json={})).status_code == session
    assert (await http.get("http://e/get_weight_version")).status_code == old
    client = EngineClient("http://e", http)
    assert await client.is_ready()  # also where there is no such path
    assert str(await client.profile()) == profile
    refused = await http.post("http://e/generate", json={"input_ids": [1], "sampling_params": {"bogus": 1}})
    assert refused.status_code == 500  # from 0.5.22 on a 400


def test_the_example_of_its_page_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "engines.md").read_text(), re.DOTALL)
    ran = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, cwd=ROOT, timeout=HANG_S)
    assert (ran.returncode, ran.stdout) == (0, "the connection was cut, as ordered\n"), ran.stderr


@pytest.mark.parametrize("kind", ["drop", "error", "refuse"])
async def test_weights_that_were_loaded_and_are_not_told_are_unknown(
    network: tuple[ScriptedTransport, httpx.AsyncClient], tmp_path: Path, kind: Any
) -> None:
    """The load succeeded: nobody may take the old weights for those that serve on."""
    transport, http = network
    engine = transport.engines["e"] = ScriptedEngine("w")
    client = EngineClient("http://e", http)
    await client.pause("retract")
    engine.faults.append(Fault("/model_info", kind, times=10**6))
    with pytest.raises(EngineDirty, match="does not say what it holds"):
        await client.load_weights(tmp_path, "job/1/1")
