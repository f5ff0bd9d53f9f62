"""Look at exactly what was trained: the batch logs of a job, down to the single token.

``python -m services.files.batch_view DIR`` lists the files of a job, ``python -m services.files.batch_view FILE``
shows one; ``--tokens`` adds every token with its mask, log-prob, version and age, ``--json`` prints an object per
episode.

The rule kept here: it shows only the content of the file and of the job's own record beside it (the objective, for the
advantages; the tokenizer of its model, for the text); missing values are left out, never guessed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np

from gspo_core.chat import Tokenizer, UnsuitableTokenizer, load_tokenizer
from gspo_core.log.advantages import logged_advantages
from gspo_core.log.tokens import BranchTokens, tokens_of
from gspo_core.spec import JobSpec
from gspo_core.types import Branch, Group, Trajectory
from services.files.batch_log import DamagedBatchLog, LoggedBatch, batch_files, read_batch
from services.files.job_dir import JobDir
from services.files.job_records import DamagedRecord, JobRecords


@dataclass(frozen=True)
class LoggedBatchView:
    """One batch with its job's advantages and tokenizer."""

    batch: LoggedBatch
    advantages: dict[str, float]
    """By episode; empty without the job's record."""
    tokenizer: Tokenizer | None

    @classmethod
    def of(cls, path: Path, model: Path | None) -> LoggedBatchView:
        batch = read_batch(path)
        spec = _spec_beside(path)
        return cls(batch, _advantages(batch, spec) if spec else {}, _tokenizer(model, spec))

    def tokens(self, episode: Trajectory) -> list[BranchTokens]:
        """Ages are in steps, as the trainer saw them when it took the batch."""
        return tokens_of(episode, self.batch.extra.get("staleness", {}))

    def text(self, token_ids: Sequence[int]) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.decode(token_ids)


def summary(batch: LoggedBatch) -> str:
    trajectories = batch.trajectories
    rewards = [trajectory.reward for trajectory in trajectories if trajectory.reward is not None]
    versions = sorted(frozenset[int]().union(*(trajectory.versions for trajectory in trajectories)))
    reward = f"{sum(rewards) / len(rewards):.3f}" if rewards else "none"
    return (
        f"groups {len(batch.groups)}  episodes {len(trajectories)}  "
        f"actions {sum(trajectory.num_actions for trajectory in trajectories)}  "
        f"versions {', '.join(map(str, versions)) or 'none'}  mean reward {reward}"
    )


def as_text(view: LoggedBatchView, wanted: Sequence[str], *, tokens: bool) -> Iterator[str]:
    batch = view.batch
    yield f"epoch {batch.epoch}  step {batch.step}  {summary(batch)}"
    yield f"extra {json.dumps(batch.extra, indent=2)}"
    for group in batch.groups:
        chosen = [one for one in group if _is_wanted(one, wanted)]
        if chosen or not wanted:
            yield ""
            yield f"group {group.group}  {group.split}  task {group.task_index}  size {group.size}{_baseline(group)}"
        for trajectory in chosen:
            yield from _episode_text(view, trajectory)
            if tokens:
                yield from _tokens_text(view, trajectory)


class BranchRecord(TypedDict):
    temperature: float
    token_ids: list[int]
    action_mask: list[bool]
    behavior_logprobs: list[float]
    turn_ids: list[int]
    versions: list[int]
    staleness: list[int | None]
    text: str | None


class EpisodeRecord(TypedDict):
    epoch: int
    step: int
    episode: str
    attempt: int
    split: str
    task_index: int
    group_size: int
    stop_reason: str
    reward: float | None
    reward_parts: dict[str, float]
    turn_rewards: dict[str, float]
    advantage: float | None
    branches: list[BranchRecord]


def as_records(view: LoggedBatchView, wanted: Sequence[str]) -> Iterator[EpisodeRecord]:
    """One object per episode, with arrays over its tokens."""
    for group in view.batch.groups:
        for one in group:
            if _is_wanted(one, wanted):
                yield {
                    "epoch": view.batch.epoch,
                    "step": view.batch.step,
                    "episode": str(one.key),
                    "attempt": one.attempt,
                    "split": str(group.split),
                    "task_index": group.task_index,
                    "group_size": group.size,
                    "stop_reason": str(one.outcome.stop_reason),
                    "reward": one.reward,
                    "reward_parts": dict(one.outcome.reward_parts),
                    "turn_rewards": _turn_rewards(one),
                    "advantage": view.advantages.get(str(one.key)),
                    "branches": [
                        _branch_record(view, branch, tokens)
                        for branch, tokens in zip(one.branches, view.tokens(one), strict=True)
                    ],
                }


def _turn_rewards(trajectory: Trajectory) -> dict[str, float]:
    return {str(turn): reward for turn, reward in enumerate(trajectory.turn_rewards) if reward is not None}


def _branch_record(view: LoggedBatchView, branch: Branch, tokens: BranchTokens) -> BranchRecord:
    return {
        "temperature": branch.segments[0].temperature,
        "token_ids": tokens.token.tolist(),
        "action_mask": tokens.is_sampled.tolist(),
        "behavior_logprobs": np.where(tokens.is_sampled, tokens.logprob, np.float32(0)).tolist(),
        "turn_ids": tokens.turn.tolist(),
        "versions": tokens.version.tolist(),
        "staleness": [None if age < 0 else age for age in tokens.staleness.tolist()],
        "text": view.text(tokens.token.tolist()),
    }


def _baseline(group: Group) -> str:
    rewards = [reward for reward in group.rewards if reward is not None]
    shown = " ".join("none" if reward is None else f"{reward:g}" for reward in group.rewards)
    return f"  rewards {shown}  mean {sum(rewards) / len(rewards):.4f}" if rewards else ""


def _episode_text(view: LoggedBatchView, trajectory: Trajectory) -> Iterator[str]:
    outcome, advantage = trajectory.outcome, view.advantages.get(str(trajectory.key))
    yield (
        f"  {trajectory.key}  attempt {trajectory.attempt}  {outcome.stop_reason}  reward {outcome.reward}  "
        f"{dict(outcome.reward_parts)}" + ("" if advantage is None else f"  advantage {advantage:+.4f}")
    )
    if paid := _turn_rewards(trajectory):
        yield "    turn rewards " + "  ".join(f"{turn}: {reward:g}" for turn, reward in paid.items())
    for segment in trajectory.segments:
        mean = f"{segment.logprob_sum / segment.num_actions:.4f}" if segment.num_actions else "none"
        yield (
            f"    segment {segment.index}  branch {segment.branch}  turn {segment.turn}  "
            f"version {segment.version}  {segment.cache_mode}  tokens {segment.num_tokens}  "
            f"actions {segment.num_actions}  mean log-prob {mean}"
        )


def _tokens_text(view: LoggedBatchView, trajectory: Trajectory) -> Iterator[str]:
    for number, branch in enumerate(view.tokens(trajectory)):
        yield f"      branch {number}: position, turn, token, sampled, log-prob, version, age, text"
        columns = (branch.token, branch.is_sampled, branch.logprob, branch.turn, branch.version, branch.staleness)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for place, (token, sampled, logprob, turn, version, age) in enumerate(rows):
            text = view.text([token])
            yield (
                f"      {place:>6} {turn:>4} {token:>7} "
                + (f"yes {logprob:>9.4f} {version:>6} {'' if age < 0 else age:>4}" if sampled else f"no{'':>23}")
                + ("" if text is None else f"  {text!r}")
            )


def _is_wanted(trajectory: Trajectory, wanted: Sequence[str]) -> bool:
    """``wanted`` names groups (``17``) and episodes (``17/3``); empty means all."""
    key = trajectory.key
    return not wanted or str(key.group) in wanted or f"{key.group}/{key.member}" in wanted


def _spec_beside(path: Path) -> JobSpec | None:
    """The specification of the job in whose directory the file lies."""
    try:
        return JobRecords(JobDir.around(path)).accepted().job_spec
    except (FileNotFoundError, NotADirectoryError, DamagedRecord):
        return None


def _advantages(batch: LoggedBatch, spec: JobSpec) -> dict[str, float]:
    found = logged_advantages(batch, spec)
    return {str(key): advantage for key, advantage in found.items() if advantage is not None}


def _tokenizer(model: Path | None, spec: JobSpec | None) -> Tokenizer | None:
    """The tokenizer of the named directory, else of the job's model where its files exist."""
    if model is not None:
        return load_tokenizer(model)
    if spec is None or not (Path(spec.model) / "tokenizer.json").is_file():
        return None
    return load_tokenizer(Path(spec.model))


def _print_list(directory: Path) -> int:
    num_damaged = 0
    for path in batch_files(directory):
        try:
            line = summary(read_batch(path))
        except DamagedBatchLog as error:
            line = f"DAMAGED {error}"
            num_damaged += 1
        print(f"{path.name}  {path.stat().st_size:>12,} bytes  {line}")
    return 1 if num_damaged else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m services.files.batch_view", description="Look at the batch logs of a job."
    )
    parser.add_argument("path", type=Path, help="a directory to list, or one batch log to show")
    parser.add_argument("--tokens", action="store_true", help="show every token")
    parser.add_argument("--json", action="store_true", help="one JSON object per episode and line, with all tokens")
    parser.add_argument(
        "--only", action="append", default=[], metavar="GROUP[/MEMBER]", help="this group or episode; may be repeated"
    )
    parser.add_argument("--model", type=Path, help="directory with tokenizer.json (default: the model of the job)")
    given = parser.parse_args(arguments)
    if given.path.is_dir():
        return _print_list(given.path)
    try:
        view = LoggedBatchView.of(given.path, given.model)
    except (OSError, DamagedBatchLog, UnsuitableTokenizer) as error:
        print(error, file=sys.stderr)
        return 1
    if given.json:
        lines: Iterator[str] = (json.dumps(record, ensure_ascii=False) for record in as_records(view, given.only))
    else:
        lines = as_text(view, given.only, tokens=given.tokens)
    for line in lines:
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
