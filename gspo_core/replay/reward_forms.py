"""Rewards as people have them, as functions of a recorded episode: a class with ``get_reward``, a judge of an agent,
the answer of a model that judged, or a function that was written for recorded episodes.

Rule: a world stands as it stood when it was judged, and nothing else of it is run: no ``reset``, no tool. No model is
asked again; its answer is read again. What was paid beside the judgement (turns, the cost of the length) is added as it
was added then, so the same code over the same state gives the recorded reward to the last bit.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from gspo_core.env import AgentEnvironment, AgentStart, Context, InvalidEnvironment, PlainEnvironment, load_environment
from gspo_core.env.session import as_reward
from gspo_core.episode_limits import PROVOKED, TRUNCATED
from gspo_core.evidence import ENVIRONMENT, JUDGE, MESSAGES, RESULT, STATE, TASK
from gspo_core.json_value import JSON
from gspo_core.judge_spec import JudgeSpec
from gspo_core.replay.past import PastError
from gspo_core.replay.rescoring import Judged, RecordedEpisode, Reward
from gspo_core.spec import EnvironmentSpec, JobSpec
from gspo_core.types import StopReason

Score = Callable[[RecordedEpisode], object]
"""What a world or a judge says of an episode, before turns and length."""
_OF_A_JUDGE = frozenset({"task", "result", "ctx", "folder"})


def reward_of(found: object, spec: JobSpec) -> Reward:
    """``found`` is a class with ``get_reward``, a judge with the parameters of ``agent.reward``, or takes an episode.

    Raises PastError.
    """
    if inspect.isclass(found):
        if not callable(getattr(found, "get_reward", None)):
            raise PastError(f"{found.__name__} has no get_reward")
        return _with_the_rest(_by_world(lambda: _made(found, _config(spec))), spec)
    if not callable(found):
        raise PastError(f"{found!r} is no reward: name a class with get_reward, or a function")
    names = inspect.signature(found).parameters
    if names and set(names) <= _OF_A_JUDGE:
        return _with_the_rest(_by_judge(found), spec)
    reward: Reward = found
    return reward


def own_reward(spec: JobSpec) -> Reward:
    """The job's own, over what is kept of each episode. Raises PastError where its code is not at hand."""
    scores = [_own_score(one) for one in spec.environments]
    return _with_the_rest(scores[0] if len(scores) == 1 else _by_environment(scores), spec)


def _own_score(environment: EnvironmentSpec) -> Score:
    agent = environment.agent
    if agent is not None and agent.judge is not None:
        return _by_answer(agent.judge)
    if "@" in environment.ref or ":" not in environment.ref:
        raise PastError(f"{environment.ref} is a registered environment: name its file and class with --reward")
    start = None if agent is None else AgentStart.from_json(agent.model_dump(mode="json"))
    try:
        found = load_environment(environment.ref, environment.config, agent=start)
    except InvalidEnvironment as error:
        raise PastError(f"the reward of {environment.ref} cannot be loaded here: {error}") from error
    if isinstance(found, PlainEnvironment):
        return _by_world(found.make)
    if isinstance(found, AgentEnvironment):
        return _by_judge(found.judge()) if found.has_judge else _by_result(is_service=found.start.url is not None)
    raise PastError(f"{environment.ref} is no class with get_reward: name another reward with --reward")


def _by_environment(scores: Sequence[Score]) -> Score:
    """For a job with several: each episode says which one it was played in."""

    def score(episode: RecordedEpisode) -> object:
        return scores[episode.environment](episode)

    return score


def _by_world(make: Callable[[], Any]) -> Score:
    def score(episode: RecordedEpisode) -> object:
        instance = make()
        for name, value in episode.state.items():
            setattr(instance, name, value)
        return _called(instance.get_reward, {"ctx": lambda: _context(episode)})

    return score


def _by_judge(judge: Callable[..., object]) -> Score:
    def score(episode: RecordedEpisode) -> object:
        offered = {"task": lambda: episode.task, "result": lambda: episode.result, "ctx": lambda: _context(episode)}
        if "folder" in inspect.signature(judge).parameters:
            raise LookupError("the reward reads the agent's files, which are not kept")
        return _called(judge, offered)

    return score


def _by_answer(judge: JudgeSpec) -> Score:
    return lambda episode: {JUDGE: judge.score(episode.judge)}


def _by_result(*, is_service: bool) -> Score:
    def score(episode: RecordedEpisode) -> object:
        result = episode.result
        if is_service:
            return result.get("reward") if isinstance(result, Mapping) else None
        return result

    return score


def _with_the_rest(score: Score, spec: JobSpec) -> Reward:
    """As an episode was rewarded (``services.workers.setting``, ``services.gateway.agent.attempt``)."""

    def reward(episode: RecordedEpisode) -> Judged:
        if not _was_asked(episode, spec):
            return Judged(episode.reward, episode.reward_parts)
        paid = episode.turn_rewards
        said = score(episode)
        value, parts = (0.0, {}) if said is None and spec.is_of_agents and paid else as_reward(said)
        total = math.fsum([value, *paid.values()]) if spec.is_of_agents else value + sum(paid.values())
        parts |= {f"turn/{turn}": one for turn, one in paid.items()} if spec.is_of_agents else {}
        cost = -episode.reward_parts.get("overlong", 0.0)
        return Judged(total - cost, {**parts, "overlong": -cost}) if cost else Judged(total, parts)

    return reward


def _was_asked(episode: RecordedEpisode, spec: JobSpec) -> bool:
    """Whether the reward came from a judgement: not where the end decided it, or the agent posted it.

    Raises LookupError where nothing of it was kept.
    """
    evidence = episode.evidence
    names = {*evidence.told, *evidence.left_out} - {ENVIRONMENT}
    if spec.is_of_agents:
        if not names:
            raise LookupError("what its reward was made from was not kept")
        return bool({RESULT, JUDGE, MESSAGES} & names)
    if names & {TASK, MESSAGES} or any(name.startswith(STATE) for name in names):
        return True
    if StopReason(episode.stop_reason) in TRUNCATED | PROVOKED:
        return False
    raise LookupError("what its reward was made from was not kept")


def _made(cls: type, config: Mapping[str, JSON]) -> object:
    try:
        inspect.signature(cls).bind(**config)
    except TypeError:
        return cls()
    return cls(**config)


def _config(spec: JobSpec) -> Mapping[str, JSON]:
    return spec.environments[0].config if len(spec.environments) == 1 else {}


def _context(episode: RecordedEpisode) -> Context:
    context = Context(f"{episode.group}/{episode.member}", 0, {})
    evidence = episode.evidence
    if TASK in evidence.told:
        context.task = episode.task
    if MESSAGES in evidence.told:
        context.messages = list(episode.messages)
    return context


def _called(function: Callable[..., object], offered: Mapping[str, Callable[[], object]]) -> object:
    names = inspect.signature(function).parameters
    value = function(**{name: give() for name, give in offered.items() if name in names})
    return asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value


async def _awaited(value: Awaitable[object]) -> object:
    return await value
