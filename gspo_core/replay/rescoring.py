"""Another reward over the episodes that a job was trained on, and the advantages that it would have turned round.

The rule: it judges what the log holds (what was said, what the reward was made from, the reward and its parts, the
metrics) and nothing else: no environment is started, no judge is asked again, and no weights are needed. Nothing is
written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gspo_core.advantage import episode_advantages
from gspo_core.evidence import ENVIRONMENT, JUDGE, MESSAGES, RESULT, TASK
from gspo_core.log.advantages import advantage_config
from gspo_core.log.batches import LoggedBatch
from gspo_core.log.changes import with_reward
from gspo_core.log.tokens import said_in, tokens_of
from gspo_core.objective_config import AdvantageConfig
from gspo_core.replay.past import Past, PastError
from gspo_core.types import NOTHING, EpisodeKey, Evidence, Group, Trajectory

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class RecordedEpisode:
    """An episode as a reward function is given it."""

    step: int
    group: int
    member: int
    task_index: int
    stop_reason: str
    reward: float
    """As it was recorded."""
    reward_parts: Mapping[str, float]
    metrics: Mapping[str, float]
    said: tuple[str, ...]
    """What the policy sampled, turn by turn, in its last branch; empty where the model's tokenizer is not there."""
    text: str
    """The whole last branch, prompts and answers of the environment included."""
    said_ids: tuple[tuple[int, ...], ...]
    """The ids of ``said``."""
    turn_rewards: Mapping[int, float] = field(default_factory=dict)
    """What turns were paid."""
    evidence: Evidence = NOTHING
    """What the recorded reward was made from."""

    @property
    def state(self) -> dict[str, Any]:
        """The attributes of the world before it was judged, as far as they were kept."""
        return self.evidence.state

    @property
    def task(self) -> Any:
        """Raises LookupError where it was not kept, and so do the following."""
        return self._kept(TASK)

    @property
    def result(self) -> Any:
        """What the agent returned."""
        return self._kept(RESULT)

    @property
    def judge(self) -> Any:
        """What the model that judged answered."""
        return self._kept(JUDGE)

    @property
    def messages(self) -> Any:
        """The conversation, where the recorded reward could read it."""
        return self._kept(MESSAGES)

    @property
    def environment(self) -> int:
        """Which one of the job's several, counted from 0."""
        return int(self._kept(ENVIRONMENT))

    def _kept(self, name: str) -> Any:
        if name not in self.evidence.told:
            raise LookupError(f"its {name} was not kept{_because(self.evidence, name)}")
        return self.evidence.value(name)


@dataclass(frozen=True, slots=True)
class Judged:
    """A reward whose parts are told and need not add up to it."""

    reward: float
    parts: Mapping[str, float]


Reward = Callable[[RecordedEpisode], "float | Mapping[str, float] | Judged"]
"""A reward, or its parts, whose sum it is."""


class RewardFailed(PastError):
    """The reward function raised, or gave something that is no reward; the message names the episode."""


@dataclass(frozen=True, slots=True)
class Rescored:
    step: int
    episode: EpisodeKey
    old: float
    new: float
    old_advantage: float
    new_advantage: float

    @property
    def flips(self) -> bool:
        """What was made more likely would have been made less likely, or the other way round."""
        return self.old_advantage * self.new_advantage < 0


def rescore(past: Past, reward: Reward, steps: Sequence[int], decode: Decode | None = None) -> Iterator[Rescored]:
    """Every rewarded episode of these steps that was not erased. Raises PastError, RewardFailed."""
    for step in steps:
        batch = past.batch(step)
        config = advantage_config(batch, past.spec)
        yield from _of_batch(batch, reward, config, decode)


def _of_batch(batch: LoggedBatch, reward: Reward, config: AdvantageConfig, decode: Decode | None) -> Iterator[Rescored]:
    groups = [_rescored(batch, group, reward, decode) for group in batch.groups]
    old, new = (episode_advantages(some, config) for some in (batch.groups, groups))
    for before, after in zip(batch.groups, groups, strict=True):
        for one, other in zip(before, after, strict=True):
            if one.reward is not None and other.reward is not None and not _is_erased(batch, one):
                advantages = (old[one.key] or 0.0, new[one.key] or 0.0)
                yield Rescored(batch.step, one.key, one.reward, other.reward, *advantages)


def _is_erased(batch: LoggedBatch, one: Trajectory) -> bool:
    """What was said in it is gone; its reward stays as it was recorded."""
    return (one.key.group, one.key.member) in batch.erased


def _rescored(batch: LoggedBatch, group: Group, reward: Reward, decode: Decode | None) -> Group:
    episodes = tuple(
        one if one.reward is None or _is_erased(batch, one) else _judged(batch.step, group, one, reward, decode)
        for one in group
    )
    return Group(group.job, group.group, group.split, group.task_index, group.size, episodes)


def _judged(step: int, group: Group, episode: Trajectory, reward: Reward, decode: Decode | None) -> Trajectory:
    try:
        given = reward(recorded(step, group, episode, decode))
        named = given.parts if isinstance(given, Judged) else given if isinstance(given, Mapping) else {}
        parts = {str(name): float(value) for name, value in named.items()}
        value = math.fsum(parts.values()) if isinstance(given, Mapping) else _number(given)
    except Exception as error:
        missing = "".join(f"; {name} {why}" for name, why in episode.outcome.evidence.left_out.items())
        raise RewardFailed(f"the reward of episode {episode.key}: {type(error).__name__}: {error}{missing}") from error
    if not math.isfinite(value):
        raise RewardFailed(f"the reward of episode {episode.key} is {value}")
    return with_reward(episode, value, parts)


def _number(given: float | Judged) -> float:
    return given.reward if isinstance(given, Judged) else float(given)


def _because(evidence: Evidence, name: str) -> str:
    return f": it {evidence.left_out[name]}" if name in evidence.left_out else ""


def recorded(step: int, group: Group, episode: Trajectory, decode: Decode | None) -> RecordedEpisode:
    """``episode`` has a reward."""
    outcome, branches = episode.outcome, tokens_of(episode, {})
    said = said_in(branches[-1]) if branches else ()
    text = decode(branches[-1].token.tolist()) if branches and decode else ""
    assert outcome.reward is not None
    return RecordedEpisode(
        step=step,
        group=group.group,
        member=episode.key.member,
        task_index=group.task_index,
        stop_reason=str(outcome.stop_reason),
        reward=outcome.reward,
        reward_parts=outcome.reward_parts,
        metrics=outcome.metrics,
        said=tuple(decode(ids) for ids in said) if decode else (),
        text=text,
        said_ids=said,
        turn_rewards={one.turn: one.reward for one in episode.segments[-1].turn_rewards},
        evidence=outcome.evidence,
    )
