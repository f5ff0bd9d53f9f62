"""The life of one episode against a real queue: what is recorded, how it ends, and what failures turn into."""

from __future__ import annotations

import asyncio
import math
import re
import threading
from typing import Any, ClassVar

import pytest
from redis.asyncio import Redis

from gspo_core.chat import ForkReason, HermesCodec
from gspo_core.env import Environment, EnvironmentFailed, Observation, Start
from gspo_core.types import Outcome, Segment, Split, StopReason, Trajectory
from services.engines.protocol import EngineRejected
from services.episodes.policy import Drained, Sampled
from services.state.client import Away, AwayReason
from services.state.queue import Append, Fenced, Gap
from services.workers.episode import Episode
from services.workers.setting import EpisodeSetting, EpisodeSpec, episode_seed
from tests.patience import HANG_S
from tests.services.rollout.rollout_kit import (
    JOB,
    TRAINER,
    Counter,
    ScriptedPolicy,
    Speech,
    Table,
    answer_of,
    load_codec,
    make_order,
    make_setting,
    sampled,
    stitched,
    until,
    world,
)


@pytest.fixture
async def table(redis_client: Redis) -> Table:
    return await Table.lay(redis_client)


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> HermesCodec:
    return load_codec(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def speech(codec: HermesCodec) -> Speech:
    return Speech(codec)


class Play:
    """One episode, leased and ready to run."""

    def __init__(self, table: Table, setting: EpisodeSetting, order: EpisodeSpec, policy: ScriptedPolicy) -> None:
        self.table, self.setting, self.order, self.policy = table, setting, order, policy

    @classmethod
    async def prepare(
        cls,
        table: Table,
        codec: HermesCodec,
        answers: list[Any],
        environment: Environment | None = None,
        *,
        split: Split = Split.TRAIN,
        task: int = 1,
        **spec: Any,
    ) -> Play:
        await table.dispatch(split=split, task=task)
        (lease,) = await table.lease()
        policy = ScriptedPolicy(answers)
        return cls(table, make_setting(table, codec, policy), make_order(lease, environment, **spec), policy)

    async def run(self) -> StopReason:
        return await Episode(self.setting, self.order).run()

    async def segments(self) -> list[Segment]:
        return await self.table.segments(self.order.key)

    async def outcome(self) -> Outcome:
        return Trajectory(tuple(await self.segments())).outcome


async def test_an_episode_is_recorded_token_for_token(table: Table, codec: HermesCodec, speech: Speech) -> None:
    call, say = speech.call("add", amount=2), speech.say("done")
    play = await Play.prepare(table, codec, [call, say])
    assert await play.run() is StopReason.COMPLETED
    segments = await play.segments()
    prompt, second_prompt = play.policy.prompts
    assert prompt == codec.render(
        [
            {"role": "system", "content": "Raise the counter to the target, then say done."},
            {"role": "user", "content": "Reach exactly 2."},
        ],
        world().tools,
    )
    bridge = codec.bridge(prompt, call, [{"role": "tool", "content": "2"}])
    assert isinstance(bridge, list)
    assert second_prompt == prompt + call + bridge
    assert stitched(segments) == prompt + call + bridge + say
    mask = [False] * len(prompt) + [True] * len(call) + [False] * len(bridge) + [True] * len(say)
    assert stitched(segments, "action_mask") == mask
    outcome = await play.outcome()
    assert (outcome.reward, outcome.stop_reason) == (1.0, StopReason.COMPLETED)
    assert (outcome.metrics["turns"], outcome.metrics["tool_calls"], outcome.metrics["versions"]) == (2, 1, 1)
    assert outcome.evidence.state == {"value": 2, "target": 2}
    assert [ready.group for ready in await table.bus.ready_groups(JOB)] == [0]


class Paying(Counter):
    """Pays for every step, and for nothing at the end."""

    def add(self, amount: int, ctx: Any) -> str:
        """Add to the counter.

        Args:
            amount: how much
        """
        ctx.reward(amount / 4)
        ctx.reward(0.25)
        return super().add(amount)

    def get_reward(self) -> float:
        return 1.0


async def test_what_a_world_pays_for_a_turn_is_recorded_with_the_turn(
    table: Table, codec: HermesCodec, speech: Speech
) -> None:
    calls, say = [speech.call("add", amount=amount) for amount in (2, -1)], speech.say("done")
    play = await Play.prepare(table, codec, [*calls, say], world(Paying))
    assert await play.run() is StopReason.COMPLETED
    record = Trajectory(tuple(await play.segments()))
    assert record.segments[-1].turn_rewards == ((0, 0.75), (1, 0.0))
    assert (record.turn_rewards, record.reward) == ([0.75, 0.0, None], 1.75)


@pytest.mark.parametrize("on_truncation", ["score", "zero"])
async def test_turns_of_an_episode_that_is_not_scored_are_paid_nothing(
    table: Table, codec: HermesCodec, speech: Speech, on_truncation: str
) -> None:
    limits = {"max_turns": 1, "on_truncation": on_truncation}
    play = await Play.prepare(table, codec, [speech.call("add", amount=3)], world(Paying), limits=limits)
    assert await play.run() is StopReason.MAX_TURNS
    record = Trajectory(tuple(await play.segments()))
    assert (record.turn_rewards, record.reward) == (([1.0], 2.0) if on_truncation == "score" else ([None], 0.0))


async def test_a_version_that_changes_in_the_middle_of_a_turn_cuts_it(
    table: Table, codec: HermesCodec, speech: Speech
) -> None:
    call, say = speech.call("add", amount=2), speech.say("done")
    cut = len(call) // 2
    play = await Play.prepare(
        table, codec, [sampled(call, (7, 0, cut), (9, cut, len(call))), sampled(say, (9, 0, len(say)))]
    )
    await play.run()
    first, second, third, last = await play.segments()
    assert [segment.version for segment in (first, second, third, last)] == [7, 9, 9, 9]
    assert [segment.turn for segment in (first, second, third, last)] == [0, 0, 1, 1]
    assert stitched([first, second])[-len(call) :] == call
    expected = [-0.001 * (1 + number) for number in range(len(call))]
    assert stitched([first, second], "behavior_logprobs")[-len(call) :] == pytest.approx(expected, abs=1e-7)
    assert play.setting.counters["episodes/mixed_versions"] == 1


async def test_what_was_sampled_is_durable_before_the_tool_runs(
    table: Table, codec: HermesCodec, speech: Speech
) -> None:
    seen: list[int] = []

    class Watching(Counter):
        """Add."""

        async def add(self, amount: int) -> str:  # type: ignore[override]
            """Add.

            Args:
                amount: how much
            """
            seen.append(sum(segment.num_actions for segment in await table.segments(play.order.key)))
            return "ok"

    call = speech.call("add", amount=2)
    play = await Play.prepare(table, codec, [call, speech.say("done")], world(Watching))
    await play.run()
    assert seen == [len(call)]


async def test_a_long_turn_is_sampled_in_chunks_that_are_durable_one_by_one(
    table: Table, codec: HermesCodec, speech: Speech
) -> None:
    say = speech.say("x" * 25)
    play = await Play.prepare(table, codec, [say], rollout={"group_size": 2, "chunk_tokens": 10})
    await play.run()
    assert [segment.num_actions for segment in await play.segments()] == [10, 10, 6, 0]
    assert [len(prompt) - len(play.policy.prompts[0]) for prompt in play.policy.prompts] == [0, 10, 20]


@pytest.mark.parametrize(
    ("answers", "limits", "expected"),
    [
        (["call"] * 3, {"limits": {"max_turns": 2}}, StopReason.MAX_TURNS),
        (["call"] * 3, {"limits": {"max_tool_calls": 1}}, StopReason.MAX_TOOL_CALLS),
        (["long"], {"sampling": {"max_new_tokens": 8}}, StopReason.MAX_TOKENS),
        (["call", "long"], {"limits": {"max_episode_tokens": 70}}, StopReason.MAX_TOKENS),
        (["long"], {"limits": {"max_context_tokens": 20}}, StopReason.CONTEXT_OVERFLOW),
        (["broken"] * 3, {}, StopReason.PARSE_ERROR),
        (["thinking"], {}, StopReason.PARSE_ERROR),
        (["say"], {}, StopReason.COMPLETED),
    ],
)
async def test_every_limit_has_its_stop_reason_and_is_still_scored(
    table: Table, codec: HermesCodec, speech: Speech, answers: list[str], limits: dict[str, Any], expected: StopReason
) -> None:
    words = {
        "call": speech.call("add", amount=1),
        "long": speech.say("y" * 100),
        "broken": speech.raw_call("not json"),
        "thinking": speech.say("<think>and then it ends"),
        "say": speech.say("done"),
    }
    play = await Play.prepare(table, codec, [words[name] for name in answers], **limits)
    assert await play.run() is expected
    outcome = await play.outcome()
    assert outcome.stop_reason is expected
    assert outcome.reward is not None


class Painter(Counter):
    def add(self, amount: int) -> Any:
        """Add.

        Args:
            amount: how much
        """
        return [{"type": "image", "url": "x"}]


class PaintsFirst(Counter):
    def reset(self, target: int) -> Any:
        return [{"type": "image", "url": "x"}]


@pytest.mark.parametrize("cls", [Painter, PaintsFirst])
async def test_images_are_told_with_the_first_episode(
    table: Table, codec: HermesCodec, speech: Speech, cls: type[Counter]
) -> None:
    play = await Play.prepare(table, codec, [speech.call("add", amount=1)] * 3, world(cls))
    playing = asyncio.create_task(play.run())
    await until(lambda: play.order.quarantine.is_on)
    assert re.match("images: .* message holds content of type image$", play.order.quarantine.error or "")
    assert play.setting.counters["attempts/images_failed"] == 1
    playing.cancel()
    await asyncio.wait([playing])


async def test_images_of_an_environment_that_worked_are_told_too_and_stay_told(
    table: Table, codec: HermesCodec, speech: Speech
) -> None:
    play = await Play.prepare(table, codec, [speech.call("add", amount=1)] * 3, world(Painter))
    quarantine = play.order.quarantine
    async with quarantine.entry(play.setting.leaving):
        pass  # another episode came to its end
    playing = asyncio.create_task(play.run())
    await until(lambda: quarantine.is_on)
    assert re.match("images: .* content of type image", quarantine.error or "")
    await quarantine._succeeded()  # of one that was begun before
    assert quarantine.is_on
    playing.cancel()
    await asyncio.wait([playing])


async def test_a_prompt_that_fills_the_context_says_both_numbers(
    table: Table, codec: HermesCodec, speech: Speech
) -> None:
    class Long(Counter):
        def reset(self, target: int) -> str:
            return super().reset(target) + "w" * 5000

    play = await Play.prepare(table, codec, [], world(Long))
    assert await play.run() is StopReason.CONTEXT_OVERFLOW
    metrics = (await play.outcome()).metrics
    assert metrics["prompt_tokens"] > 5000
    assert (metrics["context_tokens"], metrics["model_context_tokens"]) == (4096, 4096)
    assert [one.num_tokens for one in await play.segments()] == [0]


async def test_the_context_limit_counts_what_tools_return(table: Table, codec: HermesCodec, speech: Speech) -> None:
    class Wordy(Counter):
        """Add."""

        def add(self, amount: int) -> str:
            """Add.

            Args:
                amount: how much
            """
            return "w" * 4000

    play = await Play.prepare(table, codec, [speech.call("add", amount=1)], world(Wordy))
    assert await play.run() is StopReason.CONTEXT_OVERFLOW
    assert sum(segment.num_tokens for segment in await play.segments()) < 4096


async def test_a_truncated_episode_gets_zero_where_the_job_says_so(
    table: Table, codec: HermesCodec, speech: Speech
) -> None:
    limits = {"max_turns": 1, "on_truncation": "zero"}
    play = await Play.prepare(table, codec, [speech.call("add", amount=2)], limits=limits)
    assert await play.run() is StopReason.MAX_TURNS
    assert (await play.outcome()).reward == 0.0


async def test_an_unreadable_call_is_answered_and_readable_ones_start_the_count_again(
    table: Table, codec: HermesCodec, speech: Speech
) -> None:
    broken, call, say = speech.raw_call("{"), speech.call("add", amount=2), speech.say("done")
    play = await Play.prepare(table, codec, [broken, broken, call, broken, broken, say])
    assert await play.run() is StopReason.COMPLETED
    assert (await play.outcome()).reward == 1.0
    assert (await play.outcome()).metrics["parse_errors"] == 4
    assert play.setting.counters["calls/invalid_json"] == 4


async def test_the_clock_of_an_episode_stands_still_while_no_engine_can_answer(
    table: Table, codec: HermesCodec, speech: Speech
) -> None:
    now = 0.0

    def slow(held_s: float) -> Any:
        async def answer(input_ids: list[int]) -> Sampled:
            nonlocal now
            now += 100.0
            ids = speech.call("add", amount=1)
            return answer_of(ids, [-0.1] * len(ids), [(0, 0, len(ids))], "engine-0", held_s=held_s)

        return answer

    limits = {"episode_timeout_s": 50.0}
    for held_s, expected in ((99.0, StopReason.MAX_TURNS), (0.0, StopReason.EPISODE_TIMEOUT)):
        play = await Play.prepare(table, codec, [slow(held_s)] * 2, limits={**limits, "max_turns": 2})
        setting = EpisodeSetting(
            **{name: getattr(play.setting, name) for name in EpisodeSetting.__slots__} | {"clock": lambda: now}
        )
        assert await Episode(setting, play.order).run() is expected
        await table.bus.commit(JOB, TRAINER, 1, [0])


async def test_evaluation_uses_held_out_tasks_and_its_own_temperature(
    table: Table, codec: HermesCodec, speech: Speech
) -> None:
    play = await Play.prepare(
        table, codec, [speech.say("done")], split=Split.EVAL, task=0, evaluation={"temperature": 0.25}
    )
    await play.run()
    assert play.policy.temperatures == [0.25]
    assert {segment.temperature for segment in await play.segments()} == {0.25}
    assert "Reach exactly 3." in codec.tokenizer.decode(play.policy.prompts[0])


class Failing(Counter):
    """Fails where and as often as it is told."""

    def __init__(self, where: str, times: int, how: str = "raises") -> None:
        self.where, self.times, self.how = where, times, how

    failures = 0

    def fail(self, where: str) -> Any:
        if where == self.where and Failing.failures < self.times:
            Failing.failures += 1
            if self.how == "hangs":
                threading.Event().wait(30)
            if self.how == "nan":
                return math.nan
            raise OSError("the world is gone")
        return None

    fail.__test__ = False  # type: ignore[attr-defined]

    def reset(self, target: int) -> str:
        self.fail("reset")
        return super().reset(target)

    def get_reward(self) -> float:
        return self.fail("score") or super().get_reward()


@pytest.mark.parametrize("how", ["raises", "hangs", "nan"])
@pytest.mark.parametrize("where", ["reset", "score"])
async def test_a_failing_world_costs_an_attempt_and_then_the_reward_but_nothing_else(
    table: Table, codec: HermesCodec, speech: Speech, where: str, how: str
) -> None:
    if (where, how) == ("reset", "nan"):
        how = "raises"
    limits = {"reset_timeout_s": 0.05, "score_timeout_s": 0.05}
    say = speech.say("done")

    Failing.failures = 0
    play = await Play.prepare(table, codec, [say] * 3, world(Failing, where=where, times=2, how=how), limits=limits)
    assert await play.run() is StopReason.COMPLETED
    assert {segment.attempt for segment in await play.segments()} == {2}
    assert play.setting.counters[f"attempts/{where}_failed"] == 2
    await table.bus.commit(JOB, TRAINER, 1, [0])

    Failing.failures = 0
    play = await Play.prepare(table, codec, [say] * 3, world(Failing, where=where, times=99, how=how), limits=limits)
    assert await play.run() is StopReason.ENV_ERROR
    outcome = await play.outcome()
    assert (outcome.stop_reason, outcome.reward) == (StopReason.ENV_ERROR, None)
    assert [ready.group for ready in await table.bus.ready_groups(JOB)] == [0]


async def test_a_tool_that_hangs_is_the_policys_own_doing_and_is_rewarded_with_the_low_end(
    table: Table, codec: HermesCodec, speech: Speech
) -> None:
    class Hanging(Counter):
        """Add."""

        reward_range = (-2.0, 1.0)

        def add(self, amount: int) -> str:
            """Add.

            Args:
                amount: how much
            """
            threading.Event().wait(30)
            return ""

    play = await Play.prepare(
        table, codec, [speech.call("add", amount=1)], world(Hanging), limits={"step_timeout_s": 0.05}
    )
    assert await play.run() is StopReason.TOOL_TIMEOUT
    assert (await play.outcome()).reward == -2.0


async def test_a_tool_that_raises_is_something_to_read(table: Table, codec: HermesCodec, speech: Speech) -> None:
    class Raising(Counter):
        """Add."""

        def add(self, amount: int) -> str:
            """Add.

            Args:
                amount: how much
            """
            raise ValueError("no more than 5")

    play = await Play.prepare(table, codec, [speech.call("add", amount=9), speech.say("done")], world(Raising))
    assert await play.run() is StopReason.COMPLETED
    assert "error: ValueError: no more than 5" in codec.tokenizer.decode(play.policy.prompts[1])


async def test_a_defect_in_a_world_is_contained(table: Table, codec: HermesCodec, speech: Speech) -> None:
    class Surprising(Counter):
        """Fills its prompt with what no codec can render."""

        def reset(self, target: int) -> Any:
            return [{"type": "text"}]

    play = await Play.prepare(table, codec, [speech.say("done")], world(Surprising))
    assert await play.run() is StopReason.ENV_ERROR


async def test_an_interrupted_episode_of_a_replayable_world_goes_on_where_it_was(
    table: Table, codec: HermesCodec, speech: Speech
) -> None:
    call, say = speech.call("add", amount=2), speech.say("it is done now")
    whole = await Play.prepare(table, codec, [call, say])
    await whole.run()
    expected = await whole.segments()
    await table.bus.commit(JOB, TRAINER, 1, [0])

    async def leave(input_ids: list[int]) -> Sampled:
        raise Drained

    first = await Play.prepare(table, codec, [call, sampled(say[:5]), leave])
    with pytest.raises(Drained):
        await first.run()
    assert [segment.num_actions for segment in await first.segments()] == [len(call), 5]
    await table.bus.hand_back(JOB, table.token, [first.order.key])

    (lease,) = await table.lease()
    assert lease.num_segments == 2
    policy = ScriptedPolicy([sampled(say[5:], engine="engine-1")])
    setting = make_setting(table, codec, policy)
    assert await Episode(setting, make_order(lease)).run() is StopReason.COMPLETED
    segments = await table.segments(lease.key)
    assert stitched(segments) == stitched(expected)
    assert [segment.attempt for segment in segments] == [0] * 4
    assert segments[-1].outcome is not None
    assert segments[-1].outcome.reward == 1.0
    assert setting.counters["tokens/resumed"] == len(call) + 5
    assert setting.counters["tokens/sampled"] == len(say) - 5


async def test_an_interrupted_episode_of_any_other_world_starts_again(
    table: Table, codec: HermesCodec, speech: Speech
) -> None:
    class Once(Counter):
        """Raise the counter."""

        replayable = False

    async def leave(input_ids: list[int]) -> Sampled:
        raise Drained

    call, say = speech.call("add", amount=2), speech.say("done")
    first = await Play.prepare(table, codec, [call, leave], world(Once))
    with pytest.raises(Drained):
        await first.run()
    await table.bus.hand_back(JOB, table.token, [first.order.key])
    (lease,) = await table.lease()
    setting = make_setting(table, codec, ScriptedPolicy([call, say]))
    assert await Episode(setting, make_order(lease, world(Once))).run() is StopReason.COMPLETED
    assert {segment.attempt for segment in await table.segments(lease.key)} == {1}
    assert setting.counters["tokens/thrown_away"] == len(call)


async def test_a_world_that_answers_differently_in_a_replay_starts_again(
    table: Table, codec: HermesCodec, speech: Speech
) -> None:
    class Moody(Counter):
        """Raise the counter."""

        mood = 0

        def add(self, amount: int) -> str:
            """Add.

            Args:
                amount: how much
            """
            self.value += amount
            Moody.mood += 1
            return f"mood {Moody.mood}"

    async def leave(input_ids: list[int]) -> Sampled:
        raise Drained

    call, say = speech.call("add", amount=2), speech.say("done")
    first = await Play.prepare(table, codec, [call, sampled(say[:2]), leave], world(Moody))
    with pytest.raises(Drained):
        await first.run()
    await table.bus.hand_back(JOB, table.token, [first.order.key])
    (lease,) = await table.lease()
    setting = make_setting(table, codec, ScriptedPolicy([call, say]))
    assert await Episode(setting, make_order(lease, world(Moody))).run() is StopReason.COMPLETED
    assert {segment.attempt for segment in await table.segments(lease.key)} == {1}
    assert setting.counters["attempts/LedgerConflict_failed"] == 1


async def test_an_episode_leaves_at_a_boundary_when_the_worker_leaves(
    table: Table, codec: HermesCodec, speech: Speech
) -> None:
    call = speech.call("add", amount=2)

    async def leave_meanwhile(input_ids: list[int]) -> Sampled:
        play.setting.leaving.set()
        return sampled(call)

    play = await Play.prepare(table, codec, [leave_meanwhile, speech.say("never asked for")])
    with pytest.raises(Drained):
        await play.run()
    assert stitched(await play.segments())[-len(call) :] == call
    assert len(play.policy.prompts) == 1


async def test_a_late_write_is_fenced_and_ends_the_episode(table: Table, codec: HermesCodec, speech: Speech) -> None:
    async def lose_the_lease(input_ids: list[int]) -> Sampled:
        await table.bus.leave(table.worker, table.token)
        assert await table.bus.reap(JOB) == 1
        return sampled(speech.say("too late"))

    play = await Play.prepare(table, codec, [lose_the_lease])
    with pytest.raises(Fenced):
        await play.run()
    assert await play.segments() == []


async def test_one_refused_episode_does_not_hold_up_the_batch_it_travels_in(
    table: Table, codec: HermesCodec, speech: Speech
) -> None:
    await table.dispatch(size=3)
    leases = await table.lease(3)
    policy = ScriptedPolicy([speech.say("a"), speech.say("b"), speech.say("c")])
    setting = make_setting(table, codec, policy)
    await table.bus.hand_back(JOB, table.token, [leases[1].key])
    runs = (Episode(setting, make_order(lease)).run() for lease in leases)
    results = await asyncio.gather(*runs, return_exceptions=True)
    assert [type(result) for result in results] == [StopReason, Fenced, StopReason]


async def test_appends_of_many_episodes_travel_in_few_calls(table: Table, codec: HermesCodec, speech: Speech) -> None:
    calls: list[int] = []

    class Counting:
        async def append(self, job: str, token: str, appends: list[Append]) -> None:
            calls.append(len(appends))
            await table.bus.append(job, token, appends)

    await table.dispatch(size=20)
    leases = await table.lease(20)
    setting = make_setting(table, codec, ScriptedPolicy([speech.say(str(number)) for number in range(20)]))
    setting.outbox._bus = Counting()  # type: ignore[assignment]
    async with asyncio.TaskGroup() as episodes:
        for lease in leases:
            episodes.create_task(Episode(setting, make_order(lease)).run())
    assert sum(calls) == 40
    assert len(calls) < 20
    assert len(await table.bus.ready_groups(JOB)) == 1


async def test_a_broken_connection_is_answered_by_sending_the_same_again(
    table: Table, codec: HermesCodec, speech: Speech
) -> None:
    class Blinking:
        def __init__(self) -> None:
            self.num_lost = 0

        async def append(self, job: str, token: str, appends: list[Append]) -> None:
            await table.bus.append(job, token, appends)
            if self.num_lost < 3:
                self.num_lost += 1
                raise Away(AwayReason.UNREACHABLE, "the reply is lost")

    play = await Play.prepare(table, codec, [speech.call("add", amount=2), speech.say("done")])
    play.setting.outbox._bus = Blinking()  # type: ignore[assignment]
    assert await play.run() is StopReason.COMPLETED
    assert [segment.index for segment in await play.segments()] == [0, 1, 2]
    assert play.setting.counters["redis/retries"] == 3


async def test_a_server_that_takes_no_writes_for_a_while_is_waited_for(
    table: Table, codec: HermesCodec, speech: Speech
) -> None:
    play = await Play.prepare(table, codec, [speech.call("add", amount=2), speech.say("done")])
    counters = play.setting.counters
    await table.redis.config_set("maxmemory", 1)
    try:
        playing = asyncio.create_task(play.run())
        await until(lambda: playing.done() or counters["redis/not_now"] > 2)
        assert not playing.done()
    finally:
        await table.redis.config_set("maxmemory", 0)
    assert await playing is StopReason.COMPLETED
    assert {segment.attempt for segment in await play.segments()} == {0}
    assert not any(name.startswith("attempts/") for name in counters.snapshot())


async def test_a_question_that_every_engine_refuses_is_said_to_be_that(
    table: Table, codec: HermesCodec, speech: Speech
) -> None:
    async def refuse(input_ids: list[int]) -> Sampled:
        raise EngineRejected("400: too long")

    play = await Play.prepare(table, codec, [refuse, speech.say("done")])
    assert await play.run() is StopReason.COMPLETED
    assert play.setting.counters["attempts/engine_failed"] == 1


async def test_a_cancellation_that_the_redis_client_swallows_still_ends_the_loop(
    table: Table, codec: HermesCodec
) -> None:
    setting = make_setting(table, codec, ScriptedPolicy([]))

    async def keep_asking() -> None:
        while True:
            await setting.retrier.keep_trying(table.redis.ping)

    for number in range(50):
        asking = asyncio.create_task(keep_asking())
        await asyncio.sleep(0.0001 * number)
        asking.cancel()
        done, _ = await asyncio.wait({asking}, timeout=HANG_S)
        assert done


async def test_a_rolled_back_server_is_noticed(table: Table, codec: HermesCodec, speech: Speech) -> None:
    async def roll_back(input_ids: list[int]) -> Sampled:
        for name in await table.redis.keys("*"):
            rollback[name] = await table.redis.dump(name)
        return sampled(speech.call("add", amount=1))

    async def restore(input_ids: list[int]) -> Sampled:
        for name, value in rollback.items():
            await table.redis.restore(name, 0, value, replace=True)
        return sampled(speech.call("add", amount=1))

    rollback: dict[Any, Any] = {}
    play = await Play.prepare(table, codec, [roll_back, restore])
    with pytest.raises(Gap):
        await play.run()


async def test_members_of_a_group_share_the_seed_of_their_world() -> None:
    assert episode_seed(1, 5) == episode_seed(1, 5)
    assert len({episode_seed(1, group) for group in range(100)}) == 100
    assert episode_seed(1, 5) != episode_seed(2, 5)


class Closing(Counter):
    """Counts how often it is closed."""

    num_closed = 0

    def __init__(self, fail_in: str = "") -> None:
        self.fail_in = fail_in

    def reset(self, target: int) -> str:
        if self.fail_in == "reset":
            raise OSError("cannot start")
        return super().reset(target)

    def close(self) -> None:
        Closing.num_closed += 1
        if self.fail_in == "close":
            raise OSError("cannot clean up")


@pytest.mark.parametrize(
    ("fail_in", "sessions", "expected"),
    [("", 1, StopReason.COMPLETED), ("reset", 3, StopReason.ENV_ERROR), ("close", 1, StopReason.COMPLETED)],
)
async def test_every_session_is_closed_once_whatever_happened(
    table: Table, codec: HermesCodec, speech: Speech, fail_in: str, sessions: int, expected: StopReason
) -> None:
    Closing.num_closed = 0
    play = await Play.prepare(table, codec, [speech.say("done")], world(Closing, fail_in=fail_in))
    assert await play.run() is expected
    assert Closing.num_closed == sessions
    assert play.setting.counters["env/close_failed"] == (fail_in == "close")


async def test_a_cancelled_episode_closes_its_session(table: Table, codec: HermesCodec) -> None:
    asked = asyncio.Event()

    async def hang(input_ids: list[int]) -> Sampled:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    Closing.num_closed = 0
    play = await Play.prepare(table, codec, [hang], world(Closing))
    running = asyncio.create_task(play.run())
    await asked.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert Closing.num_closed == 1


async def test_a_session_that_the_policy_broke_and_nobody_can_score_gets_the_low_end(
    table: Table, codec: HermesCodec, speech: Speech
) -> None:
    """As worlds behind a connection end: the turn is lost, and so is everything after it."""
    environment = world()

    class Broken:
        metrics: ClassVar[dict[str, float]] = {}
        close_failure = None

        async def start(self, task: Any, seed: int) -> Start:
            return Start([{"role": "user", "content": "go"}], [])

        async def act(self, turn: Any) -> Observation:
            return Observation(done=True, stop_reason=stop)

        async def score(self) -> tuple[float, dict[str, float]]:
            raise EnvironmentFailed("score", "connection lost")

        async def close(self) -> None:
            return

    environment.session = lambda **_: Broken()  # type: ignore[method-assign]
    environment.reward_range = (-1.0, 1.0)  # type: ignore[misc]
    for stop, expected in ((StopReason.ENV_CRASH, -1.0), (StopReason.ENV_DONE, None)):
        play = await Play.prepare(table, codec, [speech.say("done")] * 3, environment)
        assert await play.run() is (stop if expected else StopReason.ENV_ERROR)
        assert (await play.outcome()).reward == expected
        await table.bus.commit(JOB, TRAINER, 1, [0])


async def test_a_world_that_ends_earlier_in_a_replay_starts_again(
    table: Table, codec: HermesCodec, speech: Speech
) -> None:
    class Hasty(Counter):
        """Raise the counter."""

        instances = 0

        def reset(self, target: int) -> str:
            Hasty.instances += 1
            self.done = Hasty.instances == 2
            return super().reset(target)

    async def leave(input_ids: list[int]) -> Sampled:
        raise Drained

    call, say = speech.call("add", amount=2), speech.say("done")
    first = await Play.prepare(table, codec, [call, call, leave], world(Hasty))
    with pytest.raises(Drained):
        await first.run()
    await table.bus.hand_back(JOB, table.token, [first.order.key])
    (lease,) = await table.lease()
    setting = make_setting(table, codec, ScriptedPolicy([call, say]))
    assert await Episode(setting, make_order(lease, world(Hasty))).run() is StopReason.COMPLETED
    assert {segment.attempt for segment in await table.segments(lease.key)} == {1}
    assert setting.counters["attempts/LedgerConflict_failed"] == 1


async def test_a_history_that_cannot_be_continued_goes_on_in_a_new_branch(
    table: Table, codec: HermesCodec, speech: Speech
) -> None:
    class Stripping(HermesCodec):
        """Rewrites the history before every turn, as templates that strip reasoning do."""

        def bridge(self, *_: Any, **__: Any) -> ForkReason:
            return ForkReason.HISTORY_REWRITTEN

    call, say = speech.call("add", amount=2), speech.say("done")
    play = await Play.prepare(table, Stripping(codec.tokenizer), [call, say])
    assert await play.run() is StopReason.COMPLETED
    trajectory = Trajectory(tuple(await play.segments()))
    first, second = trajectory.branches
    assert first.token_ids.tolist() == play.policy.prompts[0] + call
    assert second.token_ids.tolist() == play.policy.prompts[1] + say
    assert codec.tokenizer.decode(play.policy.prompts[1]).count('{"name": "add", "arguments": {"amount": 2}}') == 1
    assert play.setting.counters["drift/forks"] == play.setting.counters["drift/forks_history_rewritten"] == 1
    assert (await play.outcome()).metrics["forks"] == 1
