"""Sandboxes over HTTP: keys, addresses, what is repeated, what is left behind; doors, tiers and the warm pool."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from environments.sandbox import command, remote
from environments.sandbox.contract import Sandbox, Sandboxes, SandboxFailed
from environments.sandbox.local import LocalSandboxes
from environments.sandbox.remote import RemoteSandbox, over_url
from gspo_core.env import CallStatus, InvalidEnvironment, ParsedTurn, Timeouts, ToolCall
from gspo_core.outbound import AddressRefused
from gspo_core.types import Split
from services.hosts.local import LocalHosts, WallPolicy
from services.hosts.sandboxes.container import ContainerSandboxes
from services.hosts.sandboxes.offers import ConfiguredRemote
from services.hosts.sandboxes.table import NoSandbox, Table, TableFull
from services.hosts.sandboxes.warm import WarmSandboxes
from services.hosts.server import HostOrder
from services.hosts.session import HostedEnvironment
from services.hosts.venv import Interpreters
from services.hosts.walls import tiers
from services.hosts.walls.tiers import Tier
from services.process.settings import Settings
from tests.patience import HANG_S
from tests.repo.pages import ROOT
from tests.services.hosts.sandbox_kit import IMAGE, KEY, LOOPBACK, Server, at, begun, ran, served, through_door

pytestmark = pytest.mark.skipif(command.refusal() is not None, reason="this machine runs no such commands, and says so")
needs_wall = pytest.mark.skipif(tiers.WALLS[Tier.WALL].refusal() is not None, reason="the kernel offers no wall here")
HARBOR = "environments.adapters.harbor:harbor"
TASKS = ROOT / "examples" / "harbor"
DEADLINE_S = HANG_S
LONG = Timeouts(reset_timeout_s=60.0, step_timeout_s=60.0, score_timeout_s=60.0, close_timeout_s=30.0)


def until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(tmp_path_factory.mktemp("server")) as made:
        yield made


def asked(
    server: Server, method: str, path: str, body: object = None, key: str | None = KEY, **headers: str
) -> tuple[int, Any]:
    """One plain request, as anybody may send it."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE_S)
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
    try:
        connection.request(method, path, data, headers)
        answer = connection.getresponse()
        held = answer.read()
        return answer.status, json.loads(held) if held else None
    finally:
        connection.close()


# the contract


@pytest.mark.parametrize("key", [None, "", "another key"])
def test_nobody_without_the_key_is_answered(server: Server, key: str | None) -> None:
    assert asked(server, "POST", "/v1/sandboxes", {"operation": "o" * 32}, key)[0] == 401
    assert "a wrong key" in str(server.sandboxes(key or "another").refusal())


def test_what_is_asked_for_wrongly_is_refused_with_a_reason(server: Server) -> None:
    nobodys = "0" * 32
    right = {"operation": "x" * 32, "command": {}}
    for method, path, body, status in (
        ("GET", "/v1/sandboxes", None, 405),
        ("GET", "/v1/elsewhere", None, 404),
        ("POST", "/v1/sandboxes", [], 422),
        ("POST", "/v1/sandboxes", {"operation": "short"}, 422),
        ("POST", "/v1/sandboxes", b"[" * 100_000, 422),
        ("POST", "/v1/sandboxes", {"operation": "y" * 32, "base": "an image"}, 502),
        ("POST", f"/v1/sandboxes/{nobodys}/exec", right, 422),
        ("POST", f"/v1/sandboxes/{nobodys}/renew", None, 404),
        ("DELETE", f"/v1/sandboxes/{nobodys}", None, 204),
    ):
        assert asked(server, method, path, body)[0] == status, path
    assert asked(server, "POST", "/v1/sandboxes", {}, **{"Content-Length": str(1 << 40)})[0] == 413


def test_what_is_created_or_run_again_was_done_once(server: Server) -> None:
    again = {"operation": "create it just once, please"}
    first, second = (asked(server, "POST", "/v1/sandboxes", again)[1] for _ in range(2))
    assert first == second
    sandbox = begun(RemoteSandbox(server.sandboxes(), first["id"], first["root"]))
    text = {"text": "echo x >> count; cat count", "directory": at(sandbox, "work"), "home": "/", "scratch": "/"}
    run = {
        "operation": "run it just once, please",
        "command": {**text, "variables": {}, "timeout_s": 60, "most_bytes": 99},
    }
    answers = [asked(server, "POST", f"/v1/sandboxes/{first['id']}/exec", run)[1] for _ in range(2)]
    assert [one["output"] for one in answers] == ["x\n", "x\n"]
    assert ran(sandbox, "cat count").output == "x\n"
    sandbox.close()


class Cutting:
    """Stands between client and server, and cuts each connection the first time, after the server has answered: before
    the answer, or in its last byte."""

    def __init__(self, port: int, late: bool) -> None:
        self._port = port
        self._late = late
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.num_cut = 0
        self._seen: set[bytes] = set()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                ours, _ = self._listening.accept()
            except OSError:
                return
            with ours, socket.create_connection(("127.0.0.1", self._port)) as theirs:
                head, body = self._message(ours)
                theirs.sendall(head + body)
                answer = b"".join(self._message(theirs))
                line = head.split(b"\r\n", 1)[0]
                if line in self._seen:
                    ours.sendall(answer)
                else:
                    self._seen.add(line)
                    self.num_cut += 1
                    ours.sendall(answer[:-1] if self._late else b"")

    def _message(self, connection: socket.socket) -> tuple[bytes, bytes]:
        data = b""
        while b"\r\n\r\n" not in data:
            data += connection.recv(1 << 16)
        head, _, body = data.partition(b"\r\n\r\n")
        lengths = [
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
        ]
        while len(body) < sum(lengths):
            body += connection.recv(1 << 16)
        return head + b"\r\n\r\n", body

    def close(self) -> None:
        self._listening.close()


@pytest.mark.parametrize("late", [False, True])
def test_a_lost_answer_is_asked_for_again_and_nothing_happens_twice(server: Server, late: bool) -> None:
    cutting = Cutting(server.port, late)
    sandbox = begun(over_url(f"http://127.0.0.1:{cutting.port}", KEY, LOOPBACK).create())
    assert ran(sandbox, "echo x >> count; cat count").output == "x\n"
    sandbox.close()
    assert cutting.num_cut == 4  # the creation, the files, the command, the end
    cutting.close()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://127.0.0.1:8030", "not public"),
        ("http://169.254.169.254", "not public"),
        ("http://8.8.8.8", "http is only allowed"),
        ("https://user:word@8.8.8.8", "user or a password"),
        ("ftp://8.8.8.8", "scheme"),
    ],
)
def test_a_server_is_judged_by_its_address(url: str, reason: str) -> None:
    with pytest.raises(AddressRefused, match=reason):
        over_url(url, KEY, ())
    assert reason in str(ConfiguredRemote(url, KEY, ()).refusal())


def test_a_name_that_leads_elsewhere_later_is_not_followed(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    monkeypatch.setattr(remote, "check_url", lambda url, networks: None)  # as the resolver let it pass
    assert "not allowed" in str(over_url(f"http://127.0.0.1:{server.port}", KEY, ()).refusal())


# what is left behind


def test_a_sandbox_whose_user_is_gone_ends_with_its_lease(tmp_path: Path) -> None:
    with served(tmp_path, lease_s="1.0") as server:
        (folder,) = tmp_path.glob("gspo-scratch-*")
        kept = begun(server.sandboxes().create())
        made = asked(server, "POST", "/v1/sandboxes", {"operation": "o" * 32})[1]  # and never again a word
        assert Path(made["root"]).parent == folder
        until(lambda: not Path(made["root"]).exists())
        assert asked(server, "POST", f"/v1/sandboxes/{made['id']}/renew")[0] == 404
        assert ran(kept, "sleep 2; echo here").output == "here\n"  # longer than its lease
        kept.close()
        assert list(folder.iterdir()) == []


def test_a_server_that_ends_leaves_nothing_and_the_next_one_sweeps_after_one_that_was_killed(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        server.sandboxes().create()
        server.end(signal.SIGKILL)
        assert list(tmp_path.glob("gspo-scratch-*/*"))
    with served(tmp_path) as server:
        server.sandboxes().create()
        assert server.end() == 0
    assert list(tmp_path.glob("gspo-scratch-*")) == []


def test_there_are_no_more_than_the_operator_wants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "RETRY_S", 0.01)
    with served(tmp_path, most="1") as server:
        first = server.sandboxes().create()
        with pytest.raises(SandboxFailed, match="no room"):
            server.sandboxes().create()
        first.close()
        server.sandboxes().create()


def test_a_door_closes_what_came_through_it(tmp_path: Path) -> None:
    with through_door(LocalSandboxes(below=str(tmp_path))) as sandboxes:
        one, other = begun(sandboxes.create()), begun(sandboxes.create())
        assert len(list(tmp_path.iterdir())) == 2
        one._server._connect.close()  # type: ignore[attr-defined]  # as when its process is killed
        until(lambda: [str(path) for path in tmp_path.iterdir()] == [other.root])
    assert list(tmp_path.iterdir()) == []


def test_a_door_shows_nobody_the_sandboxes_of_others(tmp_path: Path) -> None:
    with through_door(LocalSandboxes(below=str(tmp_path))) as sandboxes:
        one, other = begun(sandboxes.create()), begun(sandboxes.create())
        stolen = RemoteSandbox(other._server, one._path.rpartition("/")[2], one.root)  # type: ignore[attr-defined]
        with pytest.raises(SandboxFailed, match="no such sandbox"):
            ran(stolen, "true")


def test_a_table_does_things_once_and_forgets_what_it_deleted(tmp_path: Path) -> None:
    now = 0.0
    table = Table(LocalSandboxes(below=str(tmp_path)), 10.0, most=2, clock=lambda: now)
    number, root = table.create("a", "")
    assert table.create("a", "") == (number, root)
    table.create("b", "")
    with pytest.raises(TableFull):
        table.create("c", "")
    with table.using(number):
        now = 11.0
        assert (table.sweep(), len(table)) == (1, 1)  # what is used stays, however long
    now = 20.0
    assert table.sweep() == 0
    now = 22.0
    assert table.sweep() == 1
    with pytest.raises(NoSandbox), table.using(number):
        pass
    assert table.create("a", "")[0] != number
    table.close()
    assert list(tmp_path.iterdir()) == []


def test_an_image_that_the_operator_does_not_offer_is_refused() -> None:
    with pytest.raises(SandboxFailed, match="does not offer the image b"):
        ContainerSandboxes(["a"]).create("b")


@pytest.mark.skipif(not IMAGE, reason="make real-containers names an image, on a daemon")
def test_a_container_ends_with_the_process_that_made_it_however_that_ends(tmp_path: Path) -> None:
    def is_there(name: str) -> bool:
        asked = ["docker", "inspect", "--format", "{{.Id}}", name]
        return subprocess.run(asked, check=False, capture_output=True).returncode == 0

    with served(tmp_path, "container") as server:
        sandbox = begun(server.sandboxes().create(IMAGE))
        name = ran(sandbox, "cat /etc/hostname").output.strip()
        assert is_there(name)
        server.end(signal.SIGKILL)
        until(lambda: not is_there(name))


# the warm pool


class Counted:
    """Sandboxes of this machine, with how many were made of which base."""

    def __init__(self, folder: Path) -> None:
        self.made: list[str] = []
        self.is_broken = False
        self._folder = folder

    def refusal(self) -> str | None:
        return None

    def create(self, base: str = "") -> Sandbox:
        if self.is_broken:
            raise SandboxFailed("the machine is full")
        self.made.append(base)
        return LocalSandboxes(below=str(self._folder)).create()


def test_the_pool_prepares_so_many_and_hands_each_out_once(tmp_path: Path) -> None:
    counted = Counted(tmp_path)
    warm = WarmSandboxes(counted, 2)
    taken = [warm.create("image")]
    until(lambda: warm.num_ready == 2)
    assert counted.made == ["image"] * 3
    taken += [warm.create("image"), warm.create("image")]
    assert len({one.root for one in taken}) == 3
    until(lambda: warm.num_ready == 2)
    assert len(counted.made) == 5
    warm.close()
    assert {str(path) for path in tmp_path.iterdir()} == {one.root for one in taken}


def test_the_pool_is_bounded_and_a_failure_is_told_to_who_asks(tmp_path: Path) -> None:
    counted = Counted(tmp_path)
    warm = WarmSandboxes(counted, 1)
    for number in range(12):
        warm.create(str(number)).close()
        until(lambda: warm.num_ready == min(len(set(counted.made)), 8))
    until(lambda: len(counted.made) == 24)  # each base for who asked, and ahead
    until(lambda: warm.num_ready == 8)
    counted.is_broken = True
    with pytest.raises(SandboxFailed, match="full"):
        warm.create("another")
    counted.is_broken = False
    warm.create("another").close()
    warm.close()
    assert list(tmp_path.iterdir()) == []


# tiers


@pytest.fixture
def remote_tier(server: Server) -> Sandboxes:
    return ConfiguredRemote(f"http://127.0.0.1:{server.port}", KEY, LOOPBACK)


def policy(least: Tier | None, **kinds: Sandboxes) -> WallPolicy:
    return WallPolicy(least, sandboxes=lambda: {Tier.named(name): kind for name, kind in kinds.items()})


@needs_wall
@pytest.mark.parametrize(
    ("least", "asked", "meant"),
    [
        (None, None, None),
        (Tier.WALL, "remote", Tier.REMOTE),
        (Tier.REMOTE, "process", Tier.REMOTE),
        (Tier.REMOTE, None, Tier.REMOTE),
        (Tier.CONTAINER, "remote", Tier.REMOTE),
        (Tier.PROCESS, "container", Tier.CONTAINER),
    ],
)
def test_the_stronger_of_operator_and_job_applies(
    tmp_path: Path, least: Tier | None, asked: str | None, meant: Tier | None
) -> None:
    kinds = {"container": Counted(tmp_path), "remote": Counted(tmp_path)}
    applied = policy(least, **kinds).applied(HostOrder(HARBOR, hosting={"tier": asked} if asked else {}))
    assert applied.tier is Tier.WALL
    assert applied.sandboxes is (kinds[str(meant)] if meant else None)


@needs_wall
@pytest.mark.parametrize(
    ("kinds", "reason"),
    [
        ({}, "no sandboxes of that kind are set up"),
        ({"container": ContainerSandboxes([])}, "GSPO_SANDBOX_IMAGES"),
        ({"container": ContainerSandboxes(["no/such:image"])}, "docker"),
    ],
)
@pytest.mark.parametrize("least", [Tier.CONTAINER, None])
def test_what_cannot_be_had_is_refused_with_the_reason(
    kinds: dict[str, Sandboxes], reason: str, least: Tier | None
) -> None:
    asked = {} if least else {"tier": "container"}
    with pytest.raises(InvalidEnvironment, match=f"must run in tier container, which this machine lacks: .*{reason}"):
        policy(least, **kinds).applied(HostOrder(HARBOR, hosting=asked))


@needs_wall
@pytest.mark.parametrize(("tier", "missing"), [("container", "GSPO_SANDBOX_IMAGES"), ("remote", "GSPO_SANDBOX_URL")])
def test_who_asks_for_sandboxes_that_no_setting_names_is_told_which_is_missing(tier: str, missing: str) -> None:
    with pytest.raises(InvalidEnvironment, match=missing):
        WallPolicy.of(Settings()).applied(HostOrder(HARBOR, hosting={"tier": tier}))


def test_sandboxes_that_a_setting_names_are_made_once() -> None:
    """Those that are prepared ahead are held by whoever made them."""
    offered = WallPolicy.of(Settings(sandbox_images=("a:1",), sandboxes_ready=2)).sandboxes
    assert offered()[Tier.CONTAINER] is offered()[Tier.CONTAINER]


@needs_wall
@pytest.mark.parametrize("ref", ["environments.calculator:Calculator", "environments.python_tool:PythonTool"])
async def test_what_runs_its_policys_code_itself_is_refused_there(
    tmp_path: Path, remote_tier: Sandboxes, ref: str
) -> None:
    boot = LocalHosts(Interpreters(tmp_path), policy(Tier.REMOTE, remote=remote_tier)).boot
    with pytest.raises(InvalidEnvironment, match=r"may only run in the tiers process and wall: .*runs_in_sandboxes"):
        await HostedEnvironment.open(HostOrder(ref), boot=boot)


# Harbor's tasks


def bash(text: str) -> ParsedTurn:
    return ParsedTurn("", (ToolCall("bash", {"command": text}, CallStatus.OK, "", 0, 1),))


def said(observation: Any) -> str:
    return str(observation.messages[-1]["content"])


@needs_wall
@pytest.mark.parametrize("tier", ["remote", *(["container"] if IMAGE else [])])
async def test_a_task_of_harbor_is_played_there_and_goes_on_after_its_process_died(
    tmp_path: Path, remote_tier: Sandboxes, tier: str
) -> None:
    kinds = {"remote": remote_tier, "container": ContainerSandboxes([IMAGE])}
    order = HostOrder(HARBOR, {"path": str(TASKS), "provided": ["FROM"]}, {"tier": tier}, readable=(str(TASKS),))
    boot = LocalHosts(Interpreters(tmp_path), policy(None, **kinds)).boot
    environment = await HostedEnvironment.open(order, boot=boot)
    try:
        session = environment.session(limits=LONG)
        await session.start(await environment.task(Split.TRAIN, 0), 0)
        assert (
            said(await session.act(bash("echo 'Hello, harbour' > /app/greeting.txt; echo here > /tmp/note")))
            == "(no output)"
        )
        process: Any = session._seat.process  # type: ignore[union-attr]
        os.kill(process.pid, signal.SIGKILL)
        async with asyncio.timeout(DEADLINE_S):
            while process.death is None:
                await asyncio.sleep(0.02)
        assert (
            said(await session.act(bash("cat /tmp/note; pwd; ls /tests 2>&1 | grep -c test.sh")))
            == "here\n/app\n0\n(status 1)"
        )
        assert (await session.score())[0] == 1.0
        await session.close()
        other = environment.session(limits=LONG)
        await other.start(await environment.task(Split.TRAIN, 0), 0)
        assert (await other.score())[0] == 0.0
        await other.close()
    finally:
        await environment.close()


@needs_wall
async def test_behind_the_wall_neither_the_key_nor_the_server_is_reached(tmp_path: Path, server: Server) -> None:
    world = tmp_path / "curious" / "world.py"
    world.parent.mkdir()
    world.write_text(CURIOUS)
    kind = ConfiguredRemote(f"http://127.0.0.1:{server.port}", KEY, LOOPBACK)
    boot = LocalHosts(Interpreters(tmp_path), policy(Tier.REMOTE, remote=kind)).boot
    environment = await HostedEnvironment.open(HostOrder(f"{world}:Curious", {"port": server.port}), boot=boot)
    try:
        session = environment.session(limits=LONG)
        await session.start(await environment.task(Split.TRAIN, 0), 0)
        assert (
            said(await session.act(ParsedTurn("", (ToolCall("look", {}, CallStatus.OK, "", 0, 1),))))
            == "in: work\nout: refused"
        )
        await session.close()
    finally:
        await environment.close()


CURIOUS = '''
import socket

from environments.sandbox import door
from environments.sandbox.contract import Command, File, archive


class Curious:
    """It uses its sandbox, and tries what it must not."""

    tasks = [{}]
    runs_in_sandboxes = True

    def __init__(self, port=0):
        self._port = port

    def reset(self):
        self._sandbox = door.sandboxes().create()
        self._sandbox.put(archive([File("work")]))

    def look(self) -> str:
        """Look."""
        root = self._sandbox.root
        listed = self._sandbox.run(Command("basename $PWD", f"{root}/work", root, root, {}, 60.0, 99))
        try:
            socket.create_connection(("127.0.0.1", self._port), 5).close()
            out = "reached"
        except OSError:
            out = "refused"
        return f"in: {listed.output.strip()}\\nout: {out}"

    def get_reward(self):
        return 0.0

    def close(self):
        self._sandbox.close()
'''
