"""Each attack is tried without a wall, where it succeeds, and behind one, where it is denied or bounded."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from gspo_core.env import CallStatus, InvalidEnvironment, Observation, ParsedTurn, Timeouts, ToolCall
from gspo_core.types import Split, StopReason
from services.hosts.local import LocalHosts, WallPolicy
from services.hosts.server import HostOrder, children_of
from services.hosts.session import HostedEnvironment, HostedSession, SessionLost
from services.hosts.venv import Interpreters
from services.hosts.walls import tiers
from services.hosts.walls.plan import Shown, entries
from services.hosts.walls.terms import How
from services.hosts.walls.tiers import Bounds, NoWall, Program, Tier
from tests.patience import HANG_S
from tests.services.hosts import attacks
from tests.services.hosts.attacks import ATTACKS, SECRET
from tests.services.hosts.test_host import gone, processes, said
from tests.services.rollout.rollout_kit import until

BOUNDED = frozenset({"fork_bomb", "disk_bomb", "memory_bomb"})
SOURCE = Path(attacks.__file__)
PAGE = Path(__file__).resolve().parents[3] / "docs" / "security.md"
LONG = Timeouts(reset_timeout_s=60.0, step_timeout_s=60.0, score_timeout_s=60.0, close_timeout_s=10.0)
IS_ROOT = os.geteuid() == 0

pytestmark = pytest.mark.skipif(
    tiers.WALLS[Tier.WALL].refusal() is not None, reason="the kernel offers no wall here, which the service says"
)


@dataclass(frozen=True)
class Place:
    """Where an environment of somebody lies, and what it has no business with."""

    project: Path
    data: Path
    aim: Mapping[str, Any]

    def policy(self, least: Tier | None = Tier.WALL) -> WallPolicy:
        return WallPolicy(least, hidden=(str(self.data),))

    async def host(self, tier: Tier, name: str = "Attacker", **hosting: int | str) -> HostedEnvironment:
        order = HostOrder(f"{self.project}/attacks.py:{name}", hosting={"disk_mb": 32, "num_processes": 64, **hosting})
        boot = LocalHosts(Interpreters(self.data), self.policy(tier)).boot
        return await HostedEnvironment.open(order, boot=boot)


@contextlib.contextmanager
def answering(one: socket.socket) -> Iterator[None]:
    """Tells whoever connects, or asks, the secret."""

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                if one.type == socket.SOCK_DGRAM:
                    _, caller_address = one.recvfrom(100)
                    if caller_address is None:  # it was shut down
                        return
                    one.sendto(SECRET.encode(), caller_address)
                else:
                    caller, _ = one.accept()
                    with caller:
                        caller.sendall(SECRET.encode())

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        thread.join()
        one.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    project, common = tmp_path / "project", tmp_path / "common"
    data = project / "data"
    for folder in (data, common):
        folder.mkdir(parents=True)
    for path in (data / "secret", data / "weights", project / ".env", project / "service.py"):
        path.write_text(SECRET)
    shutil.copy(SOURCE, project)
    tcp, udp = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", 0))
    path, abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    path.bind(str(tmp_path / "redis.sock"))
    name = f"gspo-{os.getpid()}-{os.urandom(4).hex()}"
    abstract.bind(f"\0{name}")
    libc = ctypes.CDLL(None)
    key = int.from_bytes(os.urandom(3), "big") + 1
    shm, queue = libc.shmget(key, 4096, 0o1666), libc.msgget(key, 0o1666)
    victim = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()", SECRET],
        stdin=subprocess.PIPE,
        env={**os.environ, "GSPO_REDIS_URL": SECRET},
    )
    with contextlib.ExitStack() as stack:
        for one in (tcp, path, abstract, udp):
            if one is not udp:
                one.listen()
            stack.enter_context(answering(one))
        aim = {
            "pid": victim.pid,
            "secret": str(data / "secret"),
            "weights": str(data / "weights"),
            "dotted": str(project / ".env"),
            "code": str(project / "attacks.py"),
            "source": str(project / "service.py"),
            "common": str(common),
            "tcp": tcp.getsockname()[1],
            "udp": udp.getsockname()[1],
            "unix": str(tmp_path / "redis.sock"),
            "abstract": name,
            "shm": key,
            "queue": key,
        }
        yield Place(project, data, aim)
        libc.shmctl(shm, 0, None)
        libc.msgctl(queue, 0, None)
        victim.communicate()


def call(tool: str, **arguments: Any) -> ParsedTurn:
    return ParsedTurn("", (ToolCall(tool, arguments, CallStatus.OK, "", 0, 1),))


async def begun(environment: HostedEnvironment) -> HostedSession:
    session = environment.session(limits=LONG, episode_id="job/0/0")
    await session.start(await environment.task(Split.TRAIN, 0), seed=0)
    return session


async def outcomes(place: Place, tier: Tier) -> Mapping[str, str]:
    """Of every attack, each in a session of its own."""
    environment = await place.host(tier)
    try:
        neighbour = await begun(environment)
        folder, pid = said(await neighbour.act(call("folder"))).split()
        aim = {**place.aim, "neighbour": int(pid), "neighbours_folder": folder}
        return {name: await outcome(environment, name, aim) for name in ATTACKS}
    finally:
        await environment.close()


async def outcome(environment: HostedEnvironment, name: str, aim: Mapping[str, Any]) -> str:
    session = await begun(environment)
    observation: Observation = await session.act(call("attempt", name=name, aim=dict(aim)))
    await session.close()
    return "ended by its host" if observation.stop_reason is StopReason.ENV_CRASH else said(observation)


def is_allowed(text: str) -> bool:
    return text.startswith("succeeded")


async def test_every_attack_succeeds_without_a_wall(place: Place) -> None:
    found = await outcomes(place, Tier.PROCESS)
    expected = [name for name, one in ATTACKS.items() if IS_ROOT or not one.needs_root]
    assert {name: found[name] for name in expected if not is_allowed(found[name])} == {}


async def test_every_attack_is_denied_or_bounded_behind_a_wall(place: Place) -> None:
    found = await outcomes(place, Tier.WALL)
    assert {name: text for name, text in found.items() if is_allowed(text)} == {}
    assert {name for name, text in found.items() if not text.startswith(("denied", "ended"))} == set()
    assert len(ATTACKS) >= 30


def row(name: str) -> str:
    one = ATTACKS[name]
    unwalled = "allowed to root" if one.needs_root else "allowed"
    return f"| {one.words} | {unwalled} | {'bounded' if name in BOUNDED else 'denied'} |"


def test_the_page_shows_the_matrix() -> None:
    rows = "\n".join(map(row, ATTACKS))
    assert rows in PAGE.read_text(encoding="utf-8"), rows


@pytest.mark.parametrize(("tier", "is_reached"), [(Tier.PROCESS, True), (Tier.WALL, False)])
async def test_what_listens_behind_a_wall_is_reached_by_nobody(place: Place, tier: Tier, is_reached: bool) -> None:
    environment = await place.host(tier, "Lasting")
    try:
        port = int(said(await (await begun(environment)).act(call("listen"))))
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                reached = True
        except ConnectionRefusedError:
            reached = False
        assert reached == is_reached
    finally:
        await environment.close()


@pytest.mark.parametrize(("tier", "survives"), [(Tier.PROCESS, True), (Tier.WALL, False)])
async def test_no_daemon_outlives_its_trial_behind_a_wall(place: Place, tier: Tier, survives: bool) -> None:
    mark = f"mark-{os.urandom(8).hex()}"
    environment = await place.host(tier, "Lasting")
    with contextlib.suppress(SessionLost):
        await (await begun(environment)).act(call("daemon", mark=mark, waits=survives))
    if not survives:
        assert not environment.pool._server.is_dead
    await environment.close()
    await gone(environment.pool.server_pid)
    if survives:  # it was begun, but its words are there a moment after it runs
        await until(lambda: bool(with_mark(mark)))
    left = with_mark(mark)
    assert bool(left) == survives
    for pid in left:
        os.kill(pid, signal.SIGKILL)


def with_mark(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and mark.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


async def test_everything_behind_a_wall_ends_with_either_process_that_holds_it(place: Place) -> None:
    environment = await place.host(Tier.WALL)
    session = await begun(environment)
    (pid,) = await processes(environment)
    (first,) = children_of(environment.pool.server_pid)
    os.kill(environment.pool.server_pid, signal.SIGKILL)
    await gone(pid, first)
    await session.close()
    await environment.close()


async def test_the_network_is_there_for_who_asks_and_may(place: Place) -> None:
    def attempt(may_ask: bool, **hosting: int) -> WallPolicy:
        policy = replace(place.policy(), may_ask_for_network=may_ask)
        order = policy.applied(HostOrder(f"{place.project}/attacks.py:Attacker", hosting=hosting))
        assert order.has_network == bool(hosting)
        return policy

    attempt(False)
    with pytest.raises(InvalidEnvironment, match="GSPO_ENV_NETWORK does not allow"):
        attempt(False, network=1)
    attempt(True, network=1)


class Missing(NoWall):
    """What this machine cannot do."""

    def refusal(self) -> str | None:
        return "the kernel is too old"


@pytest.mark.parametrize("least", [None, Tier.PROCESS, Tier.WALL])
@pytest.mark.parametrize("is_upload", [False, True])
@pytest.mark.parametrize("asked", [None, "wall", "process"])
def test_nobody_gets_less_than_the_operator_and_the_job_demand(
    least: Tier | None, is_upload: bool, asked: str | None
) -> None:
    order = HostOrder("world:World", hosting={} if asked is None else {"tier": asked}, is_upload=is_upload)
    there = WallPolicy(least)
    assert there.applied(order).tier is (Tier.PROCESS if least is Tier.PROCESS and asked != "wall" else Tier.WALL)
    missing = replace(there, walls={**tiers.WALLS, Tier.WALL: Missing()})
    if asked != "wall" and (least is Tier.PROCESS or (least is None and not is_upload)):
        assert missing.applied(order).tier is Tier.PROCESS
    else:
        with pytest.raises(InvalidEnvironment, match="the kernel is too old"):
            missing.applied(order)


@pytest.mark.parametrize("name", ["link", ".link"])
def test_a_link_in_a_project_leads_where_it_leads_outside(tmp_path: Path, name: str) -> None:
    """Such as a virtual environment that lies elsewhere; what is hidden stays so, also by way of a link."""
    project, far, secret = tmp_path / "project", tmp_path / "far", tmp_path / "far" / "secret"
    for folder in (project, far, secret):
        folder.mkdir()
    (far / "text").write_text("found")
    (secret / "key").write_text(SECRET)
    (project / name).symlink_to(far)
    code = f"import os; print(open({f'{name}/text'!r}).read(), os.listdir({f'{name}/secret'!r}))"
    program = Program([sys.executable, "-I", "-S", "-c", f"import os; os.chdir({str(project)!r}); {code}"], {})
    shown = Shown(
        sys.executable, code=[str(project)], readable=[str(project / name)], hidden=[str(project / name / "secret")]
    )
    walled = tiers.WALLS[Tier.WALL].around(program, shown, Bounds())
    done = subprocess.run(walled.command, env={}, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.stdout == "found []\n", done.stderr


def test_names_with_a_dot_are_hidden_at_whatever_depth(tmp_path: Path) -> None:
    deep = tmp_path / "project" / "world" / "data"
    (deep / ".keys").mkdir(parents=True)
    for name in ("shown", ".env", ".keys/key"):
        (deep / name).write_text(SECRET)
    code = "import os; print(sorted(os.listdir('.')), os.path.getsize('.env'), os.listdir('.keys'))"
    program = Program([sys.executable, "-I", "-S", "-c", f"import os; os.chdir({str(deep)!r}); {code}"], {})
    walled = tiers.WALLS[Tier.WALL].around(program, Shown(sys.executable, code=[str(tmp_path / "project")]), Bounds())
    done = subprocess.run(walled.command, env={}, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.stdout == "['.env', '.keys', 'shown'] 0 []\n", done.stderr


def test_of_many_names_with_a_dot_the_nearest_are_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("a", "a/deep", "node_modules/many"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / ".env").touch()
    (tmp_path / ".env").touch()

    def hidden() -> list[str]:
        shown = Shown(sys.executable, code=[str(tmp_path)])
        prefix = f"{tmp_path}/"
        return [path.removeprefix(prefix) for how, path in entries(shown) if how == How.EMPTY and prefix in path]

    assert hidden() == [".env", "a/.env", "a/deep/.env"], "others' code is not looked through"
    monkeypatch.setattr("services.hosts.walls.plan._MOST_HIDDEN", 2)
    assert hidden() == [".env", "a/.env"]


@pytest.mark.parametrize("way", ["x/..", "to"])
def test_a_folder_that_is_everyones_is_not_shown_by_another_name(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    (home / "x").mkdir(parents=True)
    (home / "judge.py").touch()
    (home / "to").symlink_to(home)
    monkeypatch.setenv("HOME", str(home))
    shown = {path for _, path in entries(Shown(sys.executable, files=[f"{home}/{way}/judge.py"]))}
    assert not {str(home), str(home / "to")} & shown
    assert {str(home / "judge.py"), str(home / "to" / "judge.py")} & shown


def test_an_unknown_tier_is_refused() -> None:
    with pytest.raises(InvalidEnvironment, match="no tier 'moat'; known are process, wall"):
        WallPolicy().applied(HostOrder("world:World", hosting={"tier": "moat"}))


PLAIN_PYTHON = Path("/usr/bin/python3")
AS_ANYONE = """
import sys; sys.path.append(sys.argv[1])
from services.hosts.walls.tiers import WALLS, Tier
print(WALLS[Tier.WALL].refusal())
"""


@pytest.mark.skipif(not (IS_ROOT and PLAIN_PYTHON.exists()), reason="needs root, to be somebody else for once")
def test_who_is_not_root_has_a_wall_as_well() -> None:
    command = [str(PLAIN_PYTHON), "-I", "-S", "-c", AS_ANYONE, str(PAGE.parents[1])]
    account = {"user": 12345, "group": 12345, "extra_groups": []}
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False, **account)  # type: ignore[call-overload]
    if "PermissionError" in done.stderr or "ModuleNotFoundError" in done.stderr:
        pytest.skip("this tree is root's alone")
    assert (done.stdout.strip(), done.stderr) == ("None", "")
