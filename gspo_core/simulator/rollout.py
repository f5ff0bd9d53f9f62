"""The side of the workers: episodes in a queue, in places of workers, growing token by token under a version."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from gspo_core.simulator.setting import SimulationSetting


@dataclass(eq=False, slots=True)
class SimulatedEpisode:
    group: int
    member: int
    length: float
    fails: bool
    spans: list[tuple[int, float]] = field(default_factory=list)
    """Versions and how many tokens each sampled, in order."""
    tokens: float = 0.0
    """All of them together, as of ``since``."""
    since: float = 0.0
    """When it began to grow under the present version."""
    worker: int = -1
    """The worker that holds it; -1: none."""
    starts: int = 0
    """How often it was leased: an end that was foreseen before the last of them does not come."""
    is_done: bool = False


@dataclass(eq=False, slots=True)
class SimulatedGroup:
    number: int
    episodes: list[SimulatedEpisode]
    dispatched_step: int
    num_done: int = 0

    @property
    def is_ready(self) -> bool:
        return self.num_done == len(self.episodes)


class Rollout:
    """Workers with places for episodes. It says when episodes will end; the simulation calls it back then."""

    def __init__(self, setting: SimulationSetting) -> None:
        self._setting = setting
        self._queue: list[tuple[bool, int, int, SimulatedEpisode]] = []
        self._held: list[dict[SimulatedEpisode, None]] = [{} for _ in range(setting.num_workers)]
        self._places = -(-setting.num_episodes // setting.num_workers)
        self.version = 0
        self.busy_s = 0.0
        """Place-seconds so far in which an episode was sampled."""
        self._counted_until = 0.0

    def enqueue(self, episodes: Iterable[SimulatedEpisode]) -> None:
        """Those that were leased before stand before new ones, the oldest first."""
        for one in episodes:
            heapq.heappush(self._queue, (one.starts == 0, one.group, one.member, one))

    def lease(self, now: float) -> Iterator[tuple[float, SimulatedEpisode]]:
        """Fill free places; for each episode that starts, when it will end."""
        self.count_until(now)
        while self._queue:
            worker = min(range(len(self._held)), key=lambda one: len(self._held[one]))
            if len(self._held[worker]) >= self._places:
                return
            episode = heapq.heappop(self._queue)[-1]
            episode.worker, episode.since, episode.starts = worker, now, episode.starts + 1
            self._held[worker][episode] = None
            yield now + (episode.length - episode.tokens) / self._setting.tokens_per_s, episode

    def end(self, episode: SimulatedEpisode, now: float) -> None:
        self._release(episode, now)
        self._grow(episode, now)
        episode.is_done = True

    def publish(self, version: int, now: float) -> None:
        """Episodes go on in the middle of a turn."""
        for held in self._held:
            for episode in held:
                self._grow(episode, now)
        self.version = version

    def lose_worker(self, worker: int, now: float) -> list[SimulatedEpisode]:
        """The episodes that it held, with what was appended of them."""
        lost = list(self._held[worker])
        for episode in lost:
            self._grow(episode, now)
            self._release(episode, now)
            kept = episode.tokens - episode.tokens % self._setting.chunk_tokens
            _shorten(episode, kept if self._setting.faults.resumable else 0.0)
        return lost

    def forget(self, group: SimulatedGroup, now: float) -> None:
        """A group was settled: its workers are fenced off, its episodes leave the queue."""
        for episode in group.episodes:
            if episode.worker >= 0:
                self._release(episode, now)
        gone = {id(episode) for episode in group.episodes}
        if any(id(entry[-1]) in gone for entry in self._queue):
            self._queue = [entry for entry in self._queue if id(entry[-1]) not in gone]
            heapq.heapify(self._queue)

    def appended(self, episode: SimulatedEpisode, now: float) -> float:
        """Tokens that the trainer has seen."""
        if episode.is_done:
            return episode.tokens
        grown = (now - episode.since) * self._setting.tokens_per_s if episode.worker >= 0 else 0.0
        tokens = episode.tokens + grown
        return tokens - tokens % self._setting.chunk_tokens

    def oldest_version(self, episode: SimulatedEpisode) -> int:
        return episode.spans[0][0] if episode.spans else self.version

    def count_until(self, now: float) -> None:
        self.busy_s += (now - self._counted_until) * sum(map(len, self._held))
        self._counted_until = now

    def _release(self, episode: SimulatedEpisode, now: float) -> None:
        self.count_until(now)
        del self._held[episode.worker][episode]
        episode.worker = -1

    def _grow(self, episode: SimulatedEpisode, now: float) -> None:
        tokens = (now - episode.since) * self._setting.tokens_per_s
        if tokens > 0:
            episode.spans.append((self.version, tokens))
            episode.tokens += tokens
        episode.since = now


def _shorten(episode: SimulatedEpisode, tokens: float) -> None:
    kept: list[tuple[int, float]] = []
    for version, count in episode.spans:
        here = min(count, tokens)
        if here > 0:
            kept.append((version, here))
        tokens -= here
    episode.spans = kept
    episode.tokens = sum(count for _, count in kept)
