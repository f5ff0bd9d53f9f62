"""Attacks by what code and callers hand over: numbers, names, variables, uploads, pictures of a sandbox.

Each is tried with the bound, and succeeds in the same test where the bound is taken away. The first bound is a wall for
one of them and holds in every tier for the others.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import subprocess
import sys
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from environments.sandbox import command, folder
from environments.sandbox.contract import Command, Sandbox, SandboxFailed
from environments.sandbox.local import LocalSandboxes
from gspo_core import environment_contract as reported
from gspo_core.env import CallStatus, EnvironmentFailed, ParsedTurn, Timeouts, ToolCall
from gspo_core.env.session import as_reward
from gspo_core.types import Split
from services.files.environments import archives
from services.files.environments.archives import ArchiveRefused
from services.hosts import server
from services.hosts.local import LocalHosts, WallPolicy
from services.hosts.server import HostOrder
from services.hosts.session import HostedEnvironment, HostedSession
from services.hosts.venv import Interpreters
from services.hosts.walls import tiers
from services.hosts.walls.tiers import Tier
from services.rollout.request_runner import RequestRunner
from tests.services.hosts.test_host import said

PAGE = Path(__file__).resolve().parents[3] / "docs" / "security.md"
SECRET = "a-secret-of-somebody-else"
LONG = Timeouts(reset_timeout_s=60.0, step_timeout_s=60.0, score_timeout_s=60.0, close_timeout_s=10.0)
NO_WALL = tiers.WALLS[Tier.WALL].refusal()
TIERS = [Tier.PROCESS, pytest.param(Tier.WALL, marks=pytest.mark.skipif(NO_WALL is not None, reason=f"{NO_WALL}"))]

ROWS = {
    "many_numbers": "Flood the records with the numbers that an episode reports",
    "long_names": "Carry away what it reads in one long name of a number",
    "huge_numbers": "Report a number, or a reward, that no sum survives",
    "variables_of_children": "Find a secret among the variables that its children inherit",
    "zip_of_death": "Upload an archive that unpacks to a thousand times its size",
    "picture_through_a_link": "Have files of others kept with a sandbox, through a symbolic link",
    "layout_through_a_link": "Have files laid out at others', through a symbolic link",
    "mint_at_examination": "Read the API's key while an upload is examined, and mint one with it",
}
BEHIND_A_WALL_ONLY = {"mint_at_examination"}

WORLD = '''
import os
import subprocess


class World:
    """Its policy has taken it over."""

    tasks = [{}]

    def reset(self, ctx) -> str:
        self._ctx = ctx
        return "begin"

    def tell(self, count: int, length: int, size: float) -> str:
        """Report without asking."""
        self._ctx.metrics.update({("n%d" % number).ljust(length, "x"): size for number in range(count)})
        return "told"

    def ask_a_child(self) -> str:
        """Look at what a child inherits."""
        return subprocess.run(["/usr/bin/env"], capture_output=True, text=True, check=True).stdout

    def pay(self, size: float) -> str:
        """Be worth so much."""
        self._reward = size
        return "paid"

    def get_reward(self) -> float:
        return getattr(self, "_reward", 0.0)
'''


async def world(tmp_path: Path, tier: Tier) -> HostedEnvironment:
    project = tmp_path / "project"
    project.mkdir(exist_ok=True)
    (project / "world.py").write_text(WORLD)
    boot = LocalHosts(Interpreters(tmp_path / "venvs"), WallPolicy(tier)).boot
    return await HostedEnvironment.open(HostOrder(f"{project}/world.py:World"), boot=boot)


async def begun(environment: HostedEnvironment) -> HostedSession:
    session = environment.session(limits=LONG, episode_id="job/0/0")
    await session.start(await environment.task(Split.TRAIN, 0), seed=0)
    return session


def call(tool: str, **arguments: Any) -> ParsedTurn:
    return ParsedTurn("", (ToolCall(tool, arguments, CallStatus.OK, "", 0, 1),))


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(
    ("told", "named", "bound", "free"),
    [
        ({"count": 10_000, "length": 5, "size": 1.0}, "10000 numbers of an episode", "MOST_NUMBERS", 10**6),
        ({"count": 1, "length": 5_000, "size": 1.0}, "no name of a number", "MOST_NAME_CHARS", 10**6),
        ({"count": 1, "length": 2, "size": 1e300}, "n0 is 1e\\+300", "MOST_SIZE", 1e308),
    ],
)
async def test_what_an_episode_reports_is_bounded_by_name(
    told: dict[str, Any],
    named: str,
    bound: str,
    free: float,
    tier: Tier,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment = await world(tmp_path, tier)
    try:
        session = await begun(environment)
        with pytest.raises(EnvironmentFailed, match=named):
            await session.act(call("tell", **told))
        await session.close()
        monkeypatch.setattr(reported, bound, free)
        session = await begun(environment)
        await session.act(call("tell", **told))
        assert len(session.metrics) == told["count"]
        await session.close()
    finally:
        await environment.close()


@pytest.mark.parametrize("tier", TIERS)
async def test_a_reward_is_bounded(tier: Tier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = await world(tmp_path, tier)
    try:
        session = await begun(environment)
        await session.act(call("pay", size=1e300))
        with pytest.raises(EnvironmentFailed, match="1e\\+300"):
            await session.score()
        await session.close()
        # A host whose own bound its policy has moved: what it says is judged out here as well.
        session = await begun(environment)
        await session.act(call("pay", size=1e14))
        assert await session.score() == (1e14, {})
        monkeypatch.setattr(reported, "MOST_SIZE", 1e13)
        with pytest.raises(EnvironmentFailed, match="it reports too much: the reward is 1e\\+14"):
            await session.score()
        await session.close()
    finally:
        await environment.close()
    monkeypatch.setattr(reported, "MOST_SIZE", 1e308)
    assert as_reward(1e300) == (1e300, {})


@pytest.mark.parametrize("tier", TIERS)
async def test_children_inherit_no_secret(tier: Tier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GSPO_API_KEYS", SECRET)
    for is_bound in (True, False):
        if not is_bound:
            monkeypatch.setattr(server, "PASSED_VARIABLES", (*server.PASSED_VARIABLES, "GSPO_API_KEYS"))
        environment = await world(tmp_path, tier)
        try:
            session = await begun(environment)
            assert (SECRET in said(await session.act(call("ask_a_child")))) != is_bound
            await session.close()
        finally:
            await environment.close()


def test_a_zip_of_death_is_refused_while_it_unpacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 48 << 20
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("world.py", bytes(size))
    assert len(packed.getvalue()) * 900 < size
    with pytest.raises(ArchiveRefused, match="unpacks to more than"):
        archives.unpack(packed.getvalue(), tmp_path / "bounded")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(archives, "MAX_RATIO", 10_000)
    archives.unpack(packed.getvalue(), tmp_path / "unbounded")
    assert (tmp_path / "unbounded" / "world.py").stat().st_size == size


needs_commands = pytest.mark.skipif(command.refusal() is not None, reason="this machine runs no such commands")


def ran(text: str, root: str) -> Command:
    return Command(text, root + "/work", root + "/work", root + "/work", {}, 60.0, 4000)


def laid_out(sandbox: Sandbox, *files: tuple[str, bytes]) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o644
            archive.addfile(info, io.BytesIO(content))
    sandbox.put(packed.getvalue())


@needs_commands
def test_a_picture_of_a_sandbox_has_links_and_not_what_they_point_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text(SECRET)
    held: list[bytes] = []
    for is_bound in (True, False):
        sandbox = LocalSandboxes(below=str(tmp_path)).create()
        try:
            laid_out(sandbox, ("work/here", b""))
            assert sandbox.run(ran(f"ln -s {secret}/key one && ln -s {secret} two", sandbox.root)).status == 0
            if not is_bound:  # as who packs carelessly
                monkeypatch.setattr(Path, "lstat", Path.stat)
                monkeypatch.setattr(tarfile.TarFile, "dereference", True)
            picture = sandbox.snapshot([f"{sandbox.root}/work"], 1 << 20)
            assert picture is not None
            held.append(zlib.decompress(picture.partition(b"\n")[2]))
            monkeypatch.undo()
        finally:
            sandbox.close()
    assert [SECRET.encode() in one for one in held] == [False, True]


@needs_commands
def test_nothing_is_laid_out_through_a_link_that_a_command_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    for is_bound in (True, False):
        sandbox = LocalSandboxes(below=str(tmp_path)).create()
        try:
            laid_out(sandbox, ("work/here", b""))
            assert sandbox.run(ran(f"ln -s {outside} tests", sandbox.root)).status == 0
            if not is_bound:
                monkeypatch.setattr(folder, "as_it_was", lambda member, _path: member)
            with pytest.raises(SandboxFailed) if is_bound else contextlib.nullcontext():
                laid_out(sandbox, ("work/tests/run.sh", b"forged"))
            assert (outside / "run.sh").exists() != is_bound
        finally:
            sandbox.close()


MINTER = '''
import socket
from pathlib import Path


def minted():
    try:
        words = Path("/proc/{pid}/environ").read_bytes().split(b"\\0")
        key = [word for word in words if word.startswith(b"GSPO_API_KEYS=")][0].partition(b"=")[2]
        with socket.create_connection(("127.0.0.1", {port}), timeout=10) as api:
            api.sendall(key)
            return api.recv(100).decode()
    except (OSError, LookupError) as error:
        return "denied: " + type(error).__name__


class Seen:
    """What it got while it was loaded."""

    tasks = [{{"got": minted()}}]

    def reset(self, got: str) -> str:
        return got

    def get_reward(self) -> float:
        return 0.0
'''


@contextlib.contextmanager
def an_api() -> Iterator[tuple[int, int, list[str]]]:
    """A process with the key in its environment, and a port that gives a new one to whoever shows it."""
    minted: list[str] = []
    holder = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"],
        stdin=subprocess.PIPE,
        env={**os.environ, "GSPO_API_KEYS": SECRET},
    )
    listening = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        while True:
            try:
                caller, _ = listening.accept()
            except OSError:
                return
            with caller:
                if caller.recv(100).decode() == SECRET:
                    minted.append("a new key")
                    caller.sendall(b"a new key")

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield holder.pid, listening.getsockname()[1], minted
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()
        holder.communicate()


@pytest.mark.parametrize("tier", TIERS)
async def test_an_examination_mints_no_key_behind_a_wall(tier: Tier, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    hosts = LocalHosts(Interpreters(tmp_path / "venvs"), WallPolicy(tier))
    with an_api() as (pid, port, minted):
        (project / "seen.py").write_text(MINTER.format(pid=pid, port=port))
        order = await hosts.prepared(HostOrder(f"{project}/seen.py:Seen"))
        runner = RequestRunner(cast(Any, None), cast(Any, None), hosts, "worker-0")
        asked: dict[str, Any] = {"do": "tasks", "split": "train", "first": 0, "count": 1}
        answer: Any = await runner._in_a_process(order, asked)
        (task,) = answer["result"]["tasks"]
    if tier is Tier.PROCESS:
        assert (task["got"], minted) == ("a new key", ["a new key"])
    else:
        assert (task["got"], minted) == ("denied: FileNotFoundError", [])


def row(name: str) -> str:
    return f"| {ROWS[name]} | {'allowed' if name in BEHIND_A_WALL_ONLY else 'denied'} | denied |"


def test_the_page_shows_these_attacks() -> None:
    rows = "\n".join(map(row, ROWS))
    assert rows in PAGE.read_text(encoding="utf-8"), rows
