"""Environments in a service elsewhere: what holds for hosts beside the worker holds there, and the wall stands."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gspo_core.env import EnvironmentFailed, InvalidEnvironment, Timeouts
from gspo_core.types import StopReason
from services.hosts.remote import RemoteHosts, _connect
from services.hosts.server import HostOrder
from services.hosts.session import HostedEnvironment
from services.process.ports import free_port
from tests.patience import HANG_S
from tests.services.hosts.test_host import WORLDS, begun, call, gone, processes, said

TOKEN = "a token for the tests"
DEADLINE_S = HANG_S
ROOT = Path(__file__).parents[3]

CALLER = """
import socket

class Caller:
    tasks = [{}]
    replayable = True

    def reset(self):
        return "Call."

    def reach(self, port: int) -> str:
        \"\"\"Connect.

        Args:
            port: where to
        \"\"\"
        try:
            socket.create_connection(("127.0.0.1", port), 5).close()
        except Exception as error:
            return type(error).__name__
        return "reached"

    def get_reward(self):
        return 0.0
"""

Open = Callable[..., Awaitable[HostedEnvironment]]


class Service:
    """The real process, on a port of its own; ``start`` again after ``kill`` takes the same port."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.port = free_port()  # one that nobody is given between two starts
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self._directory),
            "TMPDIR": str(self._directory),
            "OMP_NUM_THREADS": "1",
            "GSPO_DATA_DIR": str(self._directory),
            "GSPO_ENV_NETWORK": "true",
            "GSPO_ENV_WRITABLE": str(self._directory),
            "GSPO_ENV_TOKEN_SHA256": hashlib.sha256(TOKEN.encode()).hexdigest(),
            "GSPO_HEALTH_FILE": str(self._directory / "health"),
            "GSPO_LOG_FORMAT": "json",
            "PYTHONPATH": str(ROOT),
        }
        program = [sys.executable, "-m", "services.hosts.service", "--port", str(self.port)]
        self.process = subprocess.Popen(program, env=environment, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if "listening" in line:
                assert json.loads(line)["port"] == self.port
                return
        raise AssertionError("the service ended")

    def end(self, how: signal.Signals) -> int:
        assert self.process is not None
        assert self.process.stderr is not None
        self.process.send_signal(how)
        status = self.process.wait(DEADLINE_S)
        self.process.stderr.close()
        return status

    def hosts(self, token: str = TOKEN) -> RemoteHosts:
        return RemoteHosts([f"127.0.0.1:{self.port}"], token)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    running = Service(tmp_path_factory.mktemp("service"))
    running.start()
    yield running
    assert running.end(signal.SIGTERM) == 0


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Service]:
    """One that a test starts and ends; where the test fails before, it ends here."""
    made = Service(tmp_path)
    yield made
    if made.process is not None and made.process.poll() is None:
        made.end(signal.SIGKILL)


@pytest.fixture
def counts() -> Counter[str]:
    return Counter()


@pytest.fixture
async def host(service: Service, counts: Counter[str]) -> AsyncIterator[Open]:
    opened: list[HostedEnvironment] = []

    async def start(name: str, on: Service = service, **hosting: Any) -> HostedEnvironment:
        order = HostOrder(f"{WORLDS}:{name}", {}, hosting, boot_timeout_s=DEADLINE_S)
        opened.append(await HostedEnvironment.open(order, lambda one: counts.update([one]), on.hosts().boot))
        return opened[-1]

    yield start
    pids = [pid for environment in opened for pid in environment.pool.pids]
    for environment in opened:
        await environment.close()
    await gone(*pids)


async def test_an_episode_is_played_as_it_would_be_beside_us(host: Open) -> None:
    environment = await host("Light")
    session = await begun(environment, 3)
    assert [said(await session.act(call("add", amount=amount))) for amount in (1, 2)] == ["4", "6"]
    assert await session.score() == (6.0, {})
    await session.close()
    assert session.close_failure is None
    assert environment.capacity == 256 * 64
    assert environment.reward_range == (-1.0, 10.0)


@pytest.mark.parametrize("world", ["Light", "Shared", "Alone"])
async def test_who_hangs_pays_and_its_neighbour_goes_on(host: Open, counts: Counter[str], world: str) -> None:
    environment = await host(world)
    guilty, neighbour = await begun(environment), await begun(environment, int(world != "Alone"))
    if world != "Alone":
        await neighbour.act(call("add", amount=1))
    observation = await guilty.act(call("block", seconds=60))
    assert observation.stop_reason is StopReason.TOOL_TIMEOUT
    if world != "Alone":
        assert said(await neighbour.act(call("add", amount=1))) == "3"
    assert counts["host/hung"] >= 1
    await guilty.close()
    await neighbour.close()


async def test_who_crashes_its_process_pays(host: Open, counts: Counter[str]) -> None:
    session = await begun(await host("Alone"))
    observation = await session.act(call("die", how="exit"))
    assert observation.stop_reason is StopReason.ENV_CRASH
    assert counts["host/crashed"] == 1


async def test_a_service_that_is_killed_costs_no_session(own: Service, host: Open, counts: Counter[str]) -> None:
    own.start()
    environment = await host("Light", own)
    sessions = [await begun(environment, number) for number in range(3)]
    for session in sessions:
        await session.act(call("add", amount=1))
    pids = await processes(environment)
    own.end(signal.SIGKILL)
    await gone(*pids)
    acting = [asyncio.create_task(session.act(call("add", amount=1))) for session in sessions]
    await asyncio.sleep(0)
    own.start()
    assert [said(await one) for one in acting] == ["2", "3", "4"]
    assert counts["host/sessions_restored"] == 3
    for session in sessions:
        await session.close()
    await environment.close()
    own.end(signal.SIGTERM)


PAYMENTS = """
import asyncio, pathlib

class Payments:
    tasks = eval_tasks = [{}]

    def __init__(self, books):
        self.books = pathlib.Path(books)

    async def reset(self):
        self.num_paid = 0
        return "Pay."

    async def pay(self) -> str:
        '''Pay.'''
        with self.books.open("a") as file:
            file.write("paid\\n")
        while self.books.with_name("held").exists():
            await asyncio.sleep(0.01)
        self.num_paid += 1
        return str(self.num_paid)

    async def snapshot(self):
        return str(self.num_paid).encode()

    async def restore(self, state):
        self.num_paid = int(state)

    async def get_reward(self):
        return float(self.num_paid)
"""


async def test_who_is_asked_to_leave_ends_what_is_under_way_and_nothing_is_done_twice(
    own: Service, tmp_path: Path
) -> None:
    books, held = tmp_path / "books", tmp_path / "held"
    (tmp_path / "payments.py").write_text(PAYMENTS)
    held.touch()
    own.start()
    order = HostOrder(f"{tmp_path}/payments.py:Payments", {"books": str(books)}, boot_timeout_s=DEADLINE_S)
    environment = await HostedEnvironment.open(order, boot=own.hosts().boot)
    session = await begun(environment, limits=Timeouts(step_timeout_s=60))
    paying = asyncio.create_task(session.act(call("pay")))
    assert own.process is not None
    async with asyncio.timeout(HANG_S):
        while not books.exists():
            await asyncio.sleep(0.01)
        own.process.send_signal(signal.SIGTERM)
        while await is_served(own.port):
            await asyncio.sleep(0.01)
        held.unlink()
        assert said(await paying) == "1"
    assert await asyncio.to_thread(own.process.wait, HANG_S) == 0
    assert own.process.stderr is not None
    own.process.stderr.close()
    own.start()
    assert said(await session.act(call("pay"))) == "2"
    assert books.read_text().splitlines() == ["paid", "paid"]
    await session.close()
    await environment.close()
    assert await asyncio.to_thread(own.end, signal.SIGTERM) == 0


async def test_what_is_asked_of_a_service_that_leaves_is_done_elsewhere(own: Service, tmp_path: Path) -> None:
    """It does not begin it, and says so: nobody need fear that it was done."""
    books, held = tmp_path / "books", tmp_path / "held"
    (tmp_path / "payments.py").write_text(PAYMENTS)
    held.touch()
    own.start()
    order = HostOrder(f"{tmp_path}/payments.py:Payments", {"books": str(books)}, boot_timeout_s=DEADLINE_S)
    environment = await HostedEnvironment.open(order, boot=own.hosts().boot)
    early, late = [await begun(environment, limits=Timeouts(step_timeout_s=60)) for _ in range(2)]
    paying = asyncio.create_task(early.act(call("pay")))
    assert own.process is not None
    async with asyncio.timeout(HANG_S):
        while not books.exists():
            await asyncio.sleep(0.01)
        own.process.send_signal(signal.SIGTERM)
        while await is_served(own.port):
            await asyncio.sleep(0.01)
        paying_late = asyncio.create_task(late.act(call("pay")))
        await asyncio.sleep(0)
        held.unlink()
        assert said(await paying) == "1"
    assert await asyncio.to_thread(own.process.wait, HANG_S) == 0
    assert own.process.stderr is not None
    own.process.stderr.close()
    own.start()
    assert said(await paying_late) == "1"
    assert books.read_text().splitlines() == ["paid", "paid"]
    for session in (early, late):
        await session.close()
    await environment.close()
    assert await asyncio.to_thread(own.end, signal.SIGTERM) == 0


async def is_served(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionError:  # refused, or ended by a listener that was closed in this moment
        return False
    writer.close()
    return True


async def test_what_a_worker_asked_for_ends_with_its_connection(service: Service, host: Open) -> None:
    environment = await host("Light")
    session = await begun(environment)
    (pid,) = await processes(environment)
    await environment.close()
    await gone(pid)
    with pytest.raises(EnvironmentFailed):
        await session.act(call("add", amount=1))


async def test_without_the_token_nothing_is_loaded(service: Service) -> None:
    order = HostOrder(f"{WORLDS}:Light", boot_timeout_s=5.0)  # all of it is waited for: long enough for one refusal
    with pytest.raises(InvalidEnvironment, match="GSPO_ENV_TOKEN"):
        await HostedEnvironment.open(order, boot=service.hosts("another").boot)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<I", 1 << 31),
        struct.pack("<I", 5000) + b"x" * 5000,
        struct.pack("<I", 4) + b"null",
        struct.pack("<I", 2) + b"{}",
    ],
)
async def test_who_does_not_speak_the_protocol_is_cut_off(service: Service, sent: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
    writer.write(sent)
    async with asyncio.timeout(DEADLINE_S):
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
    writer.close()


async def test_an_environment_that_cannot_be_loaded_is_named(service: Service) -> None:
    order = HostOrder("environments.calculator:NoSuchClass", boot_timeout_s=DEADLINE_S)
    with pytest.raises(InvalidEnvironment, match="NoSuchClass"):
        await HostedEnvironment.open(order, boot=service.hosts().boot)


async def test_uploaded_files_are_refused_with_what_to_do(service: Service, tmp_path: Path) -> None:
    order = HostOrder("world:World", paths=[str(tmp_path)])
    with pytest.raises(InvalidEnvironment, match=r"path/to/file\.py:Class"):
        await HostedEnvironment.open(order, boot=service.hosts().boot)


async def test_networks_that_an_environment_may_reach_are_kept(service: Service, tmp_path: Path) -> None:
    (tmp_path / "caller.py").write_text(CALLER)
    for networks, answer in ((None, "reached"), ([], "AddressRefused"), (["127.0.0.0/8"], "reached")):
        hosting = {"network": True, "tier": "wall"} if networks is None else {}
        order = HostOrder(f"{tmp_path}/caller.py:Caller", {}, hosting, networks=networks, boot_timeout_s=DEADLINE_S)
        environment = await HostedEnvironment.open(order, boot=service.hosts().boot)
        session = await begun(environment)
        assert answer in said(await session.act(call("reach", port=service.port))), networks
        await session.close()
        await environment.close()


async def test_a_service_that_is_away_is_waited_for_but_not_for_ever(tmp_path: Path) -> None:
    away = Service(tmp_path)
    away.port = 9  # nobody listens there
    begun_at = time.monotonic()
    with pytest.raises(InvalidEnvironment, match=r"127\.0\.0\.1:9 within 1s"):
        await HostedEnvironment.open(
            HostOrder("environments.calculator:Calculator", boot_timeout_s=1.0), boot=away.hosts().boot
        )
    assert time.monotonic() - begun_at < DEADLINE_S


async def test_who_is_cancelled_while_it_connects_leaves_no_socket_open() -> None:
    """Else whoever collects it later is told of an unclosed socket."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()  # what other tests have left is theirs
    with contextlib.ExitStack() as sockets:
        full = sockets.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        sockets.enter_context(socket.create_connection(full.getsockname()))  # no second one is taken in
        before = open_sockets()
        connecting = asyncio.create_task(_connect([f"127.0.0.1:{full.getsockname()[1]}"]))
        async with asyncio.timeout(DEADLINE_S):
            while open_sockets() == before:
                await asyncio.sleep(0)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            del connecting
            gc.collect()
        assert [one.message for one in said if one.category is ResourceWarning] == []


def open_sockets() -> set[str]:
    links = set[str]()
    for one in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of this listing
            links.add(os.readlink(f"/proc/self/fd/{one}"))
    return {link for link in links if link.startswith("socket:")}


def test_its_probe_says_whether_it_lives(service: Service, tmp_path: Path) -> None:
    assert service.process is not None

    def status(file: Path) -> int:
        probe = [sys.executable, "-m", "services.process.health", str(file), "--ready"]
        return subprocess.run(probe, cwd=ROOT, capture_output=True, check=False).returncode

    assert status(service._directory / "health") == 0
    assert status(tmp_path / "none") == 1
    said = json.loads((service._directory / "health").read_text())
    other = tmp_path / "other"

    def says(**changes: object) -> int:
        other.write_text(json.dumps(said | {"at": time.monotonic()} | changes))
        return status(other)

    assert says() == 0
    assert says(at=time.monotonic() - 3600) == 1  # it hangs
    assert says(at=time.monotonic() + 3600) == 1  # of before the machine was started again
    assert says(ready=False) == 1
    assert says(born="1") == 1  # an earlier process left it behind, which had the same number
    assert says(pid=2**22 + 1) == 1  # it is dead
    other.write_text("{}")
    assert status(other) == 1
