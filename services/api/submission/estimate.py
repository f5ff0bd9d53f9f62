"""What a job takes at most, as far as its specification and its model's configuration tell: for a plan that is only
looked at.

Rule: each number is a bound, for episodes of one branch and files that nothing damages; what cannot be known is left
out.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gspo_core.model_files import context_of
from gspo_core.spec import EpisodeLimits, JobSpec

# In a batch log: id, log-prob and mask of a token; what a segment has beside its tokens, at most 440 in
# `benchmarks/results/log_sizes.md`, rounded up.
TOKEN_BYTES, SEGMENT_BYTES = 9, 512


def estimate(spec: JobSpec) -> dict[str, int]:
    """Reads the model's configuration: call it in a thread."""
    episodes = spec.groups_per_step * spec.rollout.group_size
    context = context_of(Path(spec.model)) or sys.maxsize
    limits = [spec.episode_limits(index) for index in range(len(spec.environments))]
    sampled = [min(limit.max_episode_tokens, limit.max_context_tokens, context) for limit in limits]
    logged = [(_max_logged(spec, limit, context), tokens) for limit, tokens in zip(limits, sampled, strict=True)]
    log_bytes = episodes * max(size for size, _ in logged)
    return {
        "episodes_per_step": episodes,
        "max_episodes_in_flight": (spec.rollout.max_staleness + 1) * episodes,
        "max_sampled_tokens_per_step": episodes * max(sampled),
        # For an episode as long as it may be; a shorter one takes more per token, and less in all.
        "log_bytes_per_sampled_token": max(-(-size // num_tokens) for size, num_tokens in logged),
        "max_log_bytes": _max_log_bytes(spec, log_bytes),
        "max_archive_bytes": _max_archive_bytes(spec, log_bytes),
        "max_replayed_steps": _max_replayed_steps(spec),
        **_max_checkpoints(spec),
    }


def _max_logged(spec: JobSpec, limits: EpisodeLimits, context: int) -> int:
    """Bytes of an episode of one branch in a batch log."""
    pieces = 2 * limits.max_turns + limits.max_episode_tokens // spec.rollout.chunk_tokens
    return TOKEN_BYTES * min(limits.max_context_tokens, context) + SEGMENT_BYTES * pieces + spec.rewards.evidence_bytes


def _max_logs(spec: JobSpec) -> int:
    """Logs that are there at a time, outside the archive."""
    return min(spec.steps, spec.checkpoints.keep_batches + spec.checkpoints.keep * spec.checkpoint_every)


def _max_log_bytes(spec: JobSpec, per_step: int) -> int:
    """All logs that a job has at a time: uncompressed, and the archive up to its own bound."""
    return min(_max_logs(spec) * per_step + _max_archive_bytes(spec, per_step), spec.steps * per_step)


def _max_archive_bytes(spec: JobSpec, per_step: int) -> int:
    """What the archive comes to by the end, as if nothing in it were compressed."""
    return min(spec.steps * per_step, spec.checkpoints.archive_bytes) if spec.checkpoints.archive == "all" else 0


def _max_replayed_steps(spec: JobSpec) -> int:
    """The most logged steps that are trained again before a replay or a fork of a step that is kept begins."""
    kept = spec.checkpoints
    if kept.keep * spec.checkpoint_every >= spec.steps:  # each that is made is kept
        apart = min(spec.checkpoint_every, kept.keep_every or spec.steps)
    elif kept.keep_every is not None:
        apart = kept.keep_every
    else:
        apart = spec.steps if kept.archive == "all" else _max_logs(spec)
    return min(apart, spec.steps) - 1


def _max_checkpoints(spec: JobSpec) -> dict[str, int]:
    """How many exist at a time, with the one being written, and their bytes; the bytes are left out if the model's
    tensors are not known."""
    from gspo_core.plan import UnknownShape, checkpoint_bytes, read_shape  # few submissions are dry runs

    number = _max_num_checkpoints(spec)
    try:
        lora = spec.learner.lora
        size = checkpoint_bytes(read_shape(Path(spec.model)), None if lora is None else lora.rank)
    except UnknownShape:
        return {"max_checkpoints": number}
    return {"max_checkpoints": number, "max_checkpoint_bytes": number * size}


def _max_num_checkpoints(spec: JobSpec) -> int:
    kept, begun_after = spec.checkpoints, spec.parent.step if spec.parent is not None else 0
    goes_back = spec.watchdog.on_fall == "go_back" and spec.evaluation is not None
    for_good = 0
    if kept.keep_every is not None:
        # A fork keeps what it began with, too.
        for_good = spec.steps // kept.keep_every - begun_after // kept.keep_every + (spec.parent is not None)
    made = -(-spec.steps // spec.checkpoint_every) + for_good + 1
    if goes_back and spec.evaluation is not None:
        made += spec.steps // spec.evaluation.every
    return min(made, kept.keep + for_good + goes_back + 1)
