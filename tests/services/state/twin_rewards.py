"""Rewards that come after their episode has ended, in memory: what ``AwaitedRewards`` promises, said a second time."""

from __future__ import annotations

from gspo_core.types import EpisodeKey
from services.state.queue_records import Append, AwaitedReward, PostedReward, RewardWord, Stage, Waiting
from services.state.refusals import Fenced, Gap
from tests.services.state.twin_world import TwinAwaited, TwinEpisode, TwinQueue, TwinSegment, World, fenced


class TwinAwaitedRewards:
    """A part of ``TwinBus``."""

    _world: World

    async def await_reward(self, token: str, end: Append, kept: bytes, deadline: float) -> None:
        episode = find(self._world.queue(end.key.job), end.key)
        if episode is not None and episode.awaited is not None and end.attempt == episode.attempt:
            if episode.awaited.by != token:
                raise Fenced("set aside by another")
            return
        if episode is None or not token or episode.stage is not Stage.HELD or episode.token != token:
            raise fenced(episode, f"awaiting the reward of {end.key}")
        if end.attempt < episode.attempt:
            raise Fenced(f"awaiting the reward of attempt {end.attempt} of {end.key}")
        if (end.attempt, end.index) != (episode.attempt, len(episode.segments)):
            raise Gap(f"the end of {end.key}")
        episode.stage, episode.token, episode.snapshot = Stage.WAITING, "", None
        episode.note = end.note or episode.note
        episode.awaited = TwinAwaited(token, end.payload, kept, deadline)

    async def look_at_reward(
        self, key: EpisodeKey, attempt: int, token: str, now: float, *, said: str = ""
    ) -> RewardWord | AwaitedReward:
        word = self._word(key, attempt, token, said, now)
        if word is not None:
            return word
        episode = find(self._world.queue(key.job), key)
        assert episode is not None
        assert episode.awaited is not None
        return AwaitedReward(episode.awaited.payload, episode.awaited.kept, tuple(episode.awaited.posted))

    def _word(self, key: EpisodeKey, attempt: int, token: str, said: str, now: float) -> RewardWord | None:
        queue = self._world.queue(key.job)
        episode = find(queue, key)
        if episode is not None and episode.attempt > attempt:
            return RewardWord.ENDED
        if (before := queue.tokens_posted.get((key, attempt, token))) is not None:
            return RewardWord.AGAIN if before == said else RewardWord.CONFLICT
        if episode is None or (episode.attempt == attempt and episode.stage in (Stage.DONE, Stage.DEAD)):
            return RewardWord.ENDED
        if episode.awaited is None or episode.attempt < attempt:
            return RewardWord.PLAYING
        return RewardWord.LATE if now > episode.awaited.deadline else None

    async def post_reward(
        self, end: Append, reward: PostedReward, *, said: str = "", seen: int, now: float
    ) -> RewardWord:
        return self._post(end, reward.token, said, seen, now, reward)

    async def settle_reward(self, end: Append, token: str, *, said: str = "", seen: int, now: float) -> RewardWord:
        return self._post(end, token, said, seen, now, None)

    def _post(
        self, end: Append, token: str, said: str, seen: int, now: float, reward: PostedReward | None
    ) -> RewardWord:
        word = self._word(end.key, end.attempt, token, said, now)
        if word is not None:
            return word
        queue = self._world.queue(end.key.job)
        episode = find(queue, end.key)
        assert episode is not None
        assert episode.awaited is not None
        if len(episode.awaited.posted) != seen:
            return RewardWord.CHANGED
        if token:
            queue.tokens_posted[end.key, end.attempt, token] = said
        if reward is None:
            queue.num_late += 1
            end_waiting(queue, end.key, episode, end.payload)
        else:
            episode.awaited.payload = end.payload
            episode.awaited.posted.append(reward)
        return RewardWord.TAKEN

    async def expire_rewards(self, job: str, token: str, *, now: float) -> int:
        if not self._world.owns(job, token):
            raise Fenced("ending the wait for rewards")
        queue, due = self._world.queue(job), []
        for number, group in queue.groups.items():
            for member, episode in enumerate(group.episodes):
                if episode.awaited is not None and episode.awaited.deadline < now:
                    due.append((episode.awaited.deadline, f"{number}:{member}", EpisodeKey(job, number, member)))
        for _, _, key in sorted(due, key=lambda entry: entry[:2]):
            late = find(queue, key)
            assert late is not None
            assert late.awaited is not None
            queue.num_missed += 1
            end_waiting(queue, key, late, late.awaited.payload)
        return len(due)

    async def waiting(self, job: str) -> Waiting:
        queue = self._world.queue(job)
        episodes = [one for group in queue.groups.values() for one in group.episodes]
        groups = (
            number for number, group in queue.groups.items() if _only_waits([one.stage for one in group.episodes])
        )
        num_episodes = sum(one.stage is Stage.WAITING for one in episodes)
        return Waiting(num_episodes, queue.num_late, queue.num_missed, tuple(sorted(groups)))


def find(queue: TwinQueue, key: EpisodeKey) -> TwinEpisode | None:
    group = queue.groups.get(key.group)
    return group.episodes[key.member] if group and key.member < len(group.episodes) else None


def end_waiting(queue: TwinQueue, key: EpisodeKey, episode: TwinEpisode, payload: bytes) -> None:
    queue.last_position += 1
    episode.segments.append(TwinSegment(queue.last_position, payload, final=True))
    episode.stage, episode.awaited = Stage.DONE, None
    queue.groups[key.group].num_waited += 1
    note_completion(queue, key.group)


def note_completion(queue: TwinQueue, number: int) -> None:
    group = queue.groups[number]
    if group.completion is None and all(one.stage in (Stage.DONE, Stage.DEAD) for one in group.episodes):
        queue.completions += 1
        group.completion = queue.completions


def _only_waits(stages: list[Stage]) -> bool:
    return Stage.WAITING in stages and set(stages) <= {Stage.WAITING, Stage.DONE, Stage.DEAD}
