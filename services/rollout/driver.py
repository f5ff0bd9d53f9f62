"""Drives episodes by their environment, and decides how one goes on that another worker began.

Rule: the environment never acts twice on the same turn unless it declares that harmless. It plays nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from gspo_core.environment_contract import Session
from gspo_core.types import Segment
from services.episodes.history import WorldSnapshot, num_finished_turns
from services.episodes.ledger import Ledger
from services.rollout.attempt import EpisodeAttempt
from services.state.queue import Snapshot
from services.workers.setting import EpisodeSetting, EpisodeSpec, GoOn, ResumeState, Rewind, StartOver
from services.workers.timings import Timings


class EnvironmentDriver:
    def begin(
        self,
        setting: EpisodeSetting,
        order: EpisodeSpec,
        attempt: int,
        session: Session,
        past: ResumeState,
        timings: Timings,
    ) -> EpisodeAttempt:
        ledger = Ledger(order.key, attempt, order.temperature)
        world = None if past.snapshot is None else WorldSnapshot.decode(past.snapshot)
        return EpisodeAttempt(setting, order, session, ledger, past.record, world=world, timings=timings)

    async def resume(
        self, setting: EpisodeSetting, order: EpisodeSpec, attempt: int, record: Sequence[Segment]
    ) -> GoOn | Rewind | StartOver:
        environment, stop_ids = order.environment, setting.codec.stop_ids
        kept = await _kept(setting, order, attempt) if environment.has_snapshot else None
        world = None if kept is None else WorldSnapshot.decode(kept.data)
        if kept is not None and world is not None:
            if world.stands_at(record, stop_ids):
                return GoOn(kept.data)
            setting.counters.add("worlds/too_old")
            if kept.num_segments and not environment.replayable:
                # Later turns may or may not have been acted on.
                stands = world.stands_at(record[: kept.num_segments], stop_ids)
                return Rewind(kept.num_segments, kept.data) if stands else StartOver()
        # Before the environment has acted, its start may be repeated: a new attempt would do the same.
        if num_finished_turns(record, stop_ids) and not environment.replayable:
            return StartOver("episodes/restarted")
        return GoOn()

    async def has_kept(self, setting: EpisodeSetting, order: EpisodeSpec, attempt: int) -> bool:
        return False


async def _kept(setting: EpisodeSetting, order: EpisodeSpec, attempt: int) -> Snapshot | None:
    kept = await setting.retrier.keep_trying(setting.records.read_snapshot, order.key)
    return kept if kept is not None and kept.attempt == attempt else None
