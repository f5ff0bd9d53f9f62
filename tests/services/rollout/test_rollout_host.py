"""Episodes whose environment runs in processes of its own: what a policy breaks there becomes its own reward."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from gspo_core.chat import HermesCodec
from gspo_core.types import EpisodeKey, Outcome, StopReason, Trajectory
from services.hosts.server import HostOrder
from services.hosts.session import HostedEnvironment
from services.workers.episode import Episode
from services.workers.setting import EpisodeSpec
from tests.services.hosts.test_host import WORLDS, processes
from tests.services.rollout.rollout_kit import (
    JOB,
    ScriptedPolicy,
    Speech,
    Table,
    load_codec,
    make_setting,
    sampled,
    spec,
    until,
)

LIMITS = {"step_timeout_s": 0.5, "max_turns": 4}

Open = Callable[..., Awaitable[HostedEnvironment]]


@pytest.fixture
async def table(redis_client: Redis) -> Table:
    return await Table.lay(redis_client)


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> HermesCodec:
    return load_codec(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def speech(codec: HermesCodec) -> Speech:
    return Speech(codec)


@pytest.fixture
async def host() -> AsyncIterator[Open]:
    opened = []

    async def start(name: str, **config: Any) -> HostedEnvironment:
        opened.append(await HostedEnvironment.open(HostOrder(f"{WORLDS}:{name}", config, hang_grace_s=1.0)))
        return opened[-1]

    yield start
    for environment in opened:
        await environment.close()


async def play(
    table: Table, codec: HermesCodec, environment: HostedEnvironment, *scripts: list[Any], **changes: Any
) -> tuple[list[Outcome], dict[str, int]]:
    """One episode for each script, all at once; their outcomes as they are recorded, and what was counted."""
    await table.dispatch(size=len(scripts), task=0)
    leases = await table.lease(len(scripts))
    entry = {"ref": "tests:World", "limits": LIMITS} | changes
    setting = make_setting(table, codec, None)

    async def run(number: int) -> Outcome:
        order = EpisodeSpec.from_spec(spec(environments=[entry]), environment, leases[number], 4096)
        own = make_setting(table, codec, ScriptedPolicy(scripts[number]))
        await Episode(own, order).run()
        for name, value in own.counters.snapshot().items():
            setting.counters.add(name, value)
        return Trajectory(tuple(await table.segments(order.key))).outcome

    outcomes = await asyncio.gather(*(run(number) for number in range(len(scripts))))
    return outcomes, dict(setting.counters.snapshot())


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [("block", {"seconds": 60}, StopReason.TOOL_TIMEOUT), ("die", {"how": "SIGSEGV"}, StopReason.ENV_CRASH)],
)
async def test_what_the_policy_breaks_is_its_own_outcome(
    table: Table,
    codec: HermesCodec,
    speech: Speech,
    host: Open,
    name: str,
    arguments: dict[str, Any],
    reason: StopReason,
) -> None:
    good = [speech.call("add", amount=4), speech.say("done")]
    bad = [speech.call("add", amount=4), speech.call(name, **arguments)]
    outcomes, counts = await play(table, codec, await host("Light"), good, bad, list(good))
    assert [(outcome.stop_reason, outcome.reward) for outcome in outcomes] == [
        (StopReason.COMPLETED, 4.0),
        (reason, -1.0),
        (StopReason.COMPLETED, 4.0),
    ]
    assert counts[f"stop/{reason}"] == 1
    assert not any(name.startswith("attempts/") for name in counts)


async def test_a_job_may_set_the_price_of_breaking_it(
    table: Table, codec: HermesCodec, speech: Speech, host: Open
) -> None:
    script = [speech.call("die", how="exit")]
    (outcome,), _ = await play(table, codec, await host("Light"), script, broken_reward=-7.5)
    assert (outcome.stop_reason, outcome.reward) == (StopReason.ENV_CRASH, -7.5)


async def test_a_host_that_is_killed_costs_no_attempt(
    table: Table, codec: HermesCodec, speech: Speech, host: Open
) -> None:
    environment = await host("Alone")
    killed = []

    async def kill_first(prompt: list[int]) -> Any:
        if not killed:
            killed.append(environment.pool.server_pid)
            os.kill(killed[0], signal.SIGKILL)
            await until(lambda: environment.pool.num_processes == 0)  # on a busy machine it lives on for a few turns
        return sampled(speech.call("where"))

    script = [kill_first, speech.call("where"), speech.say("done")]
    (outcome,), counts = await play(table, codec, environment, script, limits=LIMITS | {"retries": 0})
    assert (outcome.stop_reason, outcome.reward) == (StopReason.COMPLETED, 1.0)
    assert counts["attempts/host_failed"] == 1


async def test_a_process_that_dies_while_it_acts_costs_one_turn_where_the_world_was_kept(
    table: Table, codec: HermesCodec, speech: Speech, host: Open, tmp_path: Path
) -> None:
    """Nobody knows whether it had paid: another attempt begins before that turn, and pays for itself."""
    environment, ledger = await host("Keeper"), tmp_path / "payments"

    async def kill_once() -> None:
        await until(ledger.exists)
        for pid in await processes(environment):
            os.kill(pid, signal.SIGKILL)

    killing = asyncio.create_task(kill_once())
    add = speech.call("add", amount=4)
    slow, quick = (speech.call("pay", folder=str(tmp_path), seconds=seconds) for seconds in (0.4, 0))
    limits = {**LIMITS, "step_timeout_s": 20.0, "retries": 0}
    (outcome,), counts = await play(table, codec, environment, [add, slow, quick, speech.say("done")], limits=limits)
    await killing
    assert (outcome.stop_reason, outcome.reward) == (StopReason.COMPLETED, 104.0)
    assert outcome.metrics["tool_calls"] == 2
    segments = await table.segments(EpisodeKey(JOB, 0, 0))
    assert {segment.attempt for segment in segments} == {1}
    assert ledger.read_text().splitlines() == ["paid"] * 2  # one in each attempt
    assert (counts["attempts/host_failed"], counts["episodes/rewound"]) == (1, 1)
    assert (counts["tokens/resumed"], counts["tokens/thrown_away"]) == (len(add), len(slow))


async def test_a_failing_scorer_is_never_a_reward_of_zero(
    table: Table, codec: HermesCodec, speech: Speech, host: Open
) -> None:
    environment = await host("Alone", trouble="crashing reward")
    (outcome,), counts = await play(table, codec, environment, [speech.say("done")] * 3)
    assert (outcome.stop_reason, outcome.reward) == (StopReason.ENV_ERROR, None)
    assert counts["attempts/score_failed"] == 3
