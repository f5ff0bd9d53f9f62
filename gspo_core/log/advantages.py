"""The advantages that a step gave its episodes, from its log: with the settings of that step."""

from __future__ import annotations

from gspo_core.advantage import episode_advantages
from gspo_core.live_settings import tuned
from gspo_core.log.batches import LoggedBatch
from gspo_core.objective_config import AdvantageConfig
from gspo_core.spec import JobSpec
from gspo_core.types import EpisodeKey


def advantage_config(batch: LoggedBatch, submitted: JobSpec) -> AdvantageConfig:
    """The step's: as submitted, with the live settings of that time."""
    values = batch.extra.get("settings", {}).get("values", {})
    return (tuned(submitted, values) if values else submitted).objective.advantage


def logged_advantages(batch: LoggedBatch, submitted: JobSpec) -> dict[EpisodeKey, float | None]:
    """None: the episode was not in the batch."""
    return dict(episode_advantages(batch.groups, advantage_config(batch, submitted)))
