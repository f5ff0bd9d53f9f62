"""A trainer in miniature, and the oracle that judges what it leaves on disk.

Real queue, store, batch log, checkpoints and replay; the weights are a chain of hashes over what was trained, so every
history has its own. It can be killed, stopped or robbed of its Redis at any of POINTS. It plays the episodes itself.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from gspo_core.assemble import Assembler
from gspo_core.codec import decode, encode
from gspo_core.log.history import batches_after
from gspo_core.log.lineage import Lineage
from gspo_core.position import Position
from gspo_core.types import Group, Split
from gspo_core.versions import WeightFile, WeightsManifest
from services.files.batch_log import BatchLog
from services.files.checkpoints import CheckpointStore
from services.files.job_dir import JobDir
from services.state.queue import Append, Bus, LeasedEpisode
from services.state.store import Claim, Store
from tests.services.trainer.trainer_kit import episode

GROUPS_PER_STEP = 3
WINDOW = 2 * GROUPS_PER_STEP
CHECKPOINT_EVERY = 3
POINTS = ("chosen", "logged", "committed", "trained", "published", "saved")

Visit = Callable[[str], Awaitable[None]]


class Killed(Exception):
    """The process is gone; what it had in memory is lost."""


@dataclass
class World:
    store: Store
    bus: Bus
    job: str
    job_dir: Path
    num_steps: int
    plays: Counter[int]
    """How often each group was played to its end."""

    @property
    def num_groups(self) -> int:
        return self.num_steps * GROUPS_PER_STEP


class SmallTrainer:
    def __init__(self, world: World, claim: Claim, visit: Visit) -> None:
        self._world, self._claim, self._visit = world, claim, visit
        self._log, self._checkpoints = BatchLog(JobDir(world.job_dir)), CheckpointStore(JobDir(world.job_dir))
        self.lineage = Lineage()
        self.chain = ""
        self.prefers_newest = False
        """Chooses other groups than its predecessor would have."""

    async def run(self, num_steps: int | None = None) -> None:
        """Until the job is over, or ``num_steps`` further."""
        await self._resume()
        end = self._world.num_steps
        if num_steps is not None:
            end = min(end, self.lineage.step + num_steps)
        await self._publish()
        while self.lineage.step < end:
            await self._step()
        # The last step may have come from a log: its trainer was lost before it could save.
        if self.lineage.step == self._world.num_steps and self._newest_step() < self.lineage.step:
            self._checkpoints.write(Position(self._claim.epoch, self.lineage.step), self.lineage, self._save)

    def _newest_step(self) -> int:
        return next((one.position.step for one in self._checkpoints.newest_first()), 0)

    async def _resume(self) -> None:
        parent = Position(self._claim.epoch - 1, 0)
        newest = next(iter(self._checkpoints.newest_first()), None)
        if newest is not None:
            self.lineage, parent = newest.lineage, newest.position
            self.chain = (newest.learner_dir / "chain").read_text()
        for position in self.logs_to_replay(parent):
            self._learn(list(self._log.read(position.epoch, position.step).groups))
            parent = position
        self._checkpoints.begin_epoch(self._claim.epoch, parent)
        settled = [group for group in await self._world.bus.open_groups(self._world.job) if self._is_settled(group)]
        await self._world.bus.commit(self._world.job, self._claim.token, self.lineage.step, settled)
        self.lineage.num_dispatched = max(self.lineage.num_dispatched, self.lineage.step * GROUPS_PER_STEP)
        for group in list(self.lineage.owed()):
            await self._dispatch(group)

    def logs_to_replay(self, parent: Position) -> list[Position]:
        return history(parent, self._log, self._checkpoints)

    def _is_settled(self, group: int) -> bool:
        return group < self.lineage.low_watermark or group in self.lineage.settled

    async def _step(self) -> None:
        # A wiped server holds nothing to wait for; a trainer learns of it by its beat.
        await self._world.store.jobs.beat(self._world.job, self._claim.token)
        while self.lineage.num_dispatched < min(self._world.num_groups, self.lineage.step * GROUPS_PER_STEP + WINDOW):
            await self._dispatch(self.lineage.num_dispatched)
            self.lineage.num_dispatched += 1
        await self._play()
        chosen = await self._choose()
        await self._visit("chosen")
        await self.secure(chosen)
        self._learn(chosen)
        await self._visit("trained")
        await self._publish()
        await self._visit("published")
        if self.lineage.step % CHECKPOINT_EVERY == 0 or self.lineage.step == self._world.num_steps:
            self._checkpoints.write(Position(self._claim.epoch, self.lineage.step), self.lineage, self._save)
            await self._visit("saved")

    async def secure(self, chosen: list[Group]) -> None:
        """Batch log, then commit."""
        self.log(chosen)
        await self._visit("logged")
        await self.commit(chosen)
        await self._visit("committed")

    def log(self, chosen: list[Group]) -> None:
        self._log.write(self._claim.epoch, self.lineage.step + 1, chosen, {})

    async def commit(self, chosen: list[Group]) -> None:
        numbers = [group.group for group in chosen]
        await self._world.bus.commit(self._world.job, self._claim.token, self.lineage.step + 1, numbers)

    async def _choose(self) -> list[Group]:
        world, assembler = self._world, Assembler()
        for _, payload in await world.bus.read_segments(world.job, count=10_000, block_ms=0):
            assembler.add(decode(payload))
        ready = sorted((one.group for one in await world.bus.ready_groups(world.job)), reverse=self.prefers_newest)
        groups = [assembler.group(world.job, number, Split.TRAIN, number, 1) for number in ready[:GROUPS_PER_STEP]]
        chosen = [group for group in groups if group is not None]
        assert len(chosen) == GROUPS_PER_STEP, f"step {self.lineage.step + 1}: {len(chosen)} groups are ready"
        return chosen

    def _learn(self, groups: list[Group]) -> None:
        for group in groups:
            self.chain = hashlib.sha256(f"{self.chain}/{group.group}".encode()).hexdigest()
        self.lineage.settle(group.group for group in groups)
        self.lineage.step += 1
        self.lineage.num_dispatched = max(self.lineage.num_dispatched, *(group.group + 1 for group in groups))

    async def _publish(self) -> None:
        world, token = self._world, self._claim.token
        version = await world.store.versions.next(world.job, token)
        files = (WeightFile("chain", 1, hashlib.sha256(self.chain.encode()).hexdigest()),)
        manifest = WeightsManifest(world.job, version, self._claim.epoch, self.lineage.step, files)
        await world.store.versions.publish(world.job, token, manifest)
        await world.store.jobs.update_progress(world.job, token, self.lineage.step, version)

    def _save(self, directory: Path) -> None:
        directory.mkdir()
        (directory / "chain").write_text(self.chain)

    async def _dispatch(self, group: int) -> None:
        world = self._world
        await world.bus.dispatch(
            world.job, self._claim.token, group, size=1, split=Split.TRAIN, task_index=group, bytes_per_episode=1000
        )

    async def _play(self) -> None:
        world = self._world
        token = await world.bus.join("worker")
        await world.bus.reap(world.job)
        for lease in await world.bus.lease(world.job, "worker", token, 1000):
            await world.bus.append(world.job, token, _segments(lease))
            world.plays[lease.key.group] += 1


def history(start: Position, log: BatchLog, checkpoints: CheckpointStore) -> list[Position]:
    """What counts after ``start``, as the newest epoch has found it."""
    forks = checkpoints.forks()
    return batches_after(start, log.steps(), max(forks, default=1), forks)


def _segments(lease: LeasedEpisode) -> list[Append]:
    played = [replace(one, key=lease.key) for one in episode(0, 0, 1.0, [0, 0]).segments]
    return [Append(lease.key, 0, one.index, encode(one), one.is_final, 0) for one in played][lease.num_segments :]


async def judge(world: World) -> None:
    """From what is on disk, and from Redis at the end: every group is in the weights once, in the order of the logs."""
    checkpoints, log = CheckpointStore(JobDir(world.job_dir)), BatchLog(JobDir(world.job_dir))
    last = checkpoints.newest_first()[0]
    lineage = history(Position(0, 0), log, checkpoints)
    assert [one.step for one in lineage] == list(range(1, world.num_steps + 1)), f"steps of the lineage: {lineage}"
    trained = [group.group for one in lineage for group in log.read(one.epoch, one.step).groups]
    doubled = [group for group, count in Counter(trained).items() if count > 1]
    assert not doubled, f"trained twice: {doubled}"
    assert sorted(trained) == list(range(world.num_groups)), "groups were lost"
    chain = ""
    for group in trained:
        chain = hashlib.sha256(f"{chain}/{group}".encode()).hexdigest()
    assert (last.learner_dir / "chain").read_text() == chain, "the weights hold something else than the logs"
    assert last.lineage.low_watermark == world.num_groups
    versions = await world.store.versions.all(world.job)
    assert len({one.label for one in versions}) == len(versions)
    counts = await world.bus.counters(world.job)
    assert counts["dispatched"] == sum(count for name, count in counts.items() if name != "dispatched")
    assert counts["in_flight"] == 0, "groups were left in the queue"
    usage = await world.bus.usage(world.job)
    assert (usage.charged_bytes, usage.stored_bytes) == (0, 0)
