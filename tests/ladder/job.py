"""A row as a real job, or two at once: submitted, followed to its end, measured, and what it recorded checked."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from examples.demo.provenance import check_provenance
from gspo_core.cli.watch import TERMINAL
from gspo_core.client import ApiError, Client
from gspo_core.types import Trajectory
from services.files.batch_log import BatchLog
from services.files.data_dir import DataDir
from services.files.job_dir import JobDir
from tests.ladder.axes import SHORTEST, Row
from tests.ladder.measure import Watch
from tests.ladder.speaker import CONTEXT_TOKENS
from tests.ladder.stack import Running

NUM_STEPS = 2
GROUP_SIZE = 2
# The largest pair takes minutes alone on two cores, and several times that where other work shares them.
MOST_S = 1800.0
POLL_S = 0.2
# Each of them costs a forward pass over the whole episode.
NUM_CHECKED, NUM_CHECKED_LONG, LONG = 20, 4, 8_000
# Tasks of one world differ in length, and so do prompts that were measured with the first.
PROMPT_SLACK = 150
PHASES = {
    "rollout": "time/wait_s",
    "training": "time/train_s",
    "copying": "time/copy_s",
    "publishing": "time/publish_s",
}


@dataclass
class Result:
    row: dict[str, Any]
    name: str
    seconds: float
    status: str
    reason: str = ""
    problems: list[str] = field(default_factory=list)
    """Empty: all is well."""
    prompt_seen: tuple[int, int] = (0, 0)
    """Tokens before the first sampled one, least and most."""
    episode_tokens: int = 0
    """Of the longest."""
    turns_seen: int = 0
    sampled: int = 0
    phases_s: dict[str, float] = field(default_factory=dict)
    memory_bytes: dict[str, int] = field(default_factory=dict)
    redis_bytes: int = 0
    disk_bytes: dict[str, int] = field(default_factory=dict)
    """Part of the job's directory -> what it holds."""
    provenance: str = ""
    commit: str = ""
    """Of the tree that played it."""


@dataclass(frozen=True)
class Asked:
    """A row with what it became."""

    row: Row
    spec: Mapping[str, Any]


def spec_of(row: Row, model_dir: Path, ref: str, config: Mapping[str, Any], seed: int) -> dict[str, Any]:
    return {
        "name": row.name,
        "model": str(model_dir),
        "environments": [{"ref": ref, "config": dict(config)}],
        "chat": {"format": row.chat},
        "rollout": {"group_size": GROUP_SIZE, "max_staleness": 1},
        "sampling": {"max_new_tokens": 40},
        # Calls that break off are answered: an episode has the turns that the row asks for.
        "limits": {
            "max_turns": row.turns,
            "max_tool_calls": 1000,
            "max_context_tokens": CONTEXT_TOKENS,
            "on_parse_error": {"feedback": 1000},
        },
        "learner": {"lora": {"rank": 8}} if row.train == "lora" else {},
        "optimizer": {"lr": 1e-3},
        "groups_per_step": 2 if row.num_tokens <= LONG else 1,
        "steps": NUM_STEPS,
        "resources": {"device": "cpu"},
        "seed": seed,
    }


def play(running: Running, data_dir: Path, asked: Sequence[Asked], *, keep: bool = False) -> list[Result]:
    """All of them at once. ``keep``: their directories too. Raises StackError when a process of the stack has ended."""
    with Watch(running.pids, running.redis_url) as watch, Client(running.api_url) as client:
        started = time.monotonic()
        jobs: dict[str, Row] = {}
        results = []
        for one in asked:
            try:
                jobs[client.create_job(dict(one.spec))["id"]] = one.row
            except ApiError as error:
                results.append(Result(asdict(one.row), one.row.name, 0.0, "refused", str(error), [f"refused: {error}"]))
        seconds = {job: at - started for job, at in _ends(running, client, list(jobs))}
        for job, row in jobs.items():
            results.append(_result(client, row, job, seconds[job], DataDir(data_dir).jobs.job(job), keep=keep))
    for result in results:
        result.memory_bytes, result.redis_bytes = dict(watch.memory_bytes), watch.redis_bytes
    return results


def _ends(running: Running, client: Client, jobs: Sequence[str]) -> Iterator[tuple[str, float]]:
    left, deadline = set(jobs), time.monotonic() + MOST_S
    while left:
        running.check()
        for job in sorted(left):
            over = client.job(job)["status"] in TERMINAL
            if not over and time.monotonic() > deadline:
                client.cancel(job)
                over = True
            if over:
                left.remove(job)
                yield job, time.monotonic()
        time.sleep(POLL_S)


def _result(client: Client, row: Row, job: str, seconds: float, directory: JobDir, *, keep: bool) -> Result:
    record = client.job(job)
    reason = record["status_reason"]
    result = Result(asdict(row), row.name, seconds, record["status"], reason["message"] if reason else "")
    result.disk_bytes = _disk_bytes(directory.path)
    if result.status != "succeeded":
        result.problems.append(f"{result.status}: {result.reason}")
        return result
    steps = client.metrics(job)
    result.phases_s = {name: sum(step.get(key, 0.0) for step in steps) for name, key in PHASES.items()}
    _look_at_what_was_trained(result, list(_trajectories(directory)))
    num_checked = NUM_CHECKED if result.episode_tokens <= LONG else NUM_CHECKED_LONG
    checked = check_provenance(directory, num_checked, seed=0)
    result.provenance = str(checked)
    result.problems += judge(row, result, len(steps), checked.num_tokens - checked.num_equal)
    if not result.problems and not keep:
        shutil.rmtree(directory.path)  # hundreds of megabytes each
    return result


def _disk_bytes(directory: Path) -> dict[str, int]:
    found: Counter[str] = Counter()
    for path in directory.rglob("*"):
        if path.is_file():
            found[path.relative_to(directory).parts[0]] += path.stat().st_size
    return dict(found)


def _trajectories(directory: JobDir) -> Iterator[Trajectory]:
    log = BatchLog(directory)
    for epoch, step in log.steps():
        for group in log.read(epoch, step).groups:
            yield from group


def _look_at_what_was_trained(result: Result, trajectories: Sequence[Trajectory]) -> None:
    branches = [branch for trajectory in trajectories for branch in trajectory.branches]
    prompts = [int(branch.action_mask.argmax()) for branch in branches]
    result.prompt_seen = (min(prompts), max(prompts))
    result.episode_tokens = max(len(branch.token_ids) for branch in branches)
    result.turns_seen = max(trajectory.num_turns for trajectory in trajectories)
    result.sampled = sum(branch.num_actions for branch in branches)


def judge(row: Row, result: Result, num_steps: int, num_untrue: int) -> list[str]:
    """What is wrong with a job that succeeded."""
    least, most = result.prompt_seen
    problems = []
    if num_steps != NUM_STEPS:
        problems.append(f"{num_steps} steps, not {NUM_STEPS}")
    if num_untrue:
        problems.append(f"{num_untrue} recorded log-probs are not those of the weights: {result.provenance}")
    if row.exact and row.prompt != SHORTEST and result.prompt_seen != (row.prompt, row.prompt):
        problems.append(f"prompts of {least} to {most} tokens, not {row.prompt}")
    if not row.exact and not row.prompt - PROMPT_SLACK <= least <= most <= row.prompt + PROMPT_SLACK:
        problems.append(f"prompts of {least} to {most} tokens, not about {row.prompt}")
    if result.turns_seen != row.turns:
        problems.append(f"{result.turns_seen} turns, not {row.turns}")
    if result.episode_tokens < least + row.observation:
        problems.append(f"an episode of {result.episode_tokens} tokens: the observation was not read whole")
    return problems
