"""Episodes that are erased in the queue, in memory: what ``Bus`` promises of them, said a second time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gspo_core.types import EpisodeKey
from services.state.queue_records import DeadLetter, ErasedWord, Stage
from services.state.refusals import Fenced
from tests.services.state.twin_rewards import find, note_completion
from tests.services.state.twin_world import World


class TwinErasing:
    """A part of ``TwinBus``."""

    _world: World

    async def seal(self, job: str, token: str, groups: Mapping[int, Sequence[int]]) -> bool:
        if not self._world.owns(job, token):
            raise Fenced("sealing groups")
        queue = self._world.queue(job)
        found = [find(queue, EpisodeKey(job, group, one)) for group, members in groups.items() for one in members]
        if any(one is None or one.is_erased for one in found):
            return False
        for group in groups:
            if group in queue.groups:
                queue.groups[group].sealed_by = token
        return True

    async def erase(self, key: EpisodeKey) -> ErasedWord:
        queue = self._world.queue(key.job)
        episode = find(queue, key)
        if episode is None:
            return ErasedWord.ABSENT
        if episode.is_erased:
            return ErasedWord.ERASED
        if self._world.owns(key.job, queue.groups[key.group].sealed_by):
            return ErasedWord.SEALED
        episode.segments, episode.version, episode.note = [], None, ""
        episode.stage, episode.token, episode.snapshot, episode.awaited = Stage.DEAD, "", None, None
        episode.is_erased = True
        queue.num_dead_letters += 1
        letter = DeadLetter(f"{queue.num_dead_letters}-0", key, episode.attempt, 0, episode.failures, "erased", "")
        queue.dead_letters = [*(one for one in queue.dead_letters if one.key != key), letter]
        note_completion(queue, key.group)
        return ErasedWord.ERASED

    async def is_over(self, key: EpisodeKey) -> bool:
        episode = find(self._world.queue(key.job), key)
        return episode is None or episode.stage in (Stage.DEAD, Stage.DONE, Stage.WAITING)

    async def was_erased(self, key: EpisodeKey) -> bool:
        episode = find(self._world.queue(key.job), key)
        return episode is not None and episode.is_erased
