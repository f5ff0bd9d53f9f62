"""The roles: each can do all of its work, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from redis import Redis as BlockingRedis
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError
from redis.retry import Retry as BlockingRetry

from gspo_core.types import EpisodeKey, Split
from gspo_core.versions import WeightFile, WeightsManifest
from services.episodes.metering import Counters
from services.files.job_dir import JobsDir
from services.gateway.agent.traffic import forget
from services.state.child import RedisChild
from services.state.client import Away, AwayReason, CredentialsRefused, NotPermitted, connect
from services.state.fleet_records import EngineRecord, TrainerRecord, WorkerRecord
from services.state.functions import Functions, functions_there, library
from services.state.loans import Loans
from services.state.process_requests import Drains, WorkerRequests
from services.state.queue import Append, Bus, Snapshot
from services.state.refusals import Fenced
from services.state.retry import Backoff, Retrier
from services.state.roles import USERS, WRITING, UnsuitablePassword, acl_file, main
from services.state.server import RedisServer
from services.state.shared_secrets import AGENT_KEYS, shared_secret
from services.state.store import Claim, Store
from services.state.talks import Talks, TrafficRetention
from tests.patience import HANG_S

pytestmark = pytest.mark.every_server

PASSWORDS = {user: f"password of {user}" for user in USERS}

As = Callable[[str], Redis]


@pytest.fixture
async def as_user(server_binary: Path, tmp_path: Path) -> AsyncIterator[As]:
    """A client of a server that has loaded the file, and nothing else."""
    with RedisServer.spawn(tmp_path / "redis", binary=server_binary) as server:
        async with connect(server.url) as admin:
            for line in acl_file(PASSWORDS).splitlines()[1:]:
                await admin.execute_command("ACL", "SETUSER", *line.split()[1:])
            opened: list[Redis] = []

            def client(user: str) -> Redis:
                password = PASSWORDS[user].replace(" ", "%20")
                opened.append(connect(server.url.replace("unix://", f"unix://{user}:{password}@")))
                return opened[-1]

            yield client
            for one in opened:
                await one.aclose()


async def test_only_a_gateway_has_the_secret_of_agents_keys_and_offers_episodes(as_user: As) -> None:
    api = Bus(as_user("gspo-api"))
    await api.load_functions()
    gateway, rollout = as_user("gspo-gateway"), as_user("gspo-rollout")
    secret = await shared_secret(gateway, AGENT_KEYS)
    assert await shared_secret(gateway, AGENT_KEYS) == secret
    token = await Bus(gateway).join("gateway-0")
    key = EpisodeKey("job-1", 0, 0)
    with pytest.raises(Fenced):  # which is an answer
        await Loans(Functions(gateway)).offer(key, token, 0, b"")
    assert await Loans(Functions(gateway)).offers("job-1") == {}
    assert await Bus(gateway).holder(key) == ""
    assert await forget(Talks(Functions(gateway)), TrafficRetention(1 << 20, 30.0)) == 0
    await Store(as_user("gspo-api")).jobs.create("{}")
    assert await forget(Talks(Functions(gateway)), TrafficRetention(1 << 20, 30.0)) == 0
    for refused in (
        shared_secret(rollout, AGENT_KEYS),
        Loans(Functions(rollout)).offer(key, token, 0, b""),
        Loans(Functions(rollout)).lend("job-1", "a", 60),
        Loans(Functions(gateway)).lend("job-1", "a", 60),
    ):
        with pytest.raises(NotPermitted):
            await refused


async def test_what_announces_engines_needs_no_more_than_a_worker_may(as_user: As) -> None:
    store = Store(as_user("gspo-rollout"))
    with pytest.raises(NotPermitted):
        await store.load_functions()
    waiting = asyncio.create_task(functions_there(store))
    await Store(as_user("gspo-api")).load_functions()
    async with asyncio.timeout(HANG_S):
        await waiting
    await store.fleet.register_engine(EngineRecord(id="e"))
    assert [one.id for one in await store.fleet.engines()] == ["e"]
    await store.fleet.remove_engine("e")
    assert await store.fleet.engines() == []


@pytest.mark.parametrize("user", ["gspo-rollout", "gspo-gateway"])
async def test_who_may_load_no_functions_waits_for_those_of_a_server_that_lost_them(as_user: As, user: str) -> None:
    client, counters = as_user(user), Counters()
    bus = Bus(client)
    with pytest.raises(Away) as caught:
        await bus.join("w")
    assert caught.value.reason is AwayReason.NO_FUNCTIONS
    with pytest.raises(NotPermitted):  # what is not its own stays refused
        await Loans(Functions(client)).lend("job-1", "a", 60)
    retrier = Retrier(counters, random.Random(0), Backoff(first_s=0.001, max_s=0.01))
    joining = asyncio.create_task(retrier.keep_trying(bus.join, "w"))
    async with asyncio.timeout(HANG_S):
        while counters["redis/not_now"] < 3:
            await asyncio.sleep(0.01)
        assert not joining.done()
        await Store(as_user("gspo-api")).load_functions()
        await bus.beat("w", await joining)


async def test_every_role_can_do_its_work(as_user: As, tmp_path: Path) -> None:
    api = Store(as_user("gspo-api"), jobs_dir=JobsDir(tmp_path / "jobs"))
    await api.load_functions()
    await api.rebuild()
    job = (await api.jobs.create("{}", idempotency_key="k")).id
    trainer_redis = as_user("gspo-trainer")
    trainer, store = Bus(trainer_redis), Store(trainer_redis, jobs_dir=JobsDir(tmp_path / "jobs"))
    await trainer.load_functions()
    await store.fleet.register_trainer(TrainerRecord(id="t"))
    await store.fleet.register_engine(EngineRecord(id="e"))
    claim = await store.jobs.claim("t")
    assert claim is not None
    await train(trainer, store, claim)
    await work(Bus(as_user("gspo-rollout")), Store(as_user("gspo-rollout")), job)
    assert len(await trainer.read_segments(job)) == 3
    await trainer.commit(job, claim.token, 1, [one.group for one in await trainer.ready_groups(job)])
    await store.jobs.set_status(job, "running", token=claim.token)
    await store.jobs.set_status(job, "succeeded", token=claim.token)
    assert [one.status for one in await api.jobs.page()] == ["succeeded"]
    assert await api.events.read(job)
    assert (await api.metrics.read(job))[0]["step"] == 1
    assert await api.fleet.workers()
    assert (await trainer.counters(job))["in_flight"] == 0


async def train(bus: Bus, store: Store, claim: Claim) -> None:
    job, token = claim.job_id, claim.token
    await store.jobs.beat(job, token)
    version = await store.versions.next(job, token)
    manifest = WeightsManifest(job, version, claim.epoch, 0, (WeightFile("m", 1, "0" * 64),))
    await store.versions.publish(job, token, manifest)
    await store.jobs.update_progress(job, token, 0, version)
    assert await store.fleet.bind(job, token, "e")
    for group in range(2):
        await bus.dispatch(job, token, group, size=1, split=Split.TRAIN, task_index=0)
    await store.events.add(job, "step", {}, token=token)
    await store.metrics.add(job, 1, {"x": 1.0}, token=token)
    await bus.groups(job)


async def work(bus: Bus, store: Store, job: str) -> None:
    await bus.load_functions()  # finds them loaded
    token = await bus.join("w")
    await store.fleet.register_worker(WorkerRecord(id="w"))
    assert await store.jobs.served() == [job]
    await store.jobs.get(job)
    await store.environments.describe(job, 0, {})
    await store.versions.current(job)
    await store.versions.all(job)
    await store.fleet.engines()
    first, second = await bus.lease(job, "w", token, 2)
    await bus.append(job, token, [Append(first.key, 0, 0, b"a", False), Append(second.key, 0, 0, b"b", False)])
    await bus.restart(second.key, token, 1)
    await bus.save_snapshot(first.key, token, Snapshot(0, 1, b"world"))
    assert await bus.read_snapshot(first.key) is not None
    await bus.interrupt(job, token, [first.key])
    assert await bus.num_queued(job) == 1
    [first] = await bus.lease(job, "w", token, 1)
    await bus.hand_back(job, token, [first.key])
    [first] = await bus.lease(job, "w", token, 1)
    assert await bus.read_episode(first.key) == [b"a"]
    await bus.append(job, token, [Append(first.key, 0, 1, b"c", True), Append(second.key, 1, 0, b"d", True)])
    await bus.fail(first.key, token, "too late")
    await store.events.add(job, "env.health", {})
    await bus.beat("w", token)
    await bus.reap(job)
    await bus.leave("w", token)


FORBIDDEN = {
    "wipe": ("FLUSHALL",),
    "evaluate": ("EVAL", "return 1", "0"),
    "stop": ("SHUTDOWN",),
    "settings": ("CONFIG", "SET", "appendfsync", "no"),
    "other keys": ("HGET", "somebody:else", "x"),
    "users": ("ACL", "LIST"),
    "list keys": ("KEYS", "*"),
    "forget functions": ("FUNCTION", "FLUSH"),
}


async def test_the_api_asks_and_a_rollout_worker_answers_under_their_roles(as_user: As) -> None:
    asking, doing = WorkerRequests(as_user("gspo-api")), WorkerRequests(as_user("gspo-rollout"))
    asked = asyncio.create_task(asking.ask({"environment": "a@1", "do": "schema"}, 30.0))
    position, request = "0", None
    while request is None:
        position, request = await doing.next(position, "w")
    await doing.answer(request, {"result": 7})
    assert await asked == 7
    await Drains(as_user("gspo-api")).ask("w")
    stop = asyncio.Event()
    await Drains(as_user("gspo-rollout")).wait("w", stop)
    assert stop.is_set()
    assert not await Drains(as_user("gspo-rollout")).is_asked("w")


@pytest.mark.parametrize("user", USERS)
async def test_nobody_can_do_anything_else(as_user: As, user: str) -> None:
    client = as_user(user)
    for command in FORBIDDEN.values():
        with pytest.raises(NotPermitted):
            await client.execute_command(*command)


async def test_a_rollout_worker_calls_its_own_functions_only(as_user: As) -> None:
    await Bus(as_user("gspo-trainer")).load_functions()
    worker = as_user("gspo-rollout")
    for name in re.findall(r'register\("(dispatch|commit|claim|set_status|publish_version|restore_job)"', library()[0]):
        with pytest.raises(NotPermitted):
            await worker.execute_command("FCALL", f"gspo_{name}", 0)
    for command in (
        ("FUNCTION", "LOAD", "REPLACE", library()[0]),
        ("UNLINK", "gspo:{job}:job"),
        ("CONFIG", "GET", "*"),
    ):
        with pytest.raises(NotPermitted):
            await worker.execute_command(*command)


async def test_a_server_takes_the_file_at_its_start(server_binary: Path, tmp_path: Path) -> None:
    """As an operator gives it: ``aclfile`` in the configuration."""
    acl = tmp_path / "users.acl"
    acl.write_text(acl_file(PASSWORDS))
    script = tmp_path / "server"
    script.write_text(f'#!/bin/sh\nexec "{server_binary}" "$@" --aclfile "{acl}"\n')
    script.chmod(0o755)
    child = RedisChild(script, tmp_path / "data")
    try:
        password = PASSWORDS["gspo-api"].replace(" ", "%20")
        async with connect(child.url.replace("unix://", f"unix://gspo-api:{password}@")) as api:
            await Store(api).load_functions()
            assert await Store(api).jobs.page() == []
        async with connect(child.url) as nobody:
            nobody.set_retry(Retry(NoBackoff(), 0))
            with pytest.raises(CredentialsRefused, match="Authentication required"):
                await nobody.ping()
    finally:
        child.close()


def test_passwords_come_from_files_and_are_no_short_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for user, password in PASSWORDS.items():
        (tmp_path / user).write_text(password + "\n")
    assert main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown == acl_file(PASSWORDS)
    assert "password" not in shown
    (tmp_path / "gspo-api").write_text("short")
    assert main([str(tmp_path)]) == 2
    assert "gspo-api" in capsys.readouterr().err
    with pytest.raises(UnsuitablePassword):
        acl_file({})


def test_every_command_of_the_functions_is_granted() -> None:
    used = {name.lower() for name in re.findall(r'redis\.call\("([A-Z]+)"', library()[0])}
    assert used <= {command.partition("|")[0] for command in USERS["gspo-trainer"]}
    assert set(WRITING) - used <= {"srem"}  # nothing is granted that nobody needs


async def test_a_killed_server_with_these_users_still_holds_what_it_acknowledged(
    server_binary: Path, tmp_path: Path
) -> None:
    """Redis 7.0 replays transactions as the default user: one that may do nothing loses all that is in them."""
    (tmp_path / "users.acl").write_text(acl_file(PASSWORDS))
    url = f"unix://gspo-api:{PASSWORDS['gspo-api'].replace(' ', '%20')}@{tmp_path / 'socket'}"
    job = ""
    for attempt in range(2):
        server = _start(server_binary, tmp_path)
        try:
            async with connect(url) as redis:
                store = Store(redis, jobs_dir=JobsDir(tmp_path / f"jobs-{attempt}"))
                if attempt == 0:
                    await store.load_functions()
                    job = (await store.jobs.create('{"kept":true}')).id
                    async with redis.pipeline(transaction=True) as together:
                        for number in range(3):
                            together.hset("gspo:together", str(number), "kept")
                        await together.execute()
                else:
                    assert (await store.jobs.get(job)).spec == '{"kept":true}'
                    assert await redis.hlen("gspo:together") == 3
        finally:
            server.kill()
            server.wait()


def test_nobody_is_the_default_user(server_binary: Path, tmp_path: Path) -> None:
    (tmp_path / "users.acl").write_text(acl_file(PASSWORDS))
    server = _start(server_binary, tmp_path)
    try:
        for user, password in ((None, None), ("default", ""), ("default", "guessed")):
            nobody = BlockingRedis(
                unix_socket_path=str(tmp_path / "socket"),
                username=user,
                password=password,
                retry=BlockingRetry(NoBackoff(), 0),
            )
            with pytest.raises(AuthenticationError):
                nobody.get("gspo:x")
            nobody.close()
    finally:
        server.kill()
        server.wait()


def _start(binary: Path, directory: Path) -> subprocess.Popen[bytes]:
    program = [str(binary), "--port", "0", "--unixsocket", str(directory / "socket"), "--dir", str(directory)]
    program += ["--aclfile", str(directory / "users.acl"), "--appendonly", "yes", "--appendfsync", "always"]
    server = subprocess.Popen(program, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while True:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(directory / "socket"))
            return server
        assert time.monotonic() < deadline, "the server did not come up"
        time.sleep(0.02)
