"""The workers' side: episodes wait in a queue, occupy worker slots, and grow token by token under a version."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from benchmarks.simulator.setting import SimulationSetting


@dataclass(eq=False, slots=True)
class SimulatedEpisode:
    group: int
    member: int
    length: float
    fails: bool
    spans: list[tuple[int, float]] = field(default_factory=list)
    """(version, tokens sampled under it), in order."""
    tokens: float = 0.0
    """Total tokens as of ``since``."""
    since: float = 0.0
    """When it began to grow under the current version."""
    worker: int = -1
    """The worker that holds it, or -1."""
    starts: int = 0
    """Number of leases; an end scheduled under an earlier lease is void."""
    is_done: bool = False
    """It has been sampled to its end."""
    is_late: bool = False
    """Its reward comes after its end."""


@dataclass(eq=False, slots=True)
class SimulatedGroup:
    number: int
    episodes: list[SimulatedEpisode]
    dispatched_step: int
    num_done: int = 0
    num_waiting: int = 0
    """Episodes that have ended and wait for their reward."""
    has_waited: bool = False

    @property
    def is_ready(self) -> bool:
        return self.num_done == len(self.episodes)

    @property
    def only_waits(self) -> bool:
        """For rewards."""
        return self.num_waiting > 0 and self.num_done + self.num_waiting == len(self.episodes)


class Rollout:
    """Workers with episode slots. It predicts when episodes end; the simulation calls back at that time."""

    def __init__(self, setting: SimulationSetting) -> None:
        self._setting = setting
        self._queue: list[tuple[bool, int, int, SimulatedEpisode]] = []
        self._held: list[dict[SimulatedEpisode, None]] = [{} for _ in range(setting.num_workers)]
        self._places = -(-setting.num_episodes // setting.num_workers)
        self.version = 0
        self.busy_s = 0.0
        """Slot-seconds spent sampling so far."""
        self._counted_until = 0.0

    def enqueue(self, episodes: Iterable[SimulatedEpisode]) -> None:
        """Queue episodes: previously leased ones come before new ones, oldest first."""
        for one in episodes:
            heapq.heappush(self._queue, (one.starts == 0, one.group, one.member, one))

    def lease(self, now: float) -> Iterator[tuple[float, SimulatedEpisode]]:
        """Fill free slots; yield each started episode with its end time."""
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
        """Switch versions; episodes continue mid-turn."""
        for held in self._held:
            for episode in held:
                self._grow(episode, now)
        self.version = version

    def lose_worker(self, worker: int, now: float) -> list[SimulatedEpisode]:
        """Return the episodes it held, cut back to their appended tokens."""
        lost = list(self._held[worker])
        for episode in lost:
            self._grow(episode, now)
            self._release(episode, now)
            kept = episode.tokens - episode.tokens % self._setting.chunk_tokens
            _shorten(episode, kept if self._setting.faults.resumable else 0.0)
        return lost

    def forget(self, group: SimulatedGroup, now: float) -> None:
        """Settle a group: fence off its workers and remove its episodes from the queue."""
        for episode in group.episodes:
            if episode.worker >= 0:
                self._release(episode, now)
        gone = {id(episode) for episode in group.episodes}
        if any(id(entry[-1]) in gone for entry in self._queue):
            self._queue = [entry for entry in self._queue if id(entry[-1]) not in gone]
            heapq.heapify(self._queue)

    def appended(self, episode: SimulatedEpisode, now: float) -> float:
        """Tokens that have reached the trainer."""
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
