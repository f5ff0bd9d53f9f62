"""What an episode's reward was made from is recorded with its outcome, and gives the reward again."""

from __future__ import annotations

from typing import Any

import pytest
from redis.asyncio import Redis

from gspo_core.chat import HermesCodec
from gspo_core.codec import EVIDENCE_SCHEMA, NEWEST_SCHEMA
from gspo_core.replay.rescoring import Judged, recorded
from gspo_core.replay.reward_forms import reward_of
from gspo_core.spec import JobSpec
from gspo_core.types import NOTHING, EpisodeKey, Group, Outcome, Split, StopReason, Trajectory
from services.workers.episode import Episode
from tests.services.rollout.rollout_kit import (
    JOB,
    Counter,
    ScriptedPolicy,
    Speech,
    Table,
    load_codec,
    make_order,
    make_setting,
    world,
)

SPEC = JobSpec.model_validate({"model": "m", "environments": [{"ref": "a:B"}]})


class Thrifty(Counter):
    """Pays for every step, and for how near the end came."""

    def add(self, amount: int, ctx: Any) -> str:
        """Add to the counter.

        Args:
            amount: how much
        """
        ctx.reward(amount / 7)
        self.__dict__.setdefault("steps", []).append((amount, self.value))
        return super().add(amount)

    def get_reward(self) -> dict[str, float]:
        self.value += 1  # what is kept is the world before
        return {"near": 1 / (1 + abs(self.target - self.value)), "steps": len(self.steps) / 3}


@pytest.fixture
async def table(redis_client: Redis) -> Table:
    return await Table.lay(redis_client)


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> HermesCodec:
    return load_codec(tmp_path_factory.mktemp("model"))


async def play(
    table: Table, codec: HermesCodec, split: Split = Split.TRAIN, reads: int = NEWEST_SCHEMA, **spec: Any
) -> tuple[StopReason, Outcome]:
    speech = Speech(codec)
    answers = [*(speech.call("add", amount=amount) for amount in (2, -1, 3)), speech.say("done")]
    await table.dispatch(split=split, task=0, reads=reads)
    (lease,) = await table.lease()
    order = make_order(lease, world(Thrifty), **spec)
    stop = await Episode(make_setting(table, codec, ScriptedPolicy(answers)), order).run()
    return stop, Trajectory(tuple(await table.segments(order.key))).outcome


@pytest.mark.parametrize(
    "limits", [{}, {"max_turns": 2}, {"max_episode_tokens": 400, "overlong_tokens": 400}, {"on_truncation": "zero"}]
)
async def test_the_same_code_gives_the_recorded_reward_again(
    table: Table, codec: HermesCodec, limits: dict[str, Any]
) -> None:
    _, outcome = await play(table, codec, limits=limits)
    episode = Trajectory(tuple(await table.segments(EpisodeKey(JOB, 0, 0))))
    group = Group(episode.key.job, episode.key.group, Split.TRAIN, 0, 1, (episode,))
    assert outcome.evidence.state["steps"][0] == (2, 0)
    assert ("overlong" in outcome.reward_parts) == ("overlong_tokens" in limits)
    again = reward_of(Thrifty, SPEC)(recorded(1, group, episode, None))
    assert again == Judged(outcome.reward or 0.0, outcome.reward_parts)


async def test_a_reward_that_nobody_was_asked_for_has_none(table: Table, codec: HermesCodec) -> None:
    stop, outcome = await play(table, codec, limits={"max_turns": 1, "on_truncation": "zero"})
    assert (stop, outcome.reward, outcome.evidence) == (StopReason.MAX_TURNS, 0.0, NOTHING)


async def test_a_job_turns_it_off(table: Table, codec: HermesCodec) -> None:
    _, outcome = await play(table, codec, rewards={"evidence_bytes": 0})
    assert (outcome.reward is None, outcome.evidence) == (False, NOTHING)


async def test_what_does_not_fit_is_named(table: Table, codec: HermesCodec) -> None:
    _, outcome = await play(table, codec, rewards={"evidence_bytes": 40})
    assert outcome.evidence.num_bytes <= 40
    assert outcome.evidence.left_out["state.steps"].startswith("has more than the")


async def test_episodes_that_are_not_trained_keep_none(table: Table, codec: HermesCodec) -> None:
    _, outcome = await play(table, codec, split=Split.EVAL)
    assert outcome.evidence == NOTHING


async def test_a_trainer_of_an_earlier_release_is_sent_none(table: Table, codec: HermesCodec) -> None:
    """It would refuse the segment, and workers may be replaced before it is."""
    _, outcome = await play(table, codec, reads=EVIDENCE_SCHEMA - 1)
    assert (outcome.reward is None, outcome.evidence) == (False, NOTHING)


@pytest.mark.parametrize(("num_environments", "names"), [(1, {"task"}), (2, {"environment", "task"})])
async def test_it_says_which_environment_where_a_job_has_several(
    table: Table, codec: HermesCodec, num_environments: int, names: set[str]
) -> None:
    environments = [{"ref": f"tests:World{number}"} for number in range(num_environments)]
    _, outcome = await play(table, codec, environments=environments)
    assert {name for name in outcome.evidence.told if not name.startswith("state.")} == names
    assert num_environments == 1 or outcome.evidence.value("environment") == 0
