"""Plays the episodes of an evaluation, several at a time, and keeps each as it ends.

Rule: the same setting gives the same tasks and environment seeds to every policy, so that two can be compared pair by
pair. Played episodes are not played again; failed ones are.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gspo_core.evaluation.episode import World, play
from gspo_core.evaluation.played import (
    SETTING_FILE,
    EpisodePlace,
    Played,
    PlayedFile,
    partial_name,
    read_played,
    read_setting,
    write_whole,
)
from gspo_core.evaluation.policy import EvaluatedPolicy, PolicyUnusable
from gspo_core.json_value import JSON

VERSION = 1


class OtherSetting(Exception):
    """The folder holds an evaluation of another setting."""


@dataclass(frozen=True, slots=True)
class EvalSetting:
    """What an evaluation plays; kept beside its episodes."""

    model: str
    """As it was named."""
    environment: str
    config: Mapping[str, JSON]
    agent: Mapping[str, JSON] | None
    split: str
    tasks: Sequence[int]
    samples: int
    seed: int
    sampling: Mapping[str, JSON]
    """How the policy was asked."""
    limits: Mapping[str, JSON]
    source: str
    """A digest of the file that the environment is in."""
    version: int = VERSION

    def places(self) -> list[EpisodePlace]:
        return [EpisodePlace(task, sample) for sample in range(self.samples) for task in self.tasks]

    def to_json(self) -> dict[str, JSON]:
        found: dict[str, JSON] = json.loads(json.dumps(asdict(self)))
        return found

    def plays_the_same(self, other: Mapping[str, JSON]) -> list[str]:
        """The keys in which another evaluation, as it was kept, plays something else; the policy may differ."""
        mine = self.to_json()
        return [key for key in mine if key not in ("model", "sampling") and mine[key] != other.get(key)]


def chosen_tasks(num_tasks: int, wanted: int, seed: int) -> list[int]:
    """All of them, or so many drawn by the seed."""
    if wanted >= num_tasks:
        return list(range(num_tasks))
    return sorted(random.Random(seed).sample(range(num_tasks), wanted))


def task_seed(seed: int, task: int) -> int:
    """The environment's seed: the same for all episodes of a task, which differ by what the policy samples."""
    digest = hashlib.blake2b(f"{seed}/{task}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def require_folder(folder: Path, setting: EvalSetting) -> None:
    """Raises ``OtherSetting`` or ``SettingDamaged`` unless an evaluation can begin there, or go on."""
    kept = read_setting(folder)
    given = setting.to_json()
    if kept is None:
        if folder.is_dir() and any(one.name != partial_name(SETTING_FILE) for one in folder.iterdir()):
            raise OtherSetting(f"{folder} holds something else than an evaluation")
    elif kept != given:
        differing = ", ".join(key for key in given if given[key] != kept.get(key))
        raise OtherSetting(f"{folder} holds an evaluation of another {differing or 'release'}")


def open_folder(folder: Path, setting: EvalSetting) -> None:
    """Begins an evaluation there, or goes on with the same one. Raises ``OtherSetting``."""
    require_folder(folder, setting)
    if read_setting(folder) is None:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / SETTING_FILE, setting.to_json())


async def evaluate(
    setting: EvalSetting,
    world: World,
    policy: EvaluatedPolicy,
    folder: Path,
    *,
    concurrency: int,
    tell: Callable[[Played], None],
) -> list[Played]:
    """All episodes of the setting, in the order of their places, without what was said. Raises ``PolicyUnusable``."""
    kept = read_played(folder, with_messages=False)
    played = {place: one for place, one in kept.items() if one.failure is None}
    missing = iter([place for place in setting.places() if place not in played])
    file = PlayedFile(folder)

    async def play_some() -> None:
        for place in missing:
            one = await play(world, policy, place, task_seed(setting.seed, place.task))
            file.add(one)
            played[place] = one.without_messages()
            tell(one)

    try:
        async with asyncio.TaskGroup() as players:
            for _ in range(concurrency):
                players.create_task(play_some())
    except BaseExceptionGroup as group:  # of those that `except*` raises early 3.11 makes a group again
        unusable, others = group.split(PolicyUnusable)
        if unusable is None or others is not None:
            raise
        raise PolicyUnusable(str(_first(unusable))) from None
    finally:
        file.close()
    return [played[place] for place in setting.places()]


def _first(group: BaseExceptionGroup[PolicyUnusable]) -> BaseException:
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
