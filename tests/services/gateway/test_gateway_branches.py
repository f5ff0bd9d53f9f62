"""What the branches of an agent's episode count for: tokens, weights and gradients, against numbers made by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gspo_core.batch import TrainSequence, collate
from gspo_core.chat import HermesCodec
from gspo_core.log.sequences import group_metrics, train_batch
from gspo_core.objective import loss_denominators, policy_loss
from gspo_core.objective_config import AdvantageConfig, ObjectiveConfig
from gspo_core.types import EpisodeKey, Group, Outcome, Segment, Split, StopReason, Trajectory
from tests.services.gateway.gateway_kit import BabblingPolicy, Bench, judge, said, user
from tests.services.rollout.rollout_kit import JOB, Speech
from tests.services.trainer.trainer_kit import segment

HI = user("hi")
# The speeches of the agent's turns; each has one token a letter, and one that ends it.
SPEECHES = ("aaa", "bbbbb", "cc", "dddd", "eeeeee")
# Of the main thread (turns 0 and 3), of the two sub-agents, and of what follows the compaction.
TOKENS = {0: 4 + 5, 1: 6, 2: 3, 3: 7}
NUM_TOKENS = 25


async def busy_episode(codec: HermesCodec, turn_rewards: dict[int, float]) -> Trajectory:
    """A thread that asks two sub-agents, goes on, and is then compacted."""
    speech = Speech(codec)
    policy = BabblingPolicy(codec, random.Random(0), [speech.say(text) for text in SPEECHES], most=1000)
    one = Bench(codec, policy=policy)
    first = await one.ask(HI)
    await one.ask(user("sub-agent: look for x"))
    await one.ask(user("sub-agent: look for y"))
    await one.ask(HI, said(first), user("go on"))
    await one.ask(user("what was said before: much"), user("go on"))
    assert one.counters["drift/forks_sub_agent"] == 2
    assert one.counters["drift/forks_compacted"] == 1
    judge(one.records.segments(), policy.served)
    one.tree.turn_rewards = tuple(sorted(turn_rewards.items()))  # type: ignore[assignment]
    end = one.tree.close(Outcome(StopReason.COMPLETED, 1.0))
    return Trajectory((*one.records.segments(), end))


def plain_episode(member: int = 1) -> Trajectory:
    """Of another member: one turn of five tokens, worth nothing."""
    key = EpisodeKey(JOB, 0, member)
    return Trajectory((segment(key, 0, 0, 5, outcome=Outcome(StopReason.COMPLETED, 0.0)),))


async def sequences_of(
    codec: HermesCodec, config: AdvantageConfig, turn_rewards: dict[int, float] | None = None
) -> list[TrainSequence]:
    busy = await busy_episode(codec, turn_rewards or {})
    group = Group(JOB, 0, Split.TRAIN, 0, 2, (busy, plain_episode()))
    return train_batch([group], np.zeros_like, config).sequences


def gradients(sequences: list[TrainSequence], objective: ObjectiveConfig) -> list[NDArray[np.float64]]:
    """What the loss says of each trained token of each sequence, where the policy is still the one that sampled."""
    denominators = loss_denominators([s.action_mask for s in sequences], [s.weight for s in sequences])
    batch = collate(sequences, list(range(len(sequences))), layout="padded")
    logprobs = batch.behavior_logprobs_BT.double().requires_grad_()
    loss, _ = policy_loss(
        objective,
        logprobs,
        batch.action_mask_BT,
        batch.advantages,
        behavior_logprobs_BT=batch.behavior_logprobs_BT,
        turn_ids_BT=batch.turn_ids_BT,
        sequence_weights_B=batch.weights_B,
        num_sequences=denominators[0],
        num_tokens=denominators[1],
    )
    loss.backward()
    grad = logprobs.grad
    assert isinstance(grad, torch.Tensor)
    return [grad[row][batch.action_mask_BT[row]].double().numpy() for row in range(len(sequences))]


async def test_each_branch_weighs_as_its_share_of_the_tokens(codec: HermesCodec) -> None:
    sequences = await sequences_of(codec, AdvantageConfig(scale="none"))
    assert [one.num_actions for one in sequences] == [*TOKENS.values(), 5]
    assert [one.weight for one in sequences] == [9 / 25, 6 / 25, 3 / 25, 7 / 25, 1.0]
    assert [one.advantages for one in sequences] == [0.5, 0.5, 0.5, 0.5, -0.5]


@pytest.mark.parametrize(
    ("aggregate", "of_busy", "of_plain"),
    [
        # Half of the mean over the tokens of the episode: 0.5 * 0.5 / 25, and 0.5 * -0.5 / 5 for the other one.
        ("sequence", 0.01, -0.05),
        # Of thirty tokens each counts alike: 0.5 / 30.
        ("token", 0.5 / 30, -0.5 / 30),
        # A half for each token, as there are two episodes.
        ("sum", 0.25, -0.25),
    ],
)
async def test_gradients_of_an_episode_with_sub_agents_and_a_compaction(
    codec: HermesCodec, aggregate: str, of_busy: float, of_plain: float
) -> None:
    objective = ObjectiveConfig.model_validate({"aggregate": aggregate, "minibatches": 1})
    *busy, plain = gradients(await sequences_of(codec, AdvantageConfig(scale="none")), objective)
    for found, num_tokens in zip(busy, TOKENS.values(), strict=True):
        assert -found == pytest.approx([of_busy] * num_tokens, rel=1e-6)
    assert -plain == pytest.approx([of_plain] * 5, rel=1e-6)
    mass = sum(float(-found.sum()) for found in busy)
    assert mass == pytest.approx(of_busy * NUM_TOKENS, rel=1e-6)


async def test_rewards_of_turns_reach_their_turns_in_every_branch(codec: HermesCodec) -> None:
    """The first sub-agent was paid 1 and the compacted turn 2; the other member's only turn nothing.

    Both members reached turn 0 only: there the returns are 3 and 0, so the turn gets 0.5 + 0.5 * 1.5 = 1.25. Nobody
    else reached the later ones, so there the episode's 0.5 stands alone.
    """
    config = AdvantageConfig(scale="none", turn_reward_weight=0.5)
    sequences = await sequences_of(codec, config, {1: 1.0, 4: 2.0})
    main, *rest = gradients(sequences, ObjectiveConfig(minibatches=1, advantage=config))
    assert -main == pytest.approx([1.25 / 50] * 4 + [0.5 / 50] * 5, rel=1e-6)
    for found, num_tokens in zip(rest, (6, 3, 7), strict=False):
        assert -found == pytest.approx([0.01] * num_tokens, rel=1e-6)
    assert -rest[-1] == pytest.approx([-1.25 / 10] * 5, rel=1e-6)


async def test_two_such_episodes_are_compared_turn_by_turn(codec: HermesCodec) -> None:
    """One was paid 1 for its first sub-agent, the other for its second: the returns differ at turn 2 only, 0 and 1."""
    members = [await busy_episode(codec, paid) for paid in ({1: 1.0}, {2: 1.0})]
    other = Trajectory(tuple(_as_member(one, 1) for one in members[1].segments))
    config = AdvantageConfig(scale="none", turn_reward_weight=1.0, zero_variance="drop")
    group = Group(JOB, 0, Split.TRAIN, 0, 2, (members[0], other))
    sequences = train_batch([group], np.zeros_like, config).sequences
    objective = ObjectiveConfig(minibatches=1, advantage=config)
    found = [float(-one.sum()) for one in gradients(sequences, objective)]
    # The second sub-agent has 3 of 25 tokens and an advantage of -0.5 or 0.5; there are two episodes.
    assert found == pytest.approx([0, 0, -0.5 * 3 / 50, 0, 0, 0, 0.5 * 3 / 50, 0], abs=1e-9)


def _as_member(one: Segment, member: int) -> Segment:
    return replace(one, key=EpisodeKey(JOB, 0, member))


async def test_a_step_tells_why_branches_began_and_what_was_read_anew(codec: HermesCodec) -> None:
    """What the compacted turn reads is new but for its first tokens; sub-agents read nothing twice."""
    busy = await busy_episode(codec, {})
    metrics = group_metrics([Group(JOB, 0, Split.TRAIN, 0, 2, (busy, plain_episode()))])
    told = {name: value for name, value in metrics.items() if name.startswith("branches/")}
    (compacted,) = (one for one in busy.segments if one.asked is not None and one.asked.reason == "compacted")
    main = [one.token_ids for one in busy.segments if one.branch == 0]
    helpers = [[one.token_ids for one in busy.segments if one.branch == branch] for branch in (1, 2)]
    prompt = compacted.token_ids[: int(compacted.action_mask.argmax())].tolist()
    shared = max(_num_alike(prompt, np.concatenate(ids).tolist()) for ids in (main, *helpers))
    assert told == {
        "branches/sub_agent": 2,
        "branches/compacted": 1,
        "branches/tokens_read_anew": len(prompt) - shared,
    }
    assert 0 < shared < len(prompt)
    assert not any(
        name.startswith("branches/") for name in group_metrics([Group(JOB, 0, Split.TRAIN, 0, 2, (plain_episode(),))])
    )


def test_a_step_tells_how_many_rewards_were_refused() -> None:
    def told(*refused: float) -> float | None:
        ends = [Outcome(StopReason.COMPLETED, 0.0, metrics={"rewards_refused": one}) for one in refused]
        keys = [EpisodeKey(JOB, 0, member) for member in range(len(ends))]
        episodes = [Trajectory((segment(key, 0, 0, 5, outcome=end),)) for key, end in zip(keys, ends, strict=True)]
        group = Group(JOB, 0, Split.TRAIN, 0, 3, (*episodes, plain_episode(2)))
        return group_metrics([group]).get("rewards/refused")

    assert (told(2.0, 1.0), told(0.0, 0.0)) == (3.0, None)


def _num_alike(one: list[int], other: list[int]) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
