"""What a replay found, as text for people and as a record for programs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from gspo_core.json_value import JSON
from gspo_core.replay.comparison import Difference, Sameness
from gspo_core.replay.replaying import ReplayFindings, SingleEpisode
from gspo_core.replay.token_shares import BranchShares

NUM_SHOWN_INFLUENCES = 20


def as_text(answer: ReplayFindings) -> Iterator[str]:
    yield f"from {answer.start}, {answer.num_replayed} logged steps before the first one asked for"
    for step in answer.steps:
        versions = [_sameness_text(one) for one in step.versions] or ["no version of it was recorded"]
        yield f"step {step.step}: loss {step.loss:.9g}; {'; '.join(versions)}"
    if answer.otherwise is not None:
        losses = ", ".join(f"{loss:.9g}" for loss in answer.losses_otherwise)
        yield f"with the change: loss {losses}; {_difference_text(answer.otherwise)}"
    for one in answer.influences[:NUM_SHOWN_INFLUENCES]:
        yield f"without the pull of group {one.group}: {_difference_text(one.difference)}"
    if answer.single is not None:
        yield from _single_text(answer.single)


def _sameness_text(found: Sameness) -> str:
    name = f"version {found.version}"
    if found.is_same:
        return f"{name} bit for bit ({found.num_tensors} of {found.num_tensors} tensors)"
    files = ", ".join(found.differing_files)
    known = (
        "it is no longer kept" if found.num_same is None else f"{found.num_same} of {found.num_tensors} tensors same"
    )
    return f"{name} DIFFERS in {files} ({known})"


def _difference_text(found: Difference) -> str:
    cosine = "none" if found.cosine is None else f"{found.cosine:.6f}"
    share = "none: nothing moved" if found.share is None else f"{100 * found.share:.2f} % of the way"
    return f"ends {share} elsewhere, update cosine {cosine}"


def _single_text(single: SingleEpisode) -> Iterator[str]:
    outcome = single.episode.outcome
    yield f"episode {single.episode.key} in step {single.step}: {outcome.stop_reason}, reward {outcome.reward}"
    yield from (f"  reward part {name}: {value:g}" for name, value in outcome.reward_parts.items())
    yield f"  advantage {single.advantage:+.6f}, share of the loss {single.loss:+.9g}"
    yield f"  loss of the step {single.step_loss:.9g}, shares of all tokens {single.sum_of_shares:.9g}"
    for number, branch in enumerate(single.branches):
        yield f"  branch {number}: position, turn, token, version, age, ratio, weight, loss, gate"
        for at in range(len(branch.token)):
            closed = ",".join(branch.gated_by[at]) or ("clipped" if branch.clipped[at] else "")
            yield (
                f"  {branch.position[at]:>7} {branch.turn[at]:>4} {branch.token[at]:>7} {branch.version[at]:>6} "
                f"{branch.staleness[at]:>3} {branch.ratio[at]:>10.6f} {branch.weight[at]:>9.6f} "
                f"{branch.loss[at]:>+14.6e} {closed}"
            )


def as_record(answer: ReplayFindings) -> dict[str, JSON]:
    found = _finite(_record(answer))
    assert isinstance(found, dict)
    return found


def _record(answer: ReplayFindings) -> dict[str, JSON]:
    return {
        "model": answer.job_model,
        "start": answer.start,
        "num_replayed": answer.num_replayed,
        "is_same": answer.is_same,
        "steps": [
            {"step": step.step, "loss": step.loss, "versions": [_sameness_record(one) for one in step.versions]}
            for step in answer.steps
        ],
        "otherwise": None if answer.otherwise is None else _difference_record(answer.otherwise),
        "losses_otherwise": list(answer.losses_otherwise),
        "influences": [{"group": one.group, **_difference_record(one.difference)} for one in answer.influences],
        "single": None if answer.single is None else _single_record(answer.single),
    }


def _sameness_record(found: Sameness) -> JSON:
    return {**asdict(found), "differing_files": list(found.differing_files)}


def _difference_record(found: Difference) -> dict[str, JSON]:
    return {"cosine": found.cosine, "distance": found.distance, "way": found.way, "share": found.share}


def _single_record(single: SingleEpisode) -> JSON:
    outcome = single.episode.outcome
    return {
        "step": single.step,
        "episode": str(single.episode.key),
        "stop_reason": str(outcome.stop_reason),
        "reward": outcome.reward,
        "reward_parts": dict(outcome.reward_parts),
        "advantage": single.advantage,
        "loss": single.loss,
        "step_loss": single.step_loss,
        "sum_of_shares": single.sum_of_shares,
        "branches": [_branch_record(branch) for branch in single.branches],
    }


def _branch_record(branch: BranchShares) -> JSON:
    found: dict[str, JSON] = {}
    for name, values in vars(branch).items():
        found[name] = _column(values) if isinstance(values, np.ndarray) else values
    return found


def _column(values: NDArray[np.generic]) -> JSON:
    column: list[JSON] = values.tolist()
    return column


def _finite(value: JSON) -> JSON:
    """Numbers that are not finite (untrained, or overflowed) as null: JSON has none of them."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
