"""A Redis that says "not now" means the same to everyone: the API answers 503, a rollout worker waits, a trainer lets
go of its job."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.exceptions

from gspo_core.cli import main
from gspo_core.client import ApiError, Client
from gspo_core.spec import JobSpec
from gspo_core.types import Split
from services.api.http.unavailable import unavailable
from services.episodes.metering import Counters
from services.state.client import (
    MAX_BLOCK_MS,
    Away,
    AwayReason,
    CredentialsRefused,
    NotPermitted,
    OutOfMemory,
    RedisClient,
    RedisFault,
    connect,
    translate,
)
from services.state.functions import Functions
from services.state.queue import Bus, Fenced
from services.state.retry import Backoff, Retrier
from services.state.store import Claim, JobStatus, Store
from services.trainer.run import JobRun
from services.trainer.telling.run_phase import RunPhase
from services.trainer.worker import TrainerWorker
from tests.patience import HANG_S
from tests.services.api.api_kit import SPEC, ApiProcess, application, error_of, http_to
from tests.services.state.redis_trouble import REAL, Trouble
from tests.services.trainer.trainer_kit import InProcess

CODES = {
    AwayReason.UNREACHABLE: "redis_unavailable",
    AwayReason.BUSY: "redis_busy",
    AwayReason.OOM: "redis_full",
    AwayReason.MISCONF: "redis_full",
    AwayReason.READONLY: "redis_read_only",
    AwayReason.NOREPLICAS: "redis_no_replicas",
    AwayReason.MASTERDOWN: "redis_unavailable",
}
# The server's own words, as a server writes them.
SAID = {
    AwayReason.LOADING: "LOADING Redis is loading the dataset in memory",
    AwayReason.BUSY: "BUSY Redis is busy running a script. You can only call FUNCTION KILL or SHUTDOWN NOSAVE.",
    AwayReason.OOM: "OOM command not allowed when used memory > 'maxmemory'. script: gspo_beat, on @user_function:9.",
    AwayReason.MISCONF: "MISCONF Errors writing to the AOF file: No space left on device",
    AwayReason.READONLY: "READONLY You can't write against a read only replica.",
    AwayReason.NOREPLICAS: "NOREPLICAS Not enough good replicas to write.",
    AwayReason.MASTERDOWN: "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
    AwayReason.CLUSTERDOWN: "CLUSTERDOWN The cluster is down",
    AwayReason.TRYAGAIN: "TRYAGAIN Multiple keys request during rehashing of slot",
    AwayReason.UNBLOCKED: "UNBLOCKED client unblocked via CLIENT UNBLOCK",
}
ALIKE = ("BUSYGROUP Consumer Group name already exists", "BUSYKEY Target key name already exists.", "ERR BUSY not")


@pytest.fixture
def trouble(tmp_path: Path) -> Iterator[Trouble]:
    trouble = Trouble(tmp_path / "redis")
    yield trouble
    trouble.close()


@pytest.fixture
async def client(trouble: Trouble) -> AsyncIterator[RedisClient]:
    async with trouble.client() as client:
        yield client


# The door


@contextlib.asynccontextmanager
async def saying(said: str, socket: Path) -> AsyncIterator[RedisClient]:
    """A client of a server that answers every command with the error ``said``."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            for _ in range(2 * int(line[1:])):
                await reader.readline()
            writer.write(f"-{said}\r\n".encode())
        writer.close()

    server = await asyncio.start_unix_server(answer, socket)
    try:
        async with RedisClient.from_url(f"unix://{socket}", protocol=2, retry=None) as client:
            yield client
    finally:
        server.close()


async def piped(client: RedisClient, *, transaction: bool) -> None:
    async with client.pipeline(transaction=transaction) as pipeline:
        await pipeline.set("a", 1).execute()


async def watched(client: RedisClient) -> None:
    async with client.pipeline() as pipeline:
        await pipeline.watch("a")


WAYS: dict[str, Callable[[RedisClient], Awaitable[Any]]] = {
    "a command": lambda client: client.set("a", 1),
    "a function": lambda client: Bus(client).beat("w", "t"),
    "a blocked read": lambda client: client.xread({"a": "0"}, block=MAX_BLOCK_MS),
    "a pipeline": lambda client: piped(client, transaction=False),
    "a transaction": lambda client: piped(client, transaction=True),
    "a watched command": watched,
    "a script": lambda client: client.register_script("return 1")(),
}


@pytest.mark.parametrize("reason", SAID)
async def test_every_refusal_comes_through_the_door_as_away(reason: AwayReason, tmp_path: Path) -> None:
    async with saying(SAID[reason], tmp_path / "s") as client:
        for way in WAYS.values():
            with pytest.raises(Away) as caught:
                await way(client)
            assert caught.value.reason is reason
            assert isinstance(caught.value, OutOfMemory) == (reason is AwayReason.OOM)


@pytest.mark.parametrize("said", ALIKE)
async def test_what_only_looks_like_a_refusal_is_a_fault(said: str, tmp_path: Path) -> None:
    async with saying(said, tmp_path / "s") as client:
        for way in WAYS.values():
            with pytest.raises(RedisFault):
                await way(client)


@pytest.mark.parametrize("reason", REAL)
async def test_a_real_server_in_that_state_is_away_and_comes_back(
    trouble: Trouble, client: RedisClient, reason: AwayReason
) -> None:
    bus = Bus(client)
    await bus.load_functions()
    await trouble.begin(reason)
    ways: tuple[Callable[[], Awaitable[Any]], ...] = (
        lambda: client.set("a", 1),
        lambda: bus.join("v"),
        lambda: piped(client, transaction=False),
        lambda: piped(client, transaction=True),
    )
    for way in ways:
        with pytest.raises(Away) as caught:
            await way()
        assert caught.value.reason is reason
    await trouble.end(reason)
    for way in ways:
        await way()
    with pytest.raises(Fenced):
        await bus.beat("w", "another")


async def test_a_pipeline_says_which_command_was_refused(trouble: Trouble, client: RedisClient) -> None:
    await trouble.begin(AwayReason.NOREPLICAS)
    async with client.pipeline(transaction=False) as pipeline:
        with pytest.raises(Away) as caught:
            await pipeline.get("a").set("a", 1).execute()
        replies = await pipeline.get("a").set("a", 1).execute(raise_on_error=False)
    assert caught.value.__cause__ is not None
    assert caught.value.__cause__.__notes__ == ["command 2 of a pipeline: SET"]
    assert [type(reply) for reply in replies] == [type(None), Away]


async def test_a_read_that_is_unblocked_from_outside_is_away(trouble: Trouble, client: RedisClient) -> None:
    reading = asyncio.create_task(client.xread({"a": "0"}, block=MAX_BLOCK_MS))
    async with trouble.client() as other, asyncio.timeout(MAX_BLOCK_MS / 1000):
        while not (blocked := [one for one in await other.client_list() if "b" in one["flags"]]):
            await asyncio.sleep(0.01)
        await other.client_unblock(int(blocked[0]["id"]), error=True)
        with pytest.raises(Away) as caught:
            await reading
    assert caught.value.reason is AwayReason.UNBLOCKED


@pytest.mark.parametrize("wait_s", [None, 0.05])
async def test_a_pool_that_is_used_up_is_away(trouble: Trouble, wait_s: float | None) -> None:
    async with connect(trouble.url, max_connections=1, wait_s=wait_s) as client:
        reading = asyncio.create_task(client.xread({"a": "0"}, block=1000))
        await asyncio.sleep(0.2)
        for way in (WAYS["a command"], WAYS["a transaction"]):
            with pytest.raises(Away) as caught:
                await way(client)
            assert caught.value.reason is AwayReason.NO_CONNECTION
        await reading
        await client.ping()


@pytest.mark.parametrize("name", ["", "nobody:wrong@", ":wrong@"])
async def test_wrong_credentials_are_a_fault_that_no_waiting_mends(
    trouble: Trouble, client: RedisClient, name: str
) -> None:
    await client.config_set("requirepass", "right")
    async with RedisClient.from_url(trouble.url.replace("unix://", f"unix://{name}"), protocol=2, retry=None) as one:
        for way in WAYS.values():
            with pytest.raises(CredentialsRefused):
                await way(one)


ENDLESS = """#!lua name=endless
local function endless() while true do end end
redis.register_function{function_name = "gspo_endless", callback = endless, flags = {"no-writes"}}
"""


async def test_a_function_that_an_operator_ends_may_be_called_again(trouble: Trouble, client: RedisClient) -> None:
    await client.function_load(ENDLESS)
    await client.config_set("busy-reply-threshold", 10)
    calling = asyncio.create_task(Functions(client).call("endless", ["gspo:{a}:job"]))
    async with trouble.client() as operator, asyncio.timeout(HANG_S):
        while not calling.done():
            with contextlib.suppress(Away, RedisFault):  # "not busy" before it is, "busy" while it ends
                await operator.execute_command("FUNCTION", "KILL")
            await asyncio.sleep(0.01)
    with pytest.raises(Away, match="Script killed by user") as caught:
        await calling
    assert caught.value.reason is AwayReason.BUSY


async def test_a_mistake_of_ours_is_a_fault(client: RedisClient) -> None:
    await client.set("text", "a")
    with pytest.raises(RedisFault, match="WRONGTYPE"):
        await client.hget("text", "a")
    assert type(translate(redis.exceptions.NoPermissionError("no"))) is NotPermitted


def test_nothing_comes_past_the_translation(client: RedisClient) -> None:
    for door in (client.pubsub, client.monitor):
        with pytest.raises(NotImplementedError):
            door()


# The API


@pytest.mark.parametrize("reason", REAL)
async def test_the_api_answers_503_and_takes_the_same_request_later(
    trouble: Trouble, client: RedisClient, reason: AwayReason
) -> None:
    key = {"Idempotency-Key": "k"}
    async with application(Store(client)) as app, http_to(app) as http:
        job = (await http.post("/v1/jobs", json=SPEC)).json()
        await trouble.begin(reason)
        for path, body in (("/v1/jobs", {"json": SPEC}), (job["links"]["pause"], {})):
            answer = await http.post(path, headers=key, **body)
            error = error_of(answer)
            assert (answer.status_code, error["type"], error["code"]) == (503, "unavailable_error", CODES[reason])
            assert answer.headers["retry-after"] == "1"
            assert error["message"]
        await trouble.end(reason)
        assert (await http.post("/v1/jobs", json=SPEC, headers=key)).status_code == 201
        assert (await http.post(job["links"]["pause"], headers=key)).status_code == 200


@pytest.mark.parametrize("reason", [AwayReason.BUSY, AwayReason.MASTERDOWN])
async def test_reading_is_answered_alike_by_a_server_that_is_not_read_from_either(
    trouble: Trouble, client: RedisClient, reason: AwayReason
) -> None:
    async with application(Store(client)) as app, http_to(app) as http:
        job = (await http.post("/v1/jobs", json=SPEC)).json()
        await trouble.begin(reason)
        for path in ("/v1/jobs", job["links"]["self"], job["links"]["events"], "/readyz", "/metrics"):
            answer = await http.get(path)
            assert (answer.status_code, error_of(answer)["code"]) == (503, CODES[reason])
        await trouble.end(reason)
        assert (await http.get("/readyz")).status_code == 200


def test_every_reason_has_an_answer_that_says_what_to_do() -> None:
    for reason in AwayReason:
        answer = unavailable(Away(reason))
        assert answer is not None
        assert "try again" in answer.message
    assert unavailable(ValueError("x")) is None


async def test_a_service_with_wrong_credentials_says_so(trouble: Trouble, client: RedisClient) -> None:
    async with application(Store(client)) as app, http_to(app) as http:
        await client.config_set("requirepass", "right")
        await client.connection_pool.disconnect()
        answer = await http.post("/v1/jobs", json=SPEC)
        assert (answer.status_code, error_of(answer)["code"]) == (503, "redis_credentials_refused")
        assert "right" not in answer.text


class FullDisk(Store):
    def __init__(self, redis: RedisClient) -> None:
        super().__init__(redis)
        self.jobs.create = self._fail  # type: ignore[method-assign]

    async def _fail(self, *args: Any, **options: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")


async def test_a_full_disk_of_the_service_is_503(client: RedisClient) -> None:
    async with application(FullDisk(client)) as app, http_to(app) as http:
        answer = await http.post("/v1/jobs", json=SPEC)
    assert (answer.status_code, error_of(answer)["code"]) == (503, "disk_full")
    assert answer.headers["retry-after"] == "1"


# The client and the command


async def test_the_client_asks_again_and_then_says_what_is_wrong(trouble: Trouble, tmp_path: Path) -> None:
    waits: list[float] = []
    with ApiProcess(trouble.url) as api, Client(api.url, sleep=waits.append) as client:
        job = await asyncio.to_thread(client.create_job, SPEC)
        await trouble.begin(AwayReason.NOREPLICAS)
        with pytest.raises(ApiError, match=r"too few replicas .*\[redis_no_replicas\]") as caught:
            await asyncio.to_thread(client.create_job, SPEC)
        assert (caught.value.status, waits) == (503, [1.0, 2.0, 4.0, 8.0])
        await trouble.end(AwayReason.NOREPLICAS)
        assert (await asyncio.to_thread(client.job, job["id"]))["status"] == "queued"


async def test_the_client_gets_through_when_the_server_comes_back(trouble: Trouble) -> None:
    waits: list[float] = []
    loop = asyncio.get_running_loop()

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            asyncio.run_coroutine_threadsafe(trouble.end(AwayReason.READONLY), loop).result()

    with ApiProcess(trouble.url) as api, Client(api.url, sleep=wait) as client:
        assert api.url
        await trouble.begin(AwayReason.READONLY)
        assert (await asyncio.to_thread(client.create_job, SPEC))["status"] == "queued"
        assert waits == [1.0, 2.0]


def test_a_stream_of_events_ends_with_the_reason_that_the_api_gives() -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        error = {"error": {"code": "redis_busy", "message": "Redis runs a script"}}
        return httpx.Response(503, headers={"Retry-After": "2"}, json=error)

    waits: list[float] = []
    with (
        Client(transport=httpx.MockTransport(answer), sleep=waits.append) as client,
        pytest.raises(ApiError, match=r"Redis runs a script \[redis_busy\]"),
    ):
        list(client.events("job_1"))
    assert waits == [2.0, 4.0, *[8.0] * 6]


async def test_the_command_says_in_one_sentence_what_is_wrong(
    trouble: Trouble, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setattr("gspo_core.client.FIRST_DELAY_S", 0.01)
    monkeypatch.setattr("gspo_core.client.LONGEST_DELAY_S", 0.01)
    (tmp_path / "job.yaml").write_text("model: m\nenvironments:\n- ref: environments.calculator:Calculator\n")
    with ApiProcess(trouble.url) as api:
        assert api.url
        await trouble.begin(AwayReason.OOM)
        status = await asyncio.to_thread(main, ["submit", str(tmp_path / "job.yaml"), "--url", api.url])
    said = capsys.readouterr().err
    assert (status, said.count("\n")) == (1, 1)
    assert "Redis is out of memory" in said
    assert "[redis_full]" in said


# The rollout worker


@pytest.mark.parametrize("reason", REAL)
async def test_a_rollout_worker_waits_for_as_long_as_it_takes(
    trouble: Trouble, client: RedisClient, reason: AwayReason
) -> None:
    bus, counters = Bus(client), Counters()
    await bus.load_functions()
    retrier = Retrier(counters, random.Random(0), Backoff(first_s=0.001, max_s=0.01))
    await trouble.begin(reason)
    assert await retrier.try_once(bus.join, "w") is None
    joining = asyncio.create_task(retrier.keep_trying(bus.join, "w"))
    name = "redis/retries" if reason is AwayReason.UNREACHABLE else "redis/not_now"
    async with asyncio.timeout(HANG_S):
        while counters[name] < 5:
            await asyncio.sleep(0.01)
        assert not joining.done()
        await trouble.end(reason)
        await bus.beat("w", await joining)


@pytest.mark.parametrize("error", [RedisFault("WRONGTYPE"), CredentialsRefused("no"), Fenced("w"), OSError("gone")])
async def test_any_other_answer_is_final(error: Exception) -> None:
    async def refuse() -> None:
        raise error

    retrier = Retrier(Counters(), random.Random(0))
    for call in (retrier.keep_trying, retrier.try_once):
        with pytest.raises(type(error)):
            await call(refuse)


# The trainer


class RunInTrouble(JobRun):
    """Meets the trouble in the middle; the second one ends."""

    def __init__(self, claim: Claim, store: Store, begin: Callable[[], Awaitable[None]] | None) -> None:
        self.phase = RunPhase()
        self._given, self._store, self._begin = claim, store, begin

    async def run(self) -> None:
        claim = self._given
        await self._store.jobs.set_status(claim.job_id, JobStatus.RUNNING, token=claim.token)
        if self._begin is None:
            raise ValueError("the end")
        await self._begin()
        bus = Bus(self._store._functions.redis)
        await bus.dispatch(claim.job_id, claim.token, 0, size=1, split=Split.TRAIN, task_index=0)


@pytest.mark.parametrize("reason", REAL)
async def test_a_trainer_lets_go_of_its_job_and_takes_it_again(
    trouble: Trouble, client: RedisClient, reason: AwayReason
) -> None:
    store, claims, has_begun, stop = Store(client), list[Claim](), asyncio.Event(), asyncio.Event()
    await store.load_functions()
    job = await store.jobs.create(JobSpec.model_validate(SPEC))

    async def begin() -> None:
        await trouble.begin(reason)
        has_begun.set()

    def make_run(claim: Claim, _spec: JobSpec) -> JobRun:
        claims.append(claim)
        return RunInTrouble(claim, store, begin if len(claims) == 1 else None)

    worker = TrainerWorker(store, Bus(client), "trainer", InProcess(store, make_run))
    training = asyncio.create_task(worker.run(stop))
    async with asyncio.timeout(HANG_S):
        await has_begun.wait()
        await asyncio.sleep(0.5)
        assert not training.done()
        await trouble.end(reason)
        while not (record := await store.jobs.get(job.id)).status.is_terminal:
            await asyncio.sleep(0.05)
        stop.set()
        await training
    assert [one.attempt for one in claims] == [1, 2]
    assert [one.code for one in record.attempts] == ["redis_unavailable", "internal"]
    assert record.status is JobStatus.FAILED
