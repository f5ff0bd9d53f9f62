"""Environments in processes of their own: who is blamed for what, who goes on, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gspo_core.env import CallStatus, EnvironmentFailed, InvalidEnvironment, Observation, ParsedTurn, Timeouts, ToolCall
from gspo_core.types import Split, StopReason
from services.hosts.server import HostOrder
from services.hosts.session import HostedEnvironment, HostedSession, SessionLost
from services.hosts.walls import scratch
from tests.apparatus.processes import is_running
from tests.services.rollout.rollout_kit import until

WORLDS = Path(__file__).with_name("host_worlds.py")
SHORT = Timeouts(reset_timeout_s=2.0, step_timeout_s=0.5, score_timeout_s=2.0, close_timeout_s=1.0)
# Of whom nothing is to be found too slow.
PATIENT = Timeouts(reset_timeout_s=600.0, step_timeout_s=600.0, score_timeout_s=600.0, close_timeout_s=600.0)
# Generous: other work shares the machine. Every deadline that is checked lies far below the trouble itself.
SOON_S = 30.0

Open = Callable[..., Awaitable[HostedEnvironment]]


def turn(*calls: tuple[str, dict[str, Any]]) -> ParsedTurn:
    return ParsedTurn("", tuple(ToolCall(name, given, CallStatus.OK, "", 0, 1) for name, given in calls))


def call(name: str, **arguments: Any) -> ParsedTurn:
    return turn((name, arguments))


def said(observation: Observation) -> str:
    return str(observation.messages[-1]["content"])


async def begun(environment: HostedEnvironment, index: int = 0, limits: Timeouts = SHORT) -> HostedSession:
    session = environment.session(limits=limits, episode_id=f"job/0/{index}")
    await session.start(await environment.task(Split.TRAIN, index), seed=index)
    return session


async def processes(environment: HostedEnvironment) -> list[int]:
    """Their numbers, each of which comes on a way of its own, perhaps after a session's first answer."""
    await until(lambda: 0 < len(environment.pool.pids) == environment.pool.num_processes)
    return environment.pool.pids


async def gone(*pids: int) -> None:
    deadline = time.monotonic() + SOON_S
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still running: {[pid for pid in pids if is_running(pid)]}"
        await asyncio.sleep(0.02)


@pytest.fixture
def counts() -> Counter[str]:
    return Counter()


@pytest.fixture
async def host(counts: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Open]:
    opened: list[HostedEnvironment] = []

    async def start(name: str, config: dict[str, Any] | None = None, **hosting: Any) -> HostedEnvironment:
        def count(name: str) -> None:
            counts[name] += 1

        order = HostOrder(f"{WORLDS}:{name}", config or {}, hosting, hang_grace_s=1.0)
        opened.append(await HostedEnvironment.open(order, count))
        return opened[-1]

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield start
    for environment in opened:
        await environment.close()
        await gone(environment.pool.server_pid)
    assert [name for name in os.listdir(tmp_path) if name.startswith(scratch.PREFIX)] == []


async def test_an_episode_is_played_as_it_would_be_here(host: Open) -> None:
    environment = await host("Light")
    session = await begun(environment, 3)
    assert [said(await session.act(call("add", amount=amount))) for amount in (1, 2)] == ["4", "6"]
    assert said(await session.act(call("nothing"))).startswith("error: unknown tool 'nothing'")
    assert said(await session.act(call("add", amount="\ud800"))).startswith("error:")
    end = await session.act(ParsedTurn("done"))
    assert (end.done, end.stop_reason) == (True, StopReason.COMPLETED)
    session.keep_evidence(1000)
    assert await session.score() == (6.0, {})
    assert session.evidence.state == {"total": 6}
    await session.close()
    assert session.close_failure is None
    assert [environment.num_tasks(split) for split in Split] == [10, 1]
    assert environment.reward_range == (-1.0, 10.0)
    with pytest.raises(EnvironmentFailed, match="none at index 10"):
        await environment.task(Split.TRAIN, 10)


@pytest.mark.parametrize(("world", "shares"), [("Light", True), ("Shared", True), ("Alone", False)])
async def test_sessions_share_a_process_where_blame_stays_certain(host: Open, world: str, shares: bool) -> None:
    environment = await host(world)
    sessions = [await begun(environment) for _ in range(2 if world == "Alone" else 4)]
    pids = [said(await session.act(call("where"))) for session in sessions]
    assert (len(set(pids)) < len(pids)) == shares
    for session in sessions:
        await session.close()


@pytest.mark.parametrize("world", ["Light", "Shared", "Alone"])
async def test_who_hangs_has_an_outcome_and_its_neighbours_notice_nothing(
    host: Open, counts: Counter[str], world: str
) -> None:
    environment = await host(world, **({} if world == "Alone" else {"max_processes": 1}))
    guilty, *others = [await begun(environment, 0) for _ in range(2 if world == "Alone" else 4)]
    pid = int(said(await guilty.act(call("where"))))
    for number, other in enumerate(others):
        if world != "Alone":
            await other.act(call("add", amount=number))
    begun_at = time.monotonic()
    observation = await guilty.act(call("block", seconds=60))
    assert time.monotonic() - begun_at < SOON_S
    assert observation.stop_reason is StopReason.TOOL_TIMEOUT
    low = -2.0 if world == "Alone" else -1.0
    assert await guilty.score() == (low, {})
    await guilty.close()
    await gone(pid)
    for number, other in enumerate(others if world != "Alone" else ()):
        assert said(await other.act(call("add", amount=10))) == str(number + 10)
        await other.close()
    assert (counts["host/hung"], counts["host/broken_by_policy"]) == (1, 1)
    assert counts["host/sessions_restored"] == (0 if world == "Alone" else 3)


@pytest.mark.parametrize("how", ["exit", "SIGSEGV", "SIGABRT"])
@pytest.mark.parametrize("world", ["Light", "Shared", "Alone"])
async def test_who_crashes_its_process_has_an_outcome(host: Open, counts: Counter[str], world: str, how: str) -> None:
    environment = await host(world)
    guilty, other = await begun(environment), await begun(environment)
    observation = await guilty.act(call("die", how=how))
    assert observation.stop_reason is StopReason.ENV_CRASH
    assert (await guilty.score())[0] == environment.reward_range[0]  # type: ignore[index]
    assert not (await other.act(call("where"))).done
    assert (await other.score())[0] >= 0.0
    for session in (guilty, other):
        await session.close()
        assert session.close_failure is None
    assert (counts["host/crashed"], counts["host/broken_by_policy"]) == (1, 1)


async def test_of_several_suspects_only_the_one_that_crashes_alone_is_blamed(host: Open, counts: Counter[str]) -> None:
    environment = await host("Shared", max_processes=1)
    guilty, *others = [await begun(environment, limits=PATIENT) for _ in range(4)]
    acting = [asyncio.create_task(other.act(call("block", seconds=0.4))) for other in others]
    observation = await guilty.act(call("die", how="exit", after=0.1))
    assert observation.stop_reason is StopReason.ENV_CRASH
    assert [said(await one) for one in acting] == ["blocked"] * 3
    assert counts["host/broken_by_policy"] == 1
    assert counts["host/crashed"] == 2
    for session in (guilty, *others):
        await session.close()


async def test_whoever_only_waits_beside_one_that_blocks_the_loop_is_no_suspect(
    host: Open, counts: Counter[str]
) -> None:
    environment = await host("Light", max_processes=1)
    guilty, *others = [await begun(environment) for _ in range(4)]
    waiting = [asyncio.create_task(other.act(call("rest", seconds=0.3))) for other in others]
    await asyncio.sleep(0.1)
    assert (await guilty.act(call("block", seconds=60))).stop_reason is StopReason.TOOL_TIMEOUT
    assert [said(await one) for one in waiting] == ["rested"] * 3
    assert counts["host/hung"] == 1
    for session in (guilty, *others):
        await session.close()


async def test_a_tool_that_raises_breaks_nothing(host: Open, counts: Counter[str]) -> None:
    session = await begun(await host("Alone"))
    assert said(await session.act(call("explode"))) == "error: RuntimeError: boom"
    assert await session.score() == (1.0, {})
    await session.close()
    assert counts["host/broken_by_policy"] == 0


async def test_a_metric_that_is_not_finite_is_left_out(host: Open) -> None:
    session = await begun(await host("Undefined"))
    assert said(await session.act(call("rate"))) == "rated"
    assert await session.score() == (0.5, {})
    assert session.metrics == {"rated": 1.0}
    await session.close()


async def test_memory_has_a_bound(host: Open, counts: Counter[str]) -> None:
    environment = await host("Alone")
    session = await begun(environment, limits=Timeouts(step_timeout_s=20.0))
    assert said(await session.act(call("grab"))).startswith("error: MemoryError")
    assert (await session.act(call("hog"))).stop_reason is StopReason.ENV_CRASH
    assert await session.score() == (-2.0, {})
    await session.close()
    assert (counts["host/over_memory"], counts["host/broken_by_policy"]) == (1, 1)


async def test_memory_that_was_held_for_a_moment_counts_too(host: Open, counts: Counter[str]) -> None:
    session = await begun(await host("Alone"), limits=Timeouts(step_timeout_s=20.0))
    assert (await session.act(call("spike"))).stop_reason is StopReason.ENV_CRASH
    await session.close()
    assert counts["host/over_memory"] == 1


def is_in_memory(folder: Path) -> bool:
    kind = subprocess.run(["stat", "-f", "-c", "%T", folder], capture_output=True, text=True, check=True).stdout
    return kind.strip() in ("tmpfs", "ramfs")


async def test_files_that_are_mapped_are_no_memory_of_a_session(
    host: Open, counts: Counter[str], tmp_path: Path
) -> None:
    data = tmp_path / "data"
    if is_in_memory(tmp_path):
        pytest.skip("files of a tmpfs are memory")
    data.touch()
    os.truncate(data, 300 << 20)
    session = await begun(await host("Alone"), limits=Timeouts(step_timeout_s=20.0))
    assert said(await session.act(call("map", path=str(data)))) == "0"
    assert said(await session.act(call("unmap"))) == "closed"
    assert said(await session.act(call("map", path=str(data)))) == "0"
    assert counts["host/over_memory"] == 0
    # Beside them its own memory counts as ever, also for a moment.
    assert (await session.act(call("spike"))).stop_reason is StopReason.ENV_CRASH
    assert counts["host/over_memory"] == 1
    await session.close()


async def test_who_merely_acts_when_all_together_filled_the_memory_is_not_blamed(
    host: Open, counts: Counter[str]
) -> None:
    environment = await host("Light", max_processes=1, memory_mb=128)
    sessions = [await begun(environment, limits=Timeouts()) for _ in range(3)]
    for session in sessions:
        assert said(await session.act(call("hold", megabytes=60))) == "60"
    assert counts["host/over_memory"] >= 1
    assert counts["host/broken_by_policy"] == 0
    assert (await sessions[0].act(call("hold", megabytes=110))).stop_reason is StopReason.ENV_CRASH
    assert counts["host/broken_by_policy"] == 1
    for session in sessions:
        await session.close()


async def test_a_deadline_that_a_coroutine_keeps_costs_its_neighbours_nothing(host: Open, counts: Counter[str]) -> None:
    environment = await host("Slow", max_processes=1)
    slow, other = [await begun(environment) for _ in range(2)]
    with pytest.raises(EnvironmentFailed, match="timed out after 2s"):
        await slow.score()
    assert said(await other.act(call("add", amount=1))) == "1"
    for session in (slow, other):
        await session.close()
    assert counts["host/hung"] == 0


async def test_a_snapshot_has_a_time_of_its_own(counts: Counter[str]) -> None:
    def count(name: str) -> None:
        counts[name] += 1

    order = HostOrder(f"{WORLDS}:Unhurried", hang_grace_s=0.1)
    environment = await HostedEnvironment.open(order, count)
    try:
        session = await begun(environment, limits=Timeouts(step_timeout_s=4.0))
        observation = await session.act(call("wait", seconds=3.0))
        assert (said(observation), observation.done) == ("waited", False)
        assert await session.snapshot() is not None
        await session.close()
    finally:
        await environment.close()
    assert counts["host/hung"] == 0


async def test_a_world_elsewhere_that_does_not_answer_ends_one_episode_only(host: Open, counts: Counter[str]) -> None:
    environment = await host("Far", max_processes=1)
    guilty, other = [await begun(environment) for _ in range(2)]
    assert (await guilty.act(call("rest", seconds=60))).stop_reason is StopReason.TOOL_TIMEOUT
    assert await guilty.score() == (-1.0, {})
    assert said(await other.act(call("rest", seconds=0))) == "rested"
    for session in (guilty, other):
        await session.close()
    assert (counts["host/hung"], counts["host/broken_by_policy"]) == (0, 1)


async def test_a_thread_that_nobody_can_stop_gets_no_new_neighbours(host: Open) -> None:
    environment = await host("Shared", max_processes=1)
    first, second = [await begun(environment) for _ in range(2)]
    pid = said(await second.act(call("where")))
    acting = asyncio.create_task(first.act(call("block", seconds=60)))
    await asyncio.sleep(0.1)
    acting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await acting
    await first.close()
    third = await begun(environment)
    assert said(await third.act(call("where"))) != pid == said(await second.act(call("where")))
    for session in (second, third):
        await session.close()
    await gone(int(pid))


async def test_an_old_snapshot_is_not_taken_for_the_last_one(host: Open) -> None:
    environment = await host("Keeper")
    session = await begun(environment, 1)
    assert said(await session.act(call("add", amount=12))).startswith("13 at")  # its snapshot is too large to be kept
    os.kill(int(said(await session.act(call("where")))), signal.SIGKILL)
    with pytest.raises(SessionLost):
        await session.score()
    await session.close()


async def test_files_answers_and_output_have_bounds(host: Open) -> None:
    session = await begun(await host("Alone"), limits=Timeouts(step_timeout_s=20.0))
    assert said(await session.act(call("fill", size=1000))) == "written"
    assert "File too large" in said(await session.act(call("fill", size=2 << 20)))
    assert said(await session.act(call("speak", size=20 << 20))) == "error: the answer is too long"
    assert said(await session.act(call("shout", size=5 << 20))) == "shouted"
    await session.close()


async def test_no_secret_reaches_an_environment(host: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GSPO_API_KEYS", "secret")
    monkeypatch.setenv("SOME_TOKEN", "secret")
    session = await begun(await host("Alone"))
    given = said(await session.act(call("variables")))
    assert "PATH" in given
    assert "GSPO" not in given
    assert "TOKEN" not in given
    await session.close()


KILLED = """
import os
import signal
from pathlib import Path

with Path(__file__).with_name("deaths").open("a+") as deaths:
    deaths.seek(0)
    if len(deaths.read()) < {num}:
        deaths.write("x")
        deaths.flush()
        os.kill(os.getpid(), signal.{name})


class World:
    tasks = [{{}}]

    def reset(self):
        return "begin"

    def get_reward(self):
        return 0.0
"""


async def test_a_host_that_is_killed_while_it_comes_up_says_nothing_of_its_environment(
    tmp_path: Path, counts: Counter[str]
) -> None:
    (tmp_path / "world.py").write_text(KILLED.format(num=2, name="SIGKILL"))
    order = HostOrder(f"{tmp_path}/world.py:World")
    environment = await HostedEnvironment.open(order, lambda name: counts.update([name]))
    assert environment.num_tasks(Split.TRAIN) == 1
    assert counts["host/rebooted"] == 2
    await environment.close()


@pytest.mark.parametrize(("name", "num_deaths", "words"), [("SIGKILL", 3, "was killed"), ("SIGSEGV", 1, "exited")])
async def test_a_host_that_never_comes_up_is_the_fault_of_its_environment(
    name: str, num_deaths: int, words: str, tmp_path: Path
) -> None:
    (tmp_path / "world.py").write_text(KILLED.format(num=9, name=name))
    with pytest.raises(InvalidEnvironment, match=words):
        await HostedEnvironment.open(HostOrder(f"{tmp_path}/world.py:World"))
    assert len((tmp_path / "deaths").read_text()) == num_deaths


async def test_a_killed_host_comes_up_again_and_nobody_is_charged(host: Open, counts: Counter[str]) -> None:
    environment = await host("Light")
    first, second = await begun(environment, 1), await begun(environment, 2)
    await first.act(call("add", amount=5))
    pids = await processes(environment)
    waiting = asyncio.create_task(second.act(call("rest", seconds=0.3)))
    await asyncio.sleep(0.1)
    old = environment.pool.server_pid
    os.kill(old, signal.SIGKILL)
    assert said(await waiting) == "rested"
    assert said(await first.act(call("add", amount=1))) == "7"
    await gone(old, *pids)
    assert counts["host/rebooted"] == 1
    assert counts["host/broken_by_policy"] == 0
    for session in (first, second):
        await session.close()


def kill_and_wait(pid: int) -> None:
    """The loop does not run meanwhile, so nobody has heard of it."""
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + SOON_S
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def test_a_host_that_ends_just_when_it_is_asked_for_a_process_is_started_again(
    host: Open, counts: Counter[str]
) -> None:
    environment = await host("Light")
    kill_and_wait(environment.pool.server_pid)
    session = await begun(environment)
    assert said(await session.act(call("add", amount=1))) == "1"
    await session.close()
    assert counts["host/rebooted"] == 1


async def test_a_session_goes_on_from_its_snapshot(host: Open, counts: Counter[str]) -> None:
    environment = await host("Keeper")
    first, second = await begun(environment, 1), await begun(environment, 2)
    assert said(await first.act(call("add", amount=5))).startswith("6 at")
    os.kill(environment.pool.server_pid, signal.SIGKILL)
    await died(environment)
    assert said(await first.act(call("add", amount=-1))).startswith("5 at")
    assert first.metrics == {"largest": 6.0}
    assert (await second.act(ParsedTurn("bye"))).done
    for pid in await processes(environment):
        os.kill(pid, signal.SIGKILL)
    await died(environment)
    assert [await session.score() for session in (first, second)] == [(5.0, {}), (102.0, {})]
    state = await second.snapshot()
    assert state is not None
    third = environment.session(limits=SHORT)
    await third.restore(await environment.task(Split.TRAIN, 2), 2, state)
    assert await third.score() == (102.0, {})
    assert counts["host/sessions_restored"] >= 3
    for session in (first, second, third):
        await session.close()


async def died(environment: HostedEnvironment) -> None:
    """All of its processes, as far as is known here."""
    await until(lambda: environment.pool.num_processes == 0)


async def killed_while_paying(environment: HostedEnvironment, folder: Path, session: HostedSession) -> Observation:
    """The answer to a payment whose process is killed from outside once it is made, and before it is answered."""
    payments = folder / "payments"
    num_before = len(payments.read_text().splitlines()) if payments.exists() else 0
    paying = asyncio.create_task(session.act(call("pay", folder=str(folder), seconds=2.0)))
    await until(lambda: payments.exists() and len(payments.read_text().splitlines()) > num_before)
    for pid in await processes(environment):
        os.kill(pid, signal.SIGKILL)
    return await paying


async def test_who_acts_when_its_process_dies_acts_again_only_where_that_is_declared_harmless(
    host: Open, tmp_path: Path
) -> None:
    """The session that can be replayed says so; the one that only has snapshots may have paid, and nobody knows."""
    ledger = tmp_path / "payments"
    replayed = await begun(environment := await host("Shared"), limits=PATIENT)
    assert said(await killed_while_paying(environment, tmp_path, replayed)) == "paid"
    assert ledger.read_text().splitlines() == ["paid"] * 2
    await replayed.close()
    ledger.unlink()
    kept = await begun(environment := await host("Keeper"), limits=PATIENT)
    state = await kept.snapshot()
    assert state is not None
    with pytest.raises(SessionLost, match="whether it acted") as lost:
        await killed_while_paying(environment, tmp_path, kept)
    assert ledger.read_text().splitlines() == ["paid"]
    assert lost.value.is_suspect
    await kept.close()
    # Whoever plays on says who it was: killed once more while it acts, it was no chance.
    watched = environment.session(limits=PATIENT)
    watched.watch()
    await watched.restore(await environment.task(Split.TRAIN, 0), 0, state)
    observation = await killed_while_paying(environment, tmp_path, watched)
    assert observation.stop_reason is StopReason.ENV_CRASH
    await watched.close()


async def test_what_cannot_be_restored_is_lost_and_not_a_failure_of_anybody(host: Open) -> None:
    environment = await host("Alone")
    session = await begun(environment)
    os.kill(int(said(await session.act(call("where")))), signal.SIGKILL)
    with pytest.raises(SessionLost):
        await session.act(call("where"))
    await session.close()
    again = await begun(environment)
    await again.close()


async def test_killed_once_is_chance_killed_by_the_same_action_twice_is_not(host: Open, counts: Counter[str]) -> None:
    session = await begun(await host("Light"))
    observation = await session.act(call("die", how="SIGKILL"))
    assert observation.stop_reason is StopReason.ENV_CRASH
    assert counts["host/killed"] == 2
    await session.close()


@pytest.mark.parametrize("world", ["Fickle", "Shared"])  # the one begins differently, the other answers differently
async def test_a_world_that_only_claims_to_be_replayable_is_found_out(
    host: Open, counts: Counter[str], world: str
) -> None:
    session = await begun(await host(world))
    os.kill(int(said(await session.act(call("where")))), signal.SIGKILL)
    with pytest.raises(SessionLost, match="answers differently"):
        await session.act(call("add", amount=1))
    assert counts["host/replay_differed"] == 1
    await session.close()


@pytest.mark.parametrize(
    ("trouble", "phase", "reason"),
    [
        ("hanging reset", "reset", "timed out"),
        ("crashing reset", "reset", "crashed"),
        ("crashing reward", "score", "crashed"),
    ],
)
async def test_what_the_policy_did_not_cause_is_a_failure_without_reward(
    host: Open, trouble: str, phase: str, reason: str
) -> None:
    environment = await host("Alone", {"trouble": trouble})
    session = environment.session(limits=SHORT)

    async def play() -> None:
        await session.start(await environment.task(Split.TRAIN, 0), 0)
        await session.score()

    with pytest.raises(EnvironmentFailed, match=reason) as failure:
        await play()
    assert failure.value.phase == phase
    assert not isinstance(failure.value, SessionLost)
    await session.close()


async def test_nothing_that_a_tool_started_outlives_its_session(host: Open) -> None:
    session = await begun(await host("Alone"), limits=Timeouts())
    left_behind = int(said(await session.act(call("daemonise"))))
    assert is_running(left_behind)
    await session.close()
    await gone(left_behind)


async def test_who_finds_no_seat_waits(host: Open) -> None:
    environment = await host("Alone")
    assert environment.capacity == 2
    most = 0

    async def play() -> None:
        nonlocal most
        session = await begun(environment)
        most = max(most, environment.pool.num_seated)
        await session.act(call("block", seconds=0.02))
        await session.close()

    await asyncio.gather(*(play() for _ in range(10)))
    assert most == 2
    assert environment.pool.num_seated == 0


async def test_a_thousand_sessions_at_once(host: Open) -> None:
    environment = await host("Light", sessions_per_process=600)
    limits = Timeouts(step_timeout_s=60.0)
    sessions = await asyncio.gather(*(begun(environment, number % 10, limits) for number in range(1000)))
    assert environment.pool.num_processes == 2
    answers = await asyncio.gather(*(session.act(call("rest", seconds=0.5)) for session in sessions))
    assert {said(answer) for answer in answers} == {"rested"}
    totals = await asyncio.gather(*(session.act(call("add", amount=1)) for session in sessions))
    assert [said(total) for total in totals] == [str(number % 10 + 1) for number in range(1000)]
    await asyncio.gather(*(session.close() for session in sessions))


async def test_an_act_that_is_cancelled_leaves_its_neighbours_alone(host: Open) -> None:
    environment = await host("Light", max_processes=1)
    first, second = await begun(environment), await begun(environment)
    acting = asyncio.create_task(first.act(call("rest", seconds=30)))
    await asyncio.sleep(0.1)
    acting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await acting
    await first.close()
    assert first.close_failure is None
    assert said(await second.act(call("add", amount=1))) == "1"
    await second.close()


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        (f"{WORLDS}:Nobody", "has no 'Nobody'"),
        ("nowhere.at_all:World", "no module"),
        (f"{WORLDS}:Alone", "memory"),
    ],
)
async def test_what_cannot_be_hosted_says_why(ref: str, message: str) -> None:
    with pytest.raises(InvalidEnvironment, match=message):
        await HostedEnvironment.open(HostOrder(ref, hosting={"memory_mb": -1}))


async def test_an_import_that_hangs_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)\n")
    with pytest.raises(InvalidEnvironment, match="not loaded within"):
        await HostedEnvironment.open(HostOrder(f"{tmp_path / 'slow.py'}:World", boot_timeout_s=0.5))


async def test_an_import_that_starts_threads_is_not_forked(tmp_path: Path) -> None:
    source = "import threading, time\nthreading.Thread(target=time.sleep, args=(300,), daemon=True).start()\n"
    path = tmp_path / "threaded.py"
    path.write_text(source + WORLDS.read_text().replace("from __future__ import annotations\n", ""))
    environment = await HostedEnvironment.open(HostOrder(f"{path}:Light"))
    try:
        session = await begun(environment)
        assert said(await session.act(call("add", amount=1))) == "1"
        await session.close()
    finally:
        await environment.close()


@pytest.mark.parametrize("host_is_killed", [False, True])
async def test_what_an_import_started_lives_as_long_as_the_host(tmp_path: Path, host_is_killed: bool) -> None:
    path = tmp_path / "serving.py"
    source = "import subprocess\nCHILD = subprocess.Popen(['sleep', '300'])\n"
    serving = '    def served(self) -> str:\n        """Tell."""\n        return str(CHILD.pid)\n\n    def reset('
    worlds = WORLDS.read_text().replace("from __future__ import annotations\n", "")
    path.write_text(source + worlds.replace("    def reset(", serving))
    environment = await HostedEnvironment.open(HostOrder(f"{path}:Alone"))
    try:
        first, second = await begun(environment), await begun(environment)
        child = int(said(await first.act(call("served"))))
        await first.act(call("die", how="exit"))
        assert said(await second.act(call("served"))) == str(child)
        assert is_running(child)
        for session in (first, second):
            await session.close()
        if host_is_killed:
            os.kill(environment.pool.server_pid, signal.SIGKILL)
    finally:
        await environment.close()
    await gone(child)


async def test_a_host_needs_nothing_but_python(tmp_path: Path) -> None:
    making = [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")]
    await asyncio.to_thread(subprocess.run, making, check=True)
    python = str(tmp_path / "bare" / "bin" / "python")
    environment = await HostedEnvironment.open(HostOrder(f"{WORLDS}:Light", python=python))
    try:
        session = await begun(environment)
        assert said(await session.act(call("add", amount=1))) == "1"
        await session.close()
    finally:
        await environment.close()


PARENT = """
import asyncio, sys
from services.hosts.server import HostOrder
from services.hosts.session import HostedEnvironment
from gspo_core.env import Timeouts
from tests.services.hosts.test_host import begun, call, said

async def main():
    environment = await HostedEnvironment.open(HostOrder(sys.argv[1]))
    session = await begun(environment, limits=Timeouts())
    own, left_behind = [said(await session.act(call(name))) for name in ("where", "daemonise")]
    print(environment.pool.server_pid, own, left_behind, flush=True)
    await asyncio.sleep(300)

asyncio.run(main())
"""


async def test_a_host_dies_with_its_parent() -> None:
    program = [sys.executable, "-c", PARENT, f"{WORLDS}:Alone"]
    root = Path(__file__).parents[3]
    variables = os.environ | {"PYTHONPATH": str(root)}
    parent = await asyncio.create_subprocess_exec(*program, stdout=subprocess.PIPE, cwd=root, env=variables)
    assert parent.stdout is not None
    pids = [int(pid) for pid in (await parent.stdout.readline()).split()]
    assert len(pids) == 3
    assert all(is_running(pid) for pid in pids)
    parent.kill()
    await parent.wait()
    await gone(*pids)
