"""An engine with keys does nothing for those without; whoever lacks one is told which setting names it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from services.engines.acquaintance import Acquaintance, acquaint
from services.engines.keys import SETTING, EngineKeys, KeyPair, NoKeyForEngine, is_routable
from services.engines.kinds import open_engines
from services.engines.protocol import EngineDirty, EngineKeyRefused
from services.engines.sglang import EngineClient
from services.process.ports import free_port
from services.process.settings import load_settings
from tests.apparatus.warm_python import WarmPython
from tests.patience import HANG_S
from tests.services.engines.engine_kit import EngineProcess, Models

USE, CONTROL = "use-of-engines", "control-of-engines"
SECRET = f"*={USE},admin@*={CONTROL}"


def secrets(text: str) -> list[SecretStr]:
    return [SecretStr(one) for one in text.split(",") if one]


def keys(text: str) -> EngineKeys:
    return EngineKeys.read(secrets(text))


@pytest.fixture(scope="module")
def guarded(models: Models, warm_python: WarmPython) -> Iterator[EngineProcess]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SETTING, SECRET)
        engine = EngineProcess(models.paths[0], python=warm_python.path)
    yield engine
    engine.close()


async def test_without_a_key_only_health_is_told(guarded: EngineProcess) -> None:
    async with httpx.AsyncClient(base_url=guarded.url, trust_env=False) as http:
        for path in ("/health", "/ready"):
            assert (await http.get(path)).status_code == 200
        for path in ("/model_info", "/server_info", "/v1/loads", "/ping", "/nothing"):
            refused = await http.get(path)
            assert (refused.status_code, refused.json()) == (401, {"error": "Unauthorized"})
        for key in ("none", USE, CONTROL[:-1], f"{CONTROL}x", "ü"):
            header = {"Authorization": f"Bearer {key}".encode()}
            assert (await http.post("/pause_generation", json={"mode": "abort"}, headers=header)).status_code == 401
        assert (await http.get("/ready")).status_code == 200, "nobody has paused it"


async def test_use_and_control_are_apart(guarded: EngineProcess, models: Models) -> None:
    async with open_engines(keys(SECRET)) as connect:
        engine = connect(guarded.url)
        answer = await engine.generate([1, 2], max_new_tokens=2, temperature=1.0, stop_token_ids=[])
        assert len(answer.output_ids) == 2
        await engine.pause("abort")
        await engine.load_weights(models.paths[1], "one")
        await engine.resume()
    async with open_engines(keys(f"*={USE}")) as connect:
        worker = connect(guarded.url)
        assert (await worker.info()).label == "one"
        await worker.generate([1], max_new_tokens=1, temperature=1.0, stop_token_ids=[])
        with pytest.raises(EngineKeyRefused, match=re.escape(f"{SETTING}=admin@{guarded.url[7:]}=KEY")):
            await worker.load_weights(models.paths[0], "zero")
        assert (await worker.info()).label == "one"


@pytest.mark.parametrize("held", ["", "*=not-that-one", "127.0.0.1=not-that-one,*=" + USE])
async def test_a_missing_and_a_wrong_key_say_what_to_do(guarded: EngineProcess, held: str) -> None:
    async with open_engines(keys(held)) as connect:
        with pytest.raises(EngineKeyRefused) as refused:
            await connect(guarded.url).info()
    assert f"{SETTING}={guarded.url[7:]}=KEY" in str(refused.value)
    assert "not-that-one" not in str(refused.value)
    assert not isinstance(refused.value, EngineDirty)


async def test_doctor_tells_a_refused_engine_from_a_fine_one_and_one_that_is_away(guarded: EngineProcess) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    found = await acquaint([guarded.url, nobody], secrets(SECRET))
    assert [one.acquaintance for one in found] == [Acquaintance.FINE, Acquaintance.AWAY]
    (refused,) = await acquaint([guarded.url], secrets(f"*={USE}"))
    assert refused.acquaintance is Acquaintance.REFUSED
    assert SETTING in refused.text
    assert USE not in refused.text


async def test_an_engine_that_others_can_control_is_named() -> None:
    """By a transport of its own: no test listens where others reach it."""

    def respond(request: httpx.Request) -> httpx.Response:
        is_open = request.url.host == "open.example"
        if request.method == "POST" and not is_open and "Authorization" not in request.headers:
            return httpx.Response(401)
        return httpx.Response(200, json={"version": "0.5.23"})

    async with httpx.AsyncClient(transport=httpx.MockTransport(respond)) as http:
        hosts = {"open.example": True, "closed.example": False, "127.0.0.1": False}
        for host, is_unguarded in hosts.items():
            client = EngineClient(f"http://{host}:1", http, KeyPair("use", "control"))
            assert (await client.capabilities()).is_unguarded is is_unguarded


def test_no_key_is_in_an_argument_a_log_or_a_representation(models: Models) -> None:
    port = free_port()
    command = [sys.executable, "-m", "services.engine", "--model", str(models.paths[0]), "--port", str(port)]
    given = {**os.environ, SETTING: SECRET, "GSPO_LOG_LEVEL": "debug", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    said = b""
    while b'"serving"' not in said:
        line = process.stdout.readline()
        assert line, said
        said += line
    arguments = Path(f"/proc/{process.pid}/cmdline").read_bytes()
    httpx.get(f"http://127.0.0.1:{port}/model_info", headers={"Authorization": f"Bearer {USE}"}, trust_env=False)
    process.terminate()
    said += process.stdout.read()
    process.wait()
    process.stdout.close()
    for key in (USE.encode(), CONTROL.encode()):
        assert key not in arguments + said
    assert USE not in repr(keys(SECRET))


@pytest.mark.parametrize("held", ["10.1.2.3:1=k", "elsewhere=k"])
def test_an_engine_that_no_key_is_for_does_not_start(models: Models, warm_python: WarmPython, held: str) -> None:
    command = [warm_python.path, "-m", "services.engine", "--model", str(models.paths[0]), "--port", "1"]
    ended = subprocess.run(
        command, env={**os.environ, SETTING: held}, capture_output=True, text=True, check=False, timeout=HANG_S
    )
    assert ended.returncode == 2
    assert SETTING in ended.stderr
    assert "no key for this engine" in ended.stderr


def test_the_most_specific_entry_decides() -> None:
    held = keys("*=any,admin@*=boss,a.example=a,a.example:2=a2,[::1]:5=six,admin@a.example:2=boss2")
    wanted = {
        "http://other:1": KeyPair("any", "boss"),
        "http://A.example:1/": KeyPair("a", "boss"),
        "http://a.example:2": KeyPair("a2", "boss2"),
        "kind+http://a.example:2": KeyPair("a2", "boss2"),
        "https://[::1]:5": KeyPair("six", "boss"),
    }
    assert {url: held.for_engine(url) for url in wanted} == wanted
    assert EngineKeys().for_engine("http://a") == KeyPair()
    assert KeyPair("use").shown(for_control=True) == "use"


@pytest.mark.parametrize(
    ("names", "found"),
    [(["0.0.0.0", "node-1"], KeyPair("one")), (["0.0.0.0", "node-2"], KeyPair("other"))],
)
def test_an_engine_is_known_by_the_name_of_its_machine(names: Sequence[str], found: KeyPair) -> None:
    assert keys("node-1:7=one,*=other").of_engine(names, 7) == found
    assert EngineKeys().of_engine(names, 7) == KeyPair()
    with pytest.raises(NoKeyForEngine, match=names[1]):
        keys("node-3:7=one").of_engine(names, 7)


def test_the_keys_of_the_page_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs" / "engines.md").read_text()
    lines = re.findall(rf"export {SETTING}='(.*?)'", page)
    read = []
    for line in lines:
        monkeypatch.setenv(SETTING, line)
        read.append(EngineKeys.read(load_settings().engine_keys))
    both, apart = read
    assert both.for_engine("http://any:1") == KeyPair("KEY", "CONTROL")
    assert apart.for_engine("http://10.0.0.7:30000") == KeyPair("KEY")
    assert apart.for_engine("http://10.0.0.8:30000") == KeyPair("OTHER")


def test_loopback_is_not_routable() -> None:
    near = ["http://127.0.0.1:1", "http://127.3.4.5", "http://localhost:9", "http://[::1]:1", "other+http://127.0.0.1"]
    assert not any(map(is_routable, near))
    assert all(map(is_routable, ["http://10.0.0.1", f"http://{socket.gethostname()}-x", "http://[2001:db8::1]:1"]))
