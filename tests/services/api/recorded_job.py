"""A job as it lies in Redis and on disk after some steps, made by the real store, queue, codec and batch log.

What the policy says is written down here, so that a test knows it: right answers, guesses, calls that cannot be read,
episodes of two versions. Everything else (prompts, tools, rewards) is done by the real environment and codec.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from examples.demo.demonstrations import NO_MISTAKES, demonstrate
from gspo_core.chat import ChatCodec, load_codec
from gspo_core.codec import encode
from gspo_core.env import Environment, load_environment
from gspo_core.spec import JobSpec
from gspo_core.starter.tokenizer import write_tokenizer
from gspo_core.types import EpisodeKey, Group, Outcome, Segment, Split, StopReason, TimeSplit, Trajectory
from gspo_core.versions import WeightFile, WeightsManifest
from services.files.batch_log import BatchLog
from services.files.job_dir import JobDir
from services.files.trained_log import TrainedLog
from services.state.jobs import JobStatus, StatusReason
from services.state.queue import Append, Bus
from services.state.store import Claim, Store

REF = "environments.calculator:Calculator"
GROUPS_PER_STEP, GROUP_SIZE = 2, 4
TOOL = "<tool_call>\n{}\n</tool_call>"


@dataclass(frozen=True)
class RecordedJob:
    id: str
    claim: Claim
    num_steps: int
    open_group: int
    """In the queue: a finished episode, one in the middle, and two that nobody has begun."""


def write_model(directory: Path) -> Path:
    """A model directory without a model: what an API can read of one."""
    directory.mkdir(parents=True)
    generator = random.Random(0)
    conversations = []
    for _ in range(300):
        question = f"{generator.randint(10, 99)} + {generator.randint(10, 99)}"
        asked = {"role": "user", "content": f"What is {question}?"}
        conversations.append([asked, *demonstrate(question, NO_MISTAKES, generator)])
    write_tokenizer(directory, conversations, load_environment(REF).describe()["tools"])
    return directory


class Player:
    """Plays episodes with given replies and writes them down as a rollout worker does."""

    def __init__(self, codec: ChatCodec, environment: Environment) -> None:
        self.codec = codec
        self.environment = environment
        self._chance = np.random.default_rng(0)

    async def expression(self, task_index: int) -> str:
        return str((await self.environment.task(Split.TRAIN, task_index))["expression"])

    async def play(
        self, key: EpisodeKey, task_index: int, replies: Sequence[str], versions: Sequence[int]
    ) -> list[Segment]:
        """One segment for each reply, sampled by the version at the same place, and one for the outcome."""
        session = self.environment.session()
        start = await session.start(await self.environment.task(Split.TRAIN, task_index), seed=0)
        prompt = self.codec.render(start.messages, start.tools)
        segments: list[Segment] = []
        before: list[int] = []
        stop = StopReason.MAX_TURNS
        for turn, (reply, version) in enumerate(zip(replies, versions, strict=True)):
            sampled = [*self.codec.tokenizer.encode_whole(reply), self.codec.stop_ids[0]]  # type: ignore[attr-defined]
            segments.append(self._segment(key, turn, version, prompt, sampled))
            before += [*prompt, *sampled]
            observation = await session.act(self.codec.parse(sampled))
            if observation.done:
                stop = observation.stop_reason or stop
                break
            bridge = self.codec.bridge(before[: -len(sampled)], sampled, observation.messages)
            assert isinstance(bridge, list)
            prompt = bridge
        reward, parts = await session.score()
        await session.close()
        outcome = Outcome(stop, reward, parts, self._metrics(segments))
        return [*segments, self._segment(key, len(segments) - 1, versions[-1], [], [], len(segments), outcome)]

    @staticmethod
    def _metrics(segments: Sequence[Segment]) -> dict[str, float]:
        spent = [one.spent for one in segments if one.spent is not None]
        engine_s, env_s, queue_s = (sum(seconds) for seconds in zip(*spent, strict=True))
        return {"turns": float(len(segments)), "model_s": engine_s, "env_s": env_s + 0.125, "queue_s": queue_s}

    def _segment(
        self,
        key: EpisodeKey,
        turn: int,
        version: int,
        given: Sequence[int],
        sampled: Sequence[int],
        index: int | None = None,
        outcome: Outcome | None = None,
    ) -> Segment:
        logprobs = -self._chance.exponential(0.4, len(sampled))
        return Segment(
            key=key,
            attempt=0,
            branch=0,
            index=turn if index is None else index,
            turn=turn,
            version=version,
            temperature=1.0,
            engine_id="http://127.0.0.1:30000",
            token_ids=[*given, *sampled],
            action_mask=[False] * len(given) + [True] * len(sampled),
            behavior_logprobs=[*([0.0] * len(given)), *logprobs],
            outcome=outcome,
            # The tool answers more slowly than the policy speaks, and the first request finds no engine.
            spent=TimeSplit(
                0.0 if outcome else 0.25 * turn + 0.5,
                0.125 if outcome else 0.75 * turn,
                0.0 if turn or outcome else 0.375,
            ),
        )


def replies_of(expression: str, member: int, skill: float, generator: random.Random) -> list[str]:
    """Like a policy of that skill: the third member writes a call that cannot be read first."""
    call = TOOL.format(json.dumps({"name": "calculate", "arguments": {"expression": expression}}))
    right = str(eval(expression))
    answer = right if generator.random() < skill else str(int(right) + generator.choice([-10, 1, 7]))
    if member == 2:
        return [TOOL.format('{"name": "calculate", "arguments": {"expression": "' + expression), call, answer]
    if member == 1 and generator.random() > skill:
        return [f"It is {generator.randint(10, 99)}."]
    return [call, answer]


async def record_job(
    store: Store,
    bus: Bus,
    jobs_dir: Path,
    model_dir: Path,
    *,
    num_steps: int = 6,
    name: str = "calculator",
    is_agents: bool = False,
) -> RecordedJob:
    """A running job after ``num_steps`` steps, claimed by a trainer of its own."""
    spec = JobSpec.model_validate(
        {
            "name": name,
            "model": str(model_dir),
            "environments": [{"ref": REF} | ({"agent": {"pull": True}} if is_agents else {})],
            "rollout": {"group_size": GROUP_SIZE, "max_staleness": 2},
            "groups_per_step": GROUPS_PER_STEP,
            "steps": 40,
        }
    )
    job = await store.jobs.create(spec)
    claim = await store.jobs.claim("trainer-0")
    assert claim is not None
    assert claim.job_id == job.id
    player = Player(load_codec(model_dir), load_environment(REF))
    description = player.environment.describe()
    await store.environments.describe(job.id, 0, {**description, "tools": []} if is_agents else description)
    await store.jobs.set_status(job.id, JobStatus.RUNNING, token=claim.token)
    await _publish(store, claim, 0)
    generator = random.Random(5)
    for step in range(1, num_steps + 1):
        groups = [await _group(player, claim, step, place, generator) for place in range(GROUPS_PER_STEP)]
        BatchLog(JobDir(jobs_dir / job.id)).write(claim.epoch, step, groups, {})
        TrainedLog(JobDir(jobs_dir / job.id)).write(claim.epoch, step, _as_trained(groups))
        await _publish(store, claim, step)
        await _report(store, claim, step, groups)
    await store.events.add(
        job.id, "evaluation", {"step": num_steps, "version": num_steps, "reward/mean": 0.75, "episodes/count": 8.0}
    )
    message = "the clip cuts 41 % of the tokens: the steps are too large for the clip range"
    await store.events.add(
        job.id,
        "alert",
        {"step": num_steps, "kind": "clip_too_active", "message": message, "advice": "lower optimizer.lr"},
    )
    await store.jobs.set_status(
        job.id, JobStatus.RUNNING, token=claim.token, reason=StatusReason("waiting_for_trajectories", "episodes run")
    )
    open_group = num_steps * GROUPS_PER_STEP
    await _leave_open(bus, player, claim, open_group, num_steps)
    return RecordedJob(job.id, claim, num_steps, open_group)


async def _group(player: Player, claim: Claim, step: int, place: int, generator: random.Random) -> Group:
    number = (step - 1) * GROUPS_PER_STEP + place
    expression = await player.expression(number)
    trajectories = []
    for member in range(GROUP_SIZE):
        replies = replies_of(expression, member, 0.3 + 0.6 * step / 6, generator)
        # New weights came in the middle of every second episode.
        versions = [step - 1 if member % 2 or not turn else step for turn in range(len(replies))]
        segments = await player.play(EpisodeKey(claim.job_id, number, member), number, replies, versions)
        trajectories.append(Trajectory(tuple(segments)))
    return Group(claim.job_id, number, Split.TRAIN, number, GROUP_SIZE, tuple(trajectories))


def _as_trained(groups: Sequence[Group]) -> dict[EpisodeKey, NDArray[np.float32]]:
    """Every token twice as likely as when it was sampled, those of the first turn half as likely."""
    found = {}
    for episode in (one for group in groups for one in group):
        logprobs = [
            one.behavior_logprobs[one.action_mask] + np.float32(np.log(2.0 if one.turn else 0.5))
            for one in episode.segments
        ]
        found[episode.key] = np.concatenate(logprobs)
    return found


async def _publish(store: Store, claim: Claim, step: int) -> None:
    version = await store.versions.next(claim.job_id, claim.token)
    files = (WeightFile("model.safetensors", 3_000_000, "0" * 64),)
    manifest = WeightsManifest(claim.job_id, version, claim.epoch, step, files)
    await store.versions.publish(claim.job_id, claim.token, manifest)
    await store.jobs.update_progress(claim.job_id, claim.token, step, version)


async def _report(store: Store, claim: Claim, step: int, groups: Sequence[Group]) -> None:
    rewards = np.array([reward for group in groups for reward in group.rewards])
    metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "staleness/mean": 0.5 + 0.2 * step,
        "staleness/max": 2.0,
        "gspo/clip_frac": 0.1 / step,
        "gspo/clip_frac_positive": 0.06 / step,
        "gspo/clip_frac_negative": 0.14 / step,
        "throughput/tokens_per_s": 900.0 + 10 * step,
        "time/wait_s": 0.5,
        "time/train_s": 1.1,
        "time/copy_s": 0.05,
        "time/behind_s": 0.15,
        "time/publish_s": 0.4,
        "time/step_s": 1.8,
        "time/episode_engine_s": 1.2,
        "time/episode_env_s": 0.9,
        "time/episode_queue_s": 0.3,
    }
    await store.metrics.add(claim.job_id, step, metrics)
    await store.events.add(claim.job_id, "step", {"step": step, "version": step, "epoch": claim.epoch, **metrics})


async def _leave_open(bus: Bus, player: Player, claim: Claim, group: int, version: int) -> None:
    job = claim.job_id
    await bus.dispatch(job, claim.token, group, size=GROUP_SIZE, split=Split.TRAIN, task_index=group)
    token = await bus.join("rollout-0")
    leases = await bus.lease(job, "rollout-0", token, 2)
    expression = await player.expression(group)
    for lease, is_cut in zip(leases, (False, True), strict=True):
        call, answer = replies_of(expression, 0, 1.0, random.Random(0))
        segments = await player.play(lease.key, group, [call, answer], [version, version])
        note = '{"turn": 0, "engine_s": 1.25, "env_s": 0.5, "queue_s": 0.0, "store_s": 0.125}'
        appends = [Append(lease.key, 0, one.index, encode(one), one.is_final, one.version, note) for one in segments]
        await bus.append(job, token, appends[:1] if is_cut else appends)
