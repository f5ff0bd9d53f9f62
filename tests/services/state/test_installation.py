"""A data directory and a Redis belong together, and a second Redis is not let at a directory that one serves."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from services.files.data_dir import DataDir
from services.files.installation import InstallationFiles
from services.process.cancelling import cancel_all
from services.state.installation import InstallationGuard, WrongInstallation
from services.state.server import RedisServer, connect

BEAT_S = 0.05


@pytest.fixture
async def other_redis(server_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Redis]:
    with RedisServer.spawn(tmp_path_factory.mktemp("other"), binary=server_binary) as server:
        client = connect(server.url)
        yield client
        await client.aclose()


@pytest.fixture
def uses(redis_client: Redis, tmp_path: Path) -> Callable[..., InstallationGuard]:
    def make(redis: Redis = redis_client, directory: str = "data") -> InstallationGuard:
        return InstallationGuard(redis, DataDir(tmp_path / directory), beat_s=BEAT_S)

    return make


async def test_a_directory_and_a_server_stay_together(
    uses: Callable[..., InstallationGuard], redis_client: Redis, tmp_path: Path
) -> None:
    for _ in range(2):
        await uses().check()
    await redis_client.flushall()
    await uses().check()  # a server that was wiped is taken back, as after a restart of everything
    own = InstallationFiles(DataDir(tmp_path / "data")).id()
    assert own is not None
    assert await redis_client.hget("gspo:{service}:installation", "id") == own.encode()


async def test_those_that_start_together_agree(
    uses: Callable[..., InstallationGuard], redis_client: Redis, tmp_path: Path
) -> None:
    for number in range(10):
        await redis_client.flushall()
        together = [uses(directory=f"data{number}") for _ in range(5)]
        await asyncio.gather(*(one.check() for one in together))
        (token,) = {one._token for one in together}
        served = InstallationFiles(DataDir(tmp_path / f"data{number}")).served()
        assert served is not None
        assert served.token == token
        for one in together:
            await one._beat()


async def test_a_server_that_is_wiped_while_it_is_told_is_told_again(
    uses: Callable[..., InstallationGuard], redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = uses()
    await one.check()
    held = InstallationGuard.held

    async def wiped(self: InstallationGuard) -> tuple[str | None, str | None]:
        await redis_client.flushall()
        return await held(self)

    with monkeypatch.context() as wiping:
        wiping.setattr(InstallationGuard, "held", wiped)
        await one._beat()
    await one._beat()
    assert await redis_client.hget("gspo:{service}:installation", "id") is not None


async def test_a_newcomer_that_meets_a_wiped_server_waits_until_it_is_told_again(
    uses: Callable[..., InstallationGuard], redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever comes between its looks at the server and at the directory."""
    first, newcomer = uses(), uses()
    await first.check()
    await redis_client.flushall()
    asked = newcomer.held
    answers = 0

    async def held() -> tuple[str | None, str | None]:
        nonlocal answers
        answers += 1
        found = await asked()
        if answers == 2:  # as said by who had told it before it was wiped
            await asyncio.to_thread(first._files.say_served, str(first._token))
        if answers == 3:
            await first._beat()
        return found

    monkeypatch.setattr(newcomer, "held", held)
    await newcomer.check()
    assert newcomer._token == first._token


async def test_a_newcomer_does_not_take_a_server_over_that_nobody_could_reach_either(
    uses: Callable[..., InstallationGuard], redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, newcomer = uses(), uses()
    await first.check()
    await redis_client.flushall()
    asked = newcomer.held
    answers = 0

    async def held() -> tuple[str | None, str | None]:
        nonlocal answers
        answers += 1
        if answers == 2:
            await asyncio.sleep(20 * BEAT_S)  # the server is away for so long
        if answers == 6:
            await first._beat()
        return await asked()

    monkeypatch.setattr(newcomer, "held", held)
    await newcomer.check()
    assert newcomer._token == first._token


async def test_a_server_of_another_installation_is_refused(
    uses: Callable[..., InstallationGuard], redis_client: Redis, other_redis: Redis
) -> None:
    await uses().check()
    await uses(other_redis, "elsewhere").check()
    with pytest.raises(WrongInstallation, match="this Redis belongs to installation"):
        await uses(other_redis).check()
    with pytest.raises(WrongInstallation, match="GSPO_DATA_DIR"):
        await uses(redis_client, "elsewhere").check()


async def test_a_second_server_is_refused_while_the_first_is_at_work_and_not_after(
    uses: Callable[..., InstallationGuard], other_redis: Redis
) -> None:
    first = uses()
    await first.check()
    at_work = asyncio.create_task(first.run())
    with pytest.raises(WrongInstallation, match="another Redis serves"):
        await uses(other_redis).check()
    assert await other_redis.keys() == []
    await cancel_all([at_work], again_after_s=0.5)
    await uses(other_redis).check()
    with pytest.raises(WrongInstallation, match="another Redis serves"):  # as if it had been suspended
        await first.run()


async def test_a_server_that_is_wiped_under_its_processes_is_told_again_and_a_newcomer_is_let_in(
    uses: Callable[..., InstallationGuard], redis_client: Redis
) -> None:
    first = uses()
    await first.check()
    at_work = asyncio.create_task(first.run())
    try:
        for _ in range(3):
            await redis_client.flushall()
            newcomer = uses()
            await newcomer.check()
            assert newcomer._token == first._token
        assert not at_work.done()
    finally:
        await cancel_all([at_work], again_after_s=0.5)


async def test_a_fresh_directory_takes_the_id_of_its_server(
    uses: Callable[..., InstallationGuard], tmp_path: Path
) -> None:
    await uses().check()
    await uses(directory="fresh").check()
    ids = {InstallationFiles(DataDir(tmp_path / name)).id() for name in ("data", "fresh")}
    assert len(ids) == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """The data directory, on a file system of its own."""
    place = tmp_path / "data"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a disk that fills up")
    yield place
    subprocess.run(["umount", str(place)], check=True)


async def test_who_starts_while_the_disk_is_full_begins_all_the_same(
    uses: Callable[..., InstallationGuard], small_disk: Path
) -> None:
    await uses().check()
    (small_disk / "served.json").unlink()
    with contextlib.suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(1024))
    starting = uses()
    await starting.check()
    (small_disk / "filler").unlink()
    await starting._beat()
    assert InstallationFiles(DataDir(small_disk)).served() is not None, "it says so once there is room"
