"""Events: as pages and as streams, resumed exactly, against a real server and a real process."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from gspo_core.spec import JobSpec
from services.api.http.sse import EventStream, render
from services.api.views.event_tails import EventTails
from services.state.jobs import JobStatus
from services.state.server import RedisServer
from services.state.store import Claim, Store
from tests.patience import HANG_S
from tests.services.api.api_kit import SPEC, ApiProcess, application, error_of, http_to, parse_frames

STREAM = {"Accept": "text/event-stream"}


@pytest.fixture
async def http(store: Store) -> AsyncIterator[httpx.AsyncClient]:
    async with application(store) as app, http_to(app) as http:
        yield http


@pytest.fixture
async def job(store: Store) -> Claim:
    await store.jobs.create(JobSpec.model_validate(SPEC))
    claim = await store.jobs.claim("trainer-0")
    assert claim is not None
    return claim


async def finish(store: Store, job: Claim) -> None:
    for status in (JobStatus.RUNNING, JobStatus.SUCCEEDED):
        await store.jobs.set_status(job.job_id, status, token=job.token)


async def frames_of(http: httpx.AsyncClient, job: str, after: str | None = None) -> list[dict[str, str]]:
    """All frames of a stream that ends."""
    headers = STREAM | ({"Last-Event-ID": after} if after else {})
    answer = await http.get(f"/v1/jobs/{job}/events", headers=headers)
    assert answer.status_code == 200
    return parse_frames(answer.text.split("\n"))


# Pages


async def test_pages_hold_the_events_in_order(http: httpx.AsyncClient, store: Store, job: Claim):
    for step in range(5):
        await store.events.add(job.job_id, "step", {"step": step})
    found: list[dict[str, Any]] = []
    after = "0"
    for has_more in (True, True, False):
        page = (await http.get(f"/v1/jobs/{job.job_id}/events", params={"limit": 3, "after": after})).json()
        assert page["has_more"] is has_more
        found += page["data"]
        after = page["last_id"]
    assert [event["type"] for event in found] == ["job.status", "job.status"] + ["step"] * 5
    assert [event["data"]["step"] for event in found[2:]] == [0, 1, 2, 3, 4]
    assert all(event["object"] == "event" and event["created_at"].endswith("Z") for event in found)
    assert (await http.get(f"/v1/jobs/{job.job_id}/events")).json()["data"] == found


@pytest.mark.parametrize("headers", [{}, STREAM])
@pytest.mark.parametrize("position", ["x", "-1", "1-2-3", "", "1" * 17, "$", "+", "(0"])
async def test_positions_that_are_none_are_400_and_never_a_replay(
    http: httpx.AsyncClient, job: Claim, headers: dict[str, str], position: str
):
    url = f"/v1/jobs/{job.job_id}/events"
    for request in (
        http.get(url, params={"after": position}, headers=headers),
        http.get(url, headers=headers | {"Last-Event-ID": position}),
    ):
        answer = await request
        assert (answer.status_code, error_of(answer)["code"]) == (400, "invalid_cursor")


# Streams


async def test_a_stream_says_how_it_is_to_be_treated(http: httpx.AsyncClient, store: Store, job: Claim):
    await finish(store, job)
    answer = await http.get(f"/v1/jobs/{job.job_id}/events", headers=STREAM)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert (answer.headers["cache-control"], answer.headers["x-accel-buffering"]) == ("no-cache", "no")
    assert answer.text.startswith("retry: 2000\n\n")
    assert answer.text.count("retry:") == 1


async def test_a_stream_of_a_finished_job_replays_and_ends(http: httpx.AsyncClient, store: Store, job: Claim):
    text = 'line\nbreak \u2028 "quotes" ü'
    await store.events.add(job.job_id, "log", {"message": text})
    await finish(store, job)
    listed = (await http.get(f"/v1/jobs/{job.job_id}/events")).json()["data"]
    retry, *events, end = await frames_of(http, job.job_id, "0")
    assert retry == {"retry": "2000"}
    assert [event["id"] for event in events] == [event["id"] for event in listed]
    assert [httpx.Response(200, text=event["data"]).json() for event in events] == [event["data"] for event in listed]
    assert events[2]["event"] == "log"
    assert end == {"event": "end", "data": "{}"}
    # Whoever comes back after the end hears it again.
    assert await frames_of(http, job.job_id, events[-1]["id"]) == [retry, end]


async def test_the_header_wins_over_the_parameter(http: httpx.AsyncClient, store: Store, job: Claim):
    await finish(store, job)
    ids = [event["id"] for event in (await http.get(f"/v1/jobs/{job.job_id}/events")).json()["data"]]
    url = f"/v1/jobs/{job.job_id}/events"
    answer = await http.get(url, params={"after": ids[0]}, headers=STREAM | {"Last-Event-ID": ids[2]})
    assert [frame.get("id") for frame in parse_frames(answer.text.split("\n"))] == [None, ids[3], None]
    by_parameter = await http.get(url, params={"after": ids[2]}, headers=STREAM)
    assert by_parameter.text == answer.text


async def test_trimmed_history_is_announced_once(http: httpx.AsyncClient, store: Store, job: Claim):
    for step in range(20):
        await store.events.add(job.job_id, "step", {"step": step})
    await finish(store, job)
    ids = [event["id"] for event in (await http.get(f"/v1/jobs/{job.job_id}/events")).json()["data"]]
    await store.events.trim(job.job_id, 5)
    _, gap, *events, end = await frames_of(http, job.job_id, ids[3])
    assert gap["event"] == "gap"
    assert httpx.Response(200, text=gap["data"]).json() == {"resumed_after": ids[3], "first_available": ids[-5]}
    assert [event["id"] for event in events] == ids[-5:]
    assert end["event"] == "end"
    # A position equal to the last removed event misses nothing, and neither does the gap's own id.
    assert gap["id"] == ids[-6]
    assert [frame.get("id") for frame in await frames_of(http, job.job_id, ids[-6])] == [None, *ids[-5:], None]


# Live, in a process of its own


@pytest.fixture(scope="module")
def api(redis_server: RedisServer) -> Iterator[ApiProcess]:
    with ApiProcess(redis_server.url) as api:
        yield api


@pytest.fixture(scope="module")
def api_url(api: ApiProcess) -> str:
    return api.url


@pytest.fixture
async def live(api_url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=api_url, timeout=HANG_S, trust_env=False) as http:
        yield http


class Reader:
    """Reads a stream frame by frame."""

    def __init__(self, answer: httpx.Response) -> None:
        self._lines = answer.aiter_lines()

    async def next(self) -> dict[str, str]:
        """The next frame that is no comment and not the first one."""
        while True:
            block: list[str] = []
            async for line in self._lines:
                if not line:
                    break
                block.append(line)
            else:
                raise EOFError
            frames = parse_frames(block)
            if frames and "retry" not in frames[0]:
                return frames[0]


async def test_without_a_position_a_stream_begins_with_the_newest_status(
    live: httpx.AsyncClient, store: Store, job: Claim
):
    await store.jobs.set_status(job.job_id, JobStatus.RUNNING, token=job.token)
    for step in range(1100):
        await store.events.add(job.job_id, "step", {"step": step})
    async with asyncio.timeout(HANG_S), live.stream("GET", f"/v1/jobs/{job.job_id}/events", headers=STREAM) as answer:
        reader = Reader(answer)
        first = await reader.next()
        news = await store.events.add(job.job_id, "step", {"step": -1})
        second = await reader.next()
    assert (first["event"], '"running"' in first["data"]) == ("job.status", True)
    assert (second["event"], second["id"]) == ("step", news)
    # Its id is that of the newest event of all: resuming after it repeats nothing.
    async with live.stream(
        "GET", f"/v1/jobs/{job.job_id}/events", headers=STREAM | {"Last-Event-ID": first["id"]}
    ) as s:
        assert (await Reader(s).next())["id"] == news


async def test_events_arrive_while_they_happen_and_the_end_closes(live: httpx.AsyncClient, store: Store, job: Claim):
    async with (
        asyncio.timeout(HANG_S),
        live.stream("GET", f"/v1/jobs/{job.job_id}/events?after=0", headers=STREAM) as answer,
    ):
        reader = Reader(answer)
        seen = [await reader.next() for _ in range(2)]
        for step in range(3):
            written = await store.events.add(job.job_id, "step", {"step": step})
            seen.append(await reader.next())
            assert seen[-1]["id"] == written
        await finish(store, job)
        seen += [await reader.next() for _ in range(3)]
        with pytest.raises(EOFError):
            await reader.next()
    assert [frame["event"] for frame in seen] == [
        *("job.status", "job.status", "step", "step", "step"),
        *("job.status", "job.status", "end"),
    ]


async def test_streams_cut_anywhere_resume_without_gap_or_duplicate(
    store: Store, job: Claim, api: ApiProcess, redis_server: RedisServer
):
    """Dozens of cuts at random points, by two processes in turn, while events are being written."""
    chance = random.Random(1)
    writing = asyncio.create_task(_write(store, job, 250))
    with ApiProcess(redis_server.url, GSPO_DATA_DIR=api.data_dir) as other:
        urls = itertools.cycle([api.url, other.url])
        seen: list[str] = []
        ended, cuts = False, 0
        async with asyncio.timeout(100):
            while not ended:
                headers = STREAM | ({"Last-Event-ID": seen[-1]} if seen else {"Last-Event-ID": "0"})
                ended = await _read_some(next(urls), job.job_id, headers, seen, chance.randrange(1, 9))
                cuts += 1
    await writing
    listed = await store.events.read(job.job_id, "0", count=1000)
    assert seen == [event.id for event in listed]
    assert len(seen) == 254
    assert cuts >= 40
    about_root = '"event": "this service runs as root"'
    assert [line for line in api.log() if '"level": "info"' not in line and about_root not in line] == []


async def _write(store: Store, job: Claim, number: int) -> None:
    for step in range(number):
        await store.events.add(job.job_id, "step", {"step": step})
    await finish(store, job)


async def _read_some(url: str, job: str, headers: dict[str, str], seen: list[str], number: int) -> bool:
    """Appends the ids of up to `number` events and hangs up; whether the stream said its end."""
    async with (
        httpx.AsyncClient(base_url=url, timeout=HANG_S, trust_env=False) as http,
        http.stream("GET", f"/v1/jobs/{job}/events", headers=headers) as answer,
    ):
        reader = Reader(answer)
        for _ in range(number):
            frame = await reader.next()
            if frame["event"] == "end":
                return True
            seen.append(frame["id"])
    return False


async def test_silent_streams_are_pinged(store: Store, job: Claim):
    """Driven by hand: the clock stands until the events are out, then a tenth of a second passes between two looks."""
    stopping = asyncio.Event()
    clock: Iterator[float] = itertools.repeat(0.0)
    tails = EventTails(store, render, stopping)
    frames = EventStream(store, tails, job.job_id, stopping, lambda: next(clock), ping_s=0.15).frames("0")
    async with asyncio.timeout(HANG_S):
        assert await anext(frames) == b"retry: 2000\n\n"
        assert (await anext(frames)).count(b"event: job.status\n") == 2
        clock = itertools.count(0.0, 0.1)
        assert await anext(frames) == await anext(frames) == b": ping\n\n"
        stopping.set()
        assert [frame async for frame in frames] == []


async def test_a_slow_client_holds_up_nobody(live: httpx.AsyncClient, store: Store, job: Claim):
    payload = "x" * 20_000
    for step in range(300):
        await store.events.add(job.job_id, "log", {"step": step, "message": payload})
    await finish(store, job)
    url = f"/v1/jobs/{job.job_id}/events?after=0"
    async with asyncio.timeout(HANG_S), live.stream("GET", url, headers=STREAM) as slow:
        assert slow.status_code == 200  # and nothing is read from it
        quick = parse_frames((await live.get(url, headers=STREAM)).text.split("\n"))
    assert len(quick) == 306


@pytest.mark.parametrize("held_bytes", [0, 500, 4 << 20])
async def test_readers_from_any_position_see_what_follows_it_once_whatever_the_look_out_holds(
    store: Store, job: Claim, monkeypatch: pytest.MonkeyPatch, held_bytes: int
):
    """One look-out for all, that began where the first reader did, while events are written and trimmed."""
    monkeypatch.setattr("services.api.views.event_tails.MAX_HELD_BYTES", held_bytes)
    generator = random.Random(3)
    stopping = asyncio.Event()
    tails = EventTails(store, render, stopping)
    ids = [event.id for event in await store.events.read(job.job_id, "0")]

    async def read(after: str) -> list[str]:
        stream = EventStream(store, tails, job.job_id, stopping, time.monotonic).frames(after)
        return [line for block in [part async for part in stream] for line in block.decode().split("\n")]

    reading: list[tuple[str, asyncio.Task[list[str]]]] = []
    for step in range(120):
        if step % 6 == 0:
            after = generator.choice([ids[-1], ids[0], generator.choice(ids)])
            reading.append((after, asyncio.create_task(read(after))))
        ids.append(await store.events.add(job.job_id, "log", {"step": step}))
    await finish(store, job)
    async with asyncio.timeout(HANG_S):
        seen = [(after, await task) for after, task in reading]
    ids = [event.id for event in await store.events.read(job.job_id, "0", count=1000)]
    for after, lines in seen:
        assert [line[4:] for line in lines if line.startswith("id: ")] == ids[ids.index(after) + 1 :]
        assert lines.count("event: end") == 1


async def test_a_reader_from_a_position_that_nothing_has_reached_keeps_nothing_from_others(store: Store, job: Claim):
    """It came first, so the look-out would begin where it stands."""
    stopping = asyncio.Event()
    tails = EventTails(store, render, stopping)

    def stream(after: str) -> AsyncIterator[bytes]:
        return EventStream(store, tails, job.job_id, stopping, time.monotonic).frames(after)

    async def until(stream: AsyncIterator[bytes], needle: bytes) -> None:
        async for frame in stream:
            if needle in frame:
                return

    early, other = stream("9999999999999-0"), stream("0")
    waiting = asyncio.create_task(until(early, b"end"))
    async with asyncio.timeout(HANG_S):
        while not any(task.get_name().startswith("tail of") for task in asyncio.all_tasks()):
            await asyncio.sleep(0.01)
        await until(other, b"job.status")
        reading = asyncio.create_task(until(other, b"the news"))
        for _ in range(3):  # while it reads, and while it waits
            await asyncio.sleep(0.2)
            await store.events.add(job.job_id, "log", {"message": "not yet"})
        await store.events.add(job.job_id, "log", {"message": "the news"})
        await reading
        await finish(store, job)
        await waiting


@pytest.mark.parametrize("headers", [{}, STREAM])
async def test_digits_of_other_scripts_are_no_position(http: httpx.AsyncClient, job: Claim, headers: dict[str, str]):
    answer = await http.get(f"/v1/jobs/{job.job_id}/events", params={"after": "\u0661\u0662"}, headers=headers)
    assert (answer.status_code, error_of(answer)["code"]) == (400, "invalid_cursor")


async def test_many_silent_readers_cost_as_much_as_one_and_all_hear_the_news(store: Store, job: Claim):
    reads = 0

    async def read(*args: Any, **options: Any) -> Any:
        nonlocal reads
        reads += 1
        return await store.events.read(*args, **options)

    counting = Store(store._functions.redis)
    counting.events.read = read  # type: ignore[method-assign]
    stopping = asyncio.Event()
    tails = EventTails(counting, render, stopping)
    streams = [EventStream(counting, tails, job.job_id, stopping, time.monotonic).frames("0") for _ in range(50)]

    async def until(stream: AsyncIterator[bytes], needle: bytes) -> None:
        async for frame in stream:
            if needle in frame:
                return

    await asyncio.gather(*(until(stream, b"job.status") for stream in streams))
    waiting = [asyncio.create_task(until(stream, b"the news")) for stream in streams]
    await asyncio.sleep(0.2)
    before = reads
    await asyncio.sleep(1.2)
    assert reads - before < 10
    await store.events.add(job.job_id, "log", {"message": "the news"})
    async with asyncio.timeout(HANG_S):
        await asyncio.gather(*waiting)
    assert reads - before < 20  # and not one for each reader
    for stream in streams:
        await stream.aclose()  # type: ignore[attr-defined]
    async with asyncio.timeout(HANG_S):
        while any(task.get_name().startswith("tail of") for task in asyncio.all_tasks()):
            await asyncio.sleep(0.02)
