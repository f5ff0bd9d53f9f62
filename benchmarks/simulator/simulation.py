"""Simulates trainer, workers and failures as discrete events on one clock.

The simulated trainer follows the same steps as ``services/trainer``: choose, log and commit, train, publish, admit. It
calls the same pure functions to decide which groups to start and which to take.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.simulator.report import SimulationReport
from benchmarks.simulator.rollout import Rollout, SimulatedEpisode, SimulatedGroup
from benchmarks.simulator.setting import BYTES_PER_TOKEN, SimulationSetting, groups_affordable
from gspo_core.position import Position
from gspo_core.staleness import OpenGroup, choose_groups, groups_admissible, shared_step, token_staleness

# Failure events never run out, so an empty event list cannot detect a deadlock.
_STUCK_S = 1e6


class Deadlock(RuntimeError):
    """The run is unfinished but can make no progress."""


def simulate(setting: SimulationSetting, seed: int) -> SimulationReport:
    """Simulate one run; the same seed gives the same run."""
    return _Simulation(setting, seed).run()


@dataclass(slots=True)
class _Taken:
    """The resources that one step used."""

    groups: list[int]
    trained: float = 0.0
    masked: float = 0.0
    age_sum: float = 0.0
    max_age: int = 0
    episodes: int = 0
    late: int = 0
    """Groups that had waited for rewards."""


class _Simulation:
    def __init__(self, setting: SimulationSetting, seed: int) -> None:
        self._setting = setting
        self._rng = np.random.default_rng(seed)
        self._late_rng = np.random.default_rng([seed, 1])
        """Of its own, so that a run with late rewards samples the same episodes as one without."""
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._rollout = Rollout(setting)
        self._open: dict[int, SimulatedGroup] = {}
        self._again: deque[int] = deque()
        """Groups from lost steps; they are sampled again before any new group starts."""
        self._episode_bytes = int(setting.lengths.limit * BYTES_PER_TOKEN)
        self._reserved_bytes = 0
        """Bytes reserved for open groups: actual size for finished episodes, the maximum for the rest."""
        # The lineage
        self._taken: list[_Taken] = []
        self._epochs = [0]
        """The epoch that made each step of the lineage."""
        self._current = Position(0, 0)
        self._forks: dict[int, Position] = {}
        self._table: dict[int, Position] = {}
        self._num_dispatched = self._num_dropped = 0
        self._published_step = self._checkpoint = 0
        # The trainer's process
        self._life = 0
        """Incremented when the trainer dies, which cancels its pending work."""
        self._is_idle = False
        self._stepped_at = 0.0
        self._waiting_since: float | None = None
        self._waits = 0
        # Records
        self._marks: tuple[float, float] | None = None
        self._lengths = [0.0, 0.0]
        """Count and total tokens of all started episodes."""
        self._waited_s = 0.0
        self._limits_reached = self._recoveries = self._rollbacks = 0
        self._max_open = self._max_reserved = self._max_held = 0
        self._max_waiting = self._num_late_dropped = 0

    def run(self) -> SimulationReport:
        self._publish()
        self._admit()
        self._is_idle = True
        faults = self._setting.faults
        for worker in range(self._setting.num_workers):
            self._at_random(faults.worker_mtbf_s, partial(self._lose_worker, worker))
        self._at_random(faults.trainer_mtbf_s, self._lose_trainer)
        while self._current.step < self._setting.num_steps:
            if not self._events or self._now - self._stepped_at > _STUCK_S:
                raise Deadlock(f"after {self._current.step} steps {len(self._open)} groups wait for one another")
            self._now, _, happen = heapq.heappop(self._events)
            happen()
        return self._report()

    # Time

    def _at(self, time: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), happen))

    def _at_random(self, mean_s: float, happen: Callable[[], None]) -> None:
        """Repeat ``happen`` at random intervals with mean ``mean_s``."""
        if math.isinf(mean_s):
            return

        def now_and_later() -> None:
            happen()
            self._at_random(mean_s, happen)

        self._at(self._now + float(self._rng.exponential(mean_s)), now_and_later)

    # Workers

    def _lease(self) -> None:
        for ends_at, episode in self._rollout.lease(self._now):
            self._at(ends_at, partial(self._end_episode, episode, episode.starts))

    def _end_episode(self, episode: SimulatedEpisode, starts: int) -> None:
        if episode.starts != starts or episode.worker < 0:
            return
        self._rollout.end(episode, self._now)
        group = self._open[episode.group]
        self._reserved_bytes -= self._episode_bytes - int(episode.tokens) * BYTES_PER_TOKEN
        self._lease()
        if episode.is_late:
            group.num_waiting += 1
            self._at(self._now + self._setting.late_by_s, partial(self._reward, group))
        else:
            group.num_done += 1
        if self._is_idle and group.is_ready:
            self._try_to_step()
        if self._setting.budget_bytes is not None or group.only_waits:
            self._admit()

    def _reward(self, group: SimulatedGroup) -> None:
        group.num_waiting, group.num_done, group.has_waited = group.num_waiting - 1, group.num_done + 1, True
        if self._is_idle and group.is_ready and self._open.get(group.number) is group:
            self._try_to_step()

    def _lose_worker(self, worker: int) -> None:
        lost = self._rollout.lose_worker(worker, self._now)
        self._at(self._now + self._setting.faults.lease_s, partial(self._requeue, lost))
        self._lease()

    def _requeue(self, episodes: list[SimulatedEpisode]) -> None:
        self._rollout.enqueue(one for one in episodes if self._is_open(one))
        self._lease()

    def _is_open(self, episode: SimulatedEpisode) -> bool:
        group = self._open.get(episode.group)
        return group is not None and group.episodes[episode.member] is episode

    # Admission

    def _admit(self) -> None:
        setting = self._setting
        num_waiting = sum(group.only_waits for group in self._open.values())
        self._max_waiting = max(self._max_waiting, num_waiting)
        excused = min(num_waiting, setting.max_waiting)
        allowed = groups_admissible(
            max_staleness=setting.max_staleness,
            groups_per_step=setting.groups_per_step,
            num_dispatched=self._num_dispatched,
            num_dropped=self._num_dropped,
            num_published=self._published_step * setting.groups_per_step,
            num_excused=excused,
        )
        room = self._room()
        while self._again and room > 0:
            self._dispatch(self._again.popleft())
            room -= 1
        for _ in range(min(allowed, room)):
            self._dispatch(self._num_dispatched)
            self._num_dispatched += 1
        unpublished = (
            self._num_dispatched - self._num_dropped - self._published_step * setting.groups_per_step - excused
        )
        self._max_open = max(self._max_open, unpublished)
        self._max_reserved = max(self._max_reserved, self._reserved_bytes)
        self._lease()

    def _room(self) -> int:
        budget = self._setting.budget_bytes
        if budget is None:
            return 1_000_000_000
        return groups_affordable(
            budget_bytes=budget,
            used_bytes=self._reserved_bytes,
            group_bytes=self._setting.group_bytes,
            groups_per_step=self._setting.groups_per_step,
        )

    def _dispatch(self, number: int) -> None:
        lengths, failures = self._setting.lengths, self._setting.faults.episode_failure_share
        episodes = [
            SimulatedEpisode(number, member, lengths.draw(self._rng), fails=bool(self._rng.random() < failures))
            for member in range(self._setting.group_size)
        ]
        if self._setting.late_reward_share:
            for one in episodes:
                one.is_late = bool(self._late_rng.random() < self._setting.late_reward_share)
        self._lengths[0] += len(episodes)
        self._lengths[1] += sum(one.length for one in episodes)
        self._open[number] = SimulatedGroup(number, episodes, self._published_step)
        self._reserved_bytes += self._episode_bytes * len(episodes)
        self._rollout.enqueue(episodes)

    # The trainer

    def _try_to_step(self) -> None:
        setting = self._setting
        num_ready = sum(group.is_ready for group in self._open.values())
        if num_ready < setting.groups_per_step and setting.on_stale != "drop":
            return  # shortcut: the check below would give the same result
        self._drop_late()
        may_wait = self._waiting_since is None or self._now - self._waiting_since < setting.stale_wait_s
        choice = choose_groups(
            [self._view(group) for group in self._open.values() if not group.only_waits],
            step=self._current.step,
            groups_per_step=setting.groups_per_step,
            staleness_cap=setting.cap,
            on_stale=setting.on_stale,
            may_wait=may_wait,
        )
        for number in choice.drop:
            self._settle(number)
            self._num_dropped += 1
        self._note_wait(bool(choice.wait_for), may_wait)
        if choice.train:
            self._take(choice.train)
        elif choice.drop:
            self._admit()

    def _drop_late(self) -> None:
        """Groups that waited for rewards until they were too old, where the job drops those."""
        if self._setting.on_late_reward != "drop":
            return
        late = [self._view(group) for group in self._open.values() if group.is_ready and group.has_waited]
        for one in late:
            if one.oldest_step is not None and self._current.step - one.oldest_step > self._setting.cap:
                self._settle(one.group)
                self._num_dropped += 1
                self._num_late_dropped += 1

    def _note_wait(self, waits: bool, may_wait: bool) -> None:
        if waits and self._waiting_since is None:
            self._waiting_since, self._waits = self._now, self._waits + 1
            self._at(self._now + self._setting.stale_wait_s, partial(self._end_wait, self._waits))
        elif not waits and self._waiting_since is not None:
            self._waited_s += self._now - self._waiting_since
            self._limits_reached += not may_wait
            self._waiting_since = None

    def _end_wait(self, serial: int) -> None:
        if self._is_idle and self._waiting_since is not None and serial == self._waits:
            self._try_to_step()

    def _view(self, group: SimulatedGroup) -> OpenGroup:
        seen = [one for one in group.episodes if self._rollout.appended(one, self._now)]
        oldest = min((self._rollout.oldest_version(one) for one in seen), default=None)
        step = None if oldest is None else shared_step(self._table[oldest], self._current, self._forks)
        return OpenGroup(group.number, group.is_ready, step, group.dispatched_step, may_be_old=group.has_waited)

    def _take(self, numbers: tuple[int, ...]) -> None:
        """Log, commit and train. The bytes are freed at once, without waiting for the next checkpoint."""
        held = sum(self._rollout.appended(one, self._now) for group in self._open.values() for one in group.episodes)
        self._max_held = max(self._max_held, int(held) * BYTES_PER_TOKEN)
        taken = _Taken(list(numbers))
        self._account(taken, (self._open[number] for number in numbers))
        for number in numbers:
            self._settle(number)
        self._taken.append(taken)
        self._is_idle = False
        self._admit()
        ends_at = self._now + self._setting.train_s + self._setting.publish_s
        self._at(ends_at, partial(self._end_step, self._life))

    def _account(self, taken: _Taken, groups: Iterable[SimulatedGroup]) -> None:
        groups = list(groups)
        taken.late = sum(group.has_waited for group in groups)
        episodes = [one for group in groups for one in group.episodes if not one.fails]
        spans = [span for one in episodes for span in one.spans]
        any_age = self._setting.on_late_reward == "train"
        exempt = [
            any_age and group.has_waited
            for group in groups
            for one in group.episodes
            if not one.fails
            for _ in one.spans
        ]
        ages = token_staleness(
            np.array([version for version, _ in spans], dtype=np.int32), self._table, self._current, self._forks
        )
        tokens = np.array([count for _, count in spans])
        kept = (ages <= self._setting.cap) | np.array(exempt, dtype=bool)
        taken.trained = float(tokens[kept].sum())
        taken.masked = float(tokens[~kept].sum())
        taken.age_sum = float((tokens * ages)[kept].sum())
        taken.max_age = int(ages[kept].max(initial=0))
        taken.episodes = len(episodes)

    def _settle(self, number: int) -> None:
        group = self._open.pop(number)
        for one in group.episodes:
            self._reserved_bytes -= int(one.tokens) * BYTES_PER_TOKEN if one.is_done else self._episode_bytes
        self._rollout.forget(group, self._now)

    def _end_step(self, life: int) -> None:
        if life != self._life:
            return
        self._current = Position(self._current.epoch, self._current.step + 1)
        self._epochs.append(self._current.epoch)
        self._stepped_at = self._now
        if self._current.step == self._setting.warmup_steps and self._marks is None:
            self._rollout.count_until(self._now)
            self._marks = self._now, self._rollout.busy_s
        if self._current.step % self._setting.checkpoint_every == 0:
            self._checkpoint = self._current.step
        self._publish()
        self._admit()
        self._is_idle = True
        self._try_to_step()

    def _publish(self) -> None:
        version = len(self._table)
        self._table[version] = self._current
        self._published_step = self._current.step
        self._rollout.publish(version, self._now)

    # Trainer failures

    def _lose_trainer(self) -> None:
        if self._current.step >= self._setting.num_steps:
            return
        self._life += 1
        self._is_idle = False
        self._waiting_since = None
        is_rollback = bool(self._rng.random() < self._setting.faults.rollback_share)
        kept = self._checkpoint if is_rollback else len(self._taken)
        replay_s = (kept - self._checkpoint) * self._setting.train_s
        back_at = self._now + self._setting.faults.restart_s + replay_s
        self._at(back_at, partial(self._recover, self._life, kept))
        self._recoveries += 1
        self._rollbacks += is_rollback

    def _recover(self, life: int, step: int) -> None:
        """Fork a new epoch at the last step that the checkpoint and the batch logs still cover."""
        if life != self._life:
            return
        for lost in self._taken[step:]:
            self._again.extend(lost.groups)
        del self._taken[step:]
        # If the trainer died after logging a batch but before training it, its successor trains it.
        self._epochs += [self._current.epoch] * (step + 1 - len(self._epochs))
        del self._epochs[step + 1 :]
        epoch = self._current.epoch + 1
        self._forks[epoch] = Position(self._epochs[step], step)
        self._current = Position(epoch, step)
        self._publish()
        self._admit()
        self._is_idle = True
        self._try_to_step()

    def _report(self) -> SimulationReport:
        self._rollout.count_until(self._now)
        warmup = self._setting.warmup_steps
        since, busy_before = self._marks or (0.0, 0.0)
        measured = self._taken[warmup:]
        seconds = max(self._now - since, 1e-9)
        trained = sum(one.trained for one in measured)
        masked = sum(one.masked for one in measured)
        everything = sum(one.trained + one.masked for one in self._taken)
        num_trained = sum(one.episodes for one in self._taken)
        return SimulationReport(
            steps=self._current.step,
            seconds=self._now,
            tokens_per_s=trained / seconds,
            steps_per_s=len(measured) / seconds,
            masked_share=masked / max(trained + masked, 1e-9),
            max_staleness=max((one.max_age for one in self._taken), default=0),
            mean_staleness=sum(one.age_sum for one in measured) / max(trained, 1e-9),
            num_dropped=self._num_dropped,
            waited_s=self._waited_s,
            num_limits_reached=self._limits_reached,
            engine_share=(self._rollout.busy_s - busy_before) / (seconds * self._setting.num_episodes),
            length_ratio=(everything / max(num_trained, 1)) / (self._lengths[1] / self._lengths[0]),
            max_open_groups=self._max_open,
            max_reserved_bytes=self._max_reserved,
            max_held_bytes=self._max_held,
            num_recoveries=self._recoveries,
            num_rollbacks=self._rollbacks,
            num_late_trained=sum(one.late for one in self._taken),
            num_late_dropped=self._num_late_dropped,
            max_waiting_groups=self._max_waiting,
        )
