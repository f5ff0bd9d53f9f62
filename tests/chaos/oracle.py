"""``python -m tests.chaos.oracle WORKDIR``: judges a run from what it left on disk, and knows nothing else of it.

What it looks at: batch logs, checkpoints and records of epochs, version records, status journals, the files of Redis
(read by a server of its own), and the lines that the runner wrote down because a later fault could wipe them out:
submissions and what was accepted, counters and names of checkpoints as they were seen, who crashed and who was left.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from tests.chaos import (
    departures,
    judge_agents,
    judge_hostile,
    judge_learning,
    judge_lengths,
    judge_lineage,
    judge_losses,
    judge_remains,
    judge_tasks,
    judge_tokens,
    judge_users,
    judge_weights,
)
from tests.chaos.evidence import Evidence, JobEvidence
from tests.chaos.lateness import Late, status
from tests.chaos.talk import Talker

MAX_SHOWN = 5
Check = Callable[[], Iterator[str]]


def checks_of_a_job(evidence: Evidence, job: JobEvidence, talker: Talker) -> list[tuple[str, Check]]:
    lineage = judge_lineage
    return [
        ("jobs are over", partial(lineage.jobs_are_over, job)),
        ("steps are whole", partial(lineage.steps_are_whole, job)),
        ("groups are settled once", partial(lineage.groups_are_settled_once, job)),
        ("attempts are not mixed", partial(lineage.attempts_are_not_mixed, job)),
        ("versions go forward", partial(lineage.versions_go_forward, job)),
        ("epochs keep what was published", partial(lineage.epochs_keep_what_was_published, job)),
        ("nothing is too old", partial(lineage.nothing_is_too_old, job)),
        ("nothing of a dead epoch is trained", partial(lineage.nothing_of_a_dead_epoch_is_trained, job)),
        ("admission is paced", partial(lineage.admission_is_paced, job)),
        ("checkpoints go forward", partial(lineage.checkpoints_go_forward, evidence, job)),
        ("books are balanced", partial(lineage.books_are_balanced, evidence, job)),
        ("tokens were sampled", partial(judge_tokens.tokens_were_sampled, job)),
        ("talk follows", partial(judge_tokens.talk_follows, job, talker)),
        ("nothing acted twice", partial(judge_tokens.nothing_acted_twice, evidence, job, talker)),
        ("only what was heard is trained", partial(judge_agents.only_what_was_heard_is_trained, evidence, job, talker)),
        ("agents come to their end", partial(judge_agents.agents_come_to_their_end, evidence, job)),
        ("losses have their reason", partial(judge_losses.losses_have_their_reason, evidence, job)),
        ("tasks are used in order", partial(judge_tasks.tasks_are_used_in_order, job, talker)),
        ("settings are obeyed", partial(judge_users.settings_are_obeyed, job)),
        ("who is held stands still", partial(judge_users.who_is_held_stands_still, job)),
        ("weights on disk are those published", partial(judge_weights.weights_on_disk_are_those_published, job)),
        ("engines were given them", partial(judge_weights.engines_were_given_what_was_published, evidence, job)),
        ("weights follow from the logs", partial(judge_learning.weights_follow_from_the_logs, job)),
    ]


def checks_of_the_run(evidence: Evidence, talker: Talker) -> list[tuple[str, Check]]:
    remains = judge_remains
    return [
        ("jobs are those that were submitted", partial(remains.jobs_are_those_that_were_submitted, evidence)),
        ("jobs without a trainer said so", partial(remains.jobs_without_a_trainer_said_so, evidence)),
        ("nothing crashed", partial(remains.nothing_crashed, evidence)),
        ("no attack succeeded", partial(judge_hostile.no_attack_succeeded, evidence)),
        ("no agent failed", partial(judge_agents.no_agent_failed, evidence)),
        ("Redis holds no queue", partial(remains.redis_holds_no_queue, evidence)),
        ("no file is left half-written", partial(remains.no_file_is_left_half_written, evidence)),
        ("lengths are not chosen", partial(judge_lengths.lengths_are_not_chosen, evidence, talker)),
    ]


def judge(work: Path) -> list[str]:
    """Everything that is wrong."""
    evidence, talker = Evidence(work), Talker(work / "model")
    problems: list[str] = []
    for name, check in checks_of_the_run(evidence, talker):
        problems += _found(name, check)
    for job in evidence.jobs:
        for name, check in checks_of_a_job(evidence, job, talker):
            problems += [_named(job.id, problem) for problem in _found(name, check)]
    return problems


def _found(name: str, check: Check) -> list[str]:
    """A check that cannot even be made is a problem, whatever the reason."""
    found: list[str] = []
    try:
        for problem in check():
            found.append(_named(name, problem))
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        found.append(f"{name}: cannot be checked: {type(error).__name__}: {error} ({where})")
    found.sort(key=lambda problem: isinstance(problem, Late))  # what no time mends comes first
    more = len(found) - MAX_SHOWN
    return found[:MAX_SHOWN] + ([type(found[MAX_SHOWN])(f"{name}: and {more} more")] if more > 0 else [])


def _named(name: str, problem: str) -> str:
    return type(problem)(f"{name}: {problem}")


def main() -> int:
    work, began = Path(sys.argv[1]), time.monotonic()
    torch.set_num_threads(1)  # as every process of a run: more give other numbers
    problems = judge(work)
    for problem in problems:
        print(f"oracle: {problem}", flush=True)
    evidence = Evidence(work)
    troubled = [job for job in evidence.jobs if any(problem.startswith(job.id) for problem in problems)]
    for line in (*departures.told(evidence), *(f"{job.id}: {job.in_short}" for job in troubled)):
        print(f"oracle: {line}", flush=True)
    if not problems:
        print(f"oracle: lengths of what was {judge_lengths.told(evidence, Talker(work / 'model'))}", flush=True)
    num_steps = sum(len(job.lineage) for job in evidence.jobs)
    num_groups = (
        sum(len(batch.groups) for job in evidence.jobs for batch in job.batches.values()) if not problems else 0
    )
    num_late = sum(isinstance(problem, Late) for problem in problems)
    of_time = f", {num_late} of them only of time" if num_late else ""
    verdict = f"{len(problems)} problems{of_time}" if problems else f"all is well: {num_groups} groups trained once"
    print(
        f"oracle: {len(evidence.jobs)} jobs, {num_steps} steps, {verdict} ({time.monotonic() - began:.0f} s)",
        flush=True,
    )
    return status(problems)


if __name__ == "__main__":
    sys.exit(main())
