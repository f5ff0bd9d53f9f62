"""The nouns behind the files in ``log_bytes``, which release 84ec78a wrote: every kind of segment, group and value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gspo_core.types import CacheMode, EpisodeKey, Group, Outcome, Segment, Split, StopReason, TimeSplit, Trajectory
from gspo_core.versions import WeightFile, WeightsManifest

WRITTEN = Path(__file__).parent / "log_bytes"
EPOCH, STEP = 2, 1_000_017
JOB = "job-1"

EXTRA: dict[str, Any] = {
    "version": 7,
    "num_dispatched": 24,
    "dropped": {"dropped_stale": [3, 5]},
    "staleness": {"3": 4, "7": 0},
    "settings": {"version": 1, "changed": {"optimizer": {"learning_rate": 1e-6 / 3}}},
    "big": 2**80,
    "none": None,
    "日": "本",
}

LOGPROBS: dict[EpisodeKey, NDArray[np.float32]] = {
    EpisodeKey(JOB, 7, 0): np.array([-0.5, np.nan, -1.25], np.float32),
    EpisodeKey(JOB, 7, 2): np.zeros(0, np.float32),
    EpisodeKey(JOB, 9, 1): np.array([-3.0], np.float32),
}

MANIFEST = WeightsManifest(
    job=JOB,
    version=42,
    epoch=EPOCH,
    step=STEP,
    files=(
        WeightFile("config.json", 120, "ab" * 32),
        WeightFile("sub/model.safetensors", 5_000_000_000, "0f" * 32),
    ),
)

ACCEPTED = {
    "spec": '{"model":"m","name":"日本"}',
    "digest": "d1" * 32,
    "created_at": "2026-01-02T03:04:05.678Z",
    "idempotency": None,
    "owner": "ann",
}
STATUS = {"status": "running", "epoch": "2", "attempts": '[{"epoch": 1}]'}
LINEAGE = {
    "step": 9,
    "num_dispatched": 31,
    "num_published": 24,
    "num_dropped": 2,
    "settled": {20, 17},
    "low_watermark": 14,
}
LEARNER_MANIFEST = b'{"format": 3}'
PARENT = (1, 12)
"""Epoch and step where epoch 2 forked off."""


def _segment(key: EpisodeKey, index: int, **changes: Any) -> Segment:
    places = np.arange(6)
    mask = places % 3 != 0
    fields: dict[str, Any] = {
        "key": key,
        "attempt": key.member % 2,
        "branch": 0,
        "index": index,
        "turn": index,
        "version": 3 + 4 * index,
        "temperature": 0.7,
        "engine_id": "engine-0",
        "token_ids": 100 * key.member + places,
        "action_mask": mask,
        "behavior_logprobs": np.where(mask, -(places + 1) / 64, 0),
    }
    return Segment(**(fields | changes))


def _trajectory(group: int, member: int, reward: float) -> Trajectory:
    key = EpisodeKey(JOB, group, member)
    outcome = Outcome(StopReason.COMPLETED, reward, {"exact": reward}, {"model_s": 1.5})
    return Trajectory(
        (
            _segment(key, 0, turn_reward=0.5),
            _segment(key, 1, cache_mode=CacheMode.STALE, spent=TimeSplit(0.25, 1.5, 0.125), outcome=outcome),
        )
    )


def groups() -> list[Group]:
    return [
        Group(JOB, 4, Split.TRAIN, 11, 3, tuple(_trajectory(4, member, member / 2) for member in range(3))),
        Group(JOB, 2, Split.EVAL, 12, 3, (_trajectory(2, 1, 0.25),)),
        Group(JOB, 9, Split.TRAIN, 13, 2, ()),
    ]
