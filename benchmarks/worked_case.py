"""A run that falls, and what the time machine finds: ``python -m benchmarks.worked_case --work DIR [--seed 16]``.

The cell `long_gspo_s16` of ``benchmarks.baselines`` (the demo's model and task, tokens up to sixteen steps old), some
of whose runs fall (``results/falls.md``), in the same harness, which writes the job's directory with the product's own
writers here: `gspo replay`, `audit` and forks find what a job leaves. The step that moved the policy farthest is looked
into with the library alone, and the one behind it. Then the run is forked from before them: as it was (a control: it
must fall bit for bit alike), without the groups that influence names first, and with `optimizer.max_grad_growth: 1`.
``results/worked_case.json`` has what came of it, ``worked_case_page`` the page; docs/time-machine.md tells it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.baselines import models
from benchmarks.baselines.cells import cell
from benchmarks.baselines.falls import LEARNED_AT
from benchmarks.logged_run import LoggedTraining, Run, forked, weights_at
from benchmarks.worked_case_page import RECORD, Look, Measured, Pull, page
from benchmarks.worked_case_page import Without as WithoutGroup
from gspo_core.json_value import JSON
from gspo_core.log.changes import Without
from gspo_core.replay.past import Past
from gspo_core.replay.question import ReplayQuestion
from gspo_core.replay.replaying import replay
from gspo_core.spec import JobSpec, ParentSpec
from gspo_core.types import Group
from services.files import origin
from services.files.data_dir import DataDir

PARENT = "job_case"
CELL = cell("long_gspo_s16")
LAST = 30
"""Of the 48 steps that its rate is for."""


def look_into(past: Past, step: int) -> Look:
    """How far the groups of a step pulled, and what is told of the first."""
    found = replay(past, ReplayQuestion(step, step, influence=True))
    pulls: list[Pull] = [
        {"group": one.group, "share": one.difference.share or 0.0, "cosine": one.difference.cosine}
        for one in found.influences
    ]
    [group] = [one for one in past.batch(step).groups if one.group == pulls[0]["group"]]
    share, episode = _largest_share(past, step, group)
    return {
        "step": step,
        "influences": pulls,
        "rewards": list(group.rewards),
        "episode": episode,
        "episode_loss": share,
        "loss": found.steps[0].loss,
    }


def _largest_share(past: Past, step: int, group: Group) -> tuple[float, str]:
    found = []
    for one in group:
        single = replay(past, ReplayQuestion(step, step, single=(group.group, one.key.member))).single
        assert single is not None
        found.append((single.loss, f"{group.group}/{one.key.member}"))
    return max(found, key=lambda one: abs(one[0]))


class Case:
    """The run, and what was made of it."""

    def __init__(self, work: Path, seed: int) -> None:
        self.data = DataDir(work / "data")
        shutil.rmtree(self.data.jobs.path, ignore_errors=True)
        self.spec = CELL.job(models.model_dir(work, "dense"), seed)
        self.runs = list[Run]()
        self._run(PARENT, "as it was", self.spec)

    @property
    def past(self) -> Past:
        return Past(self.data.jobs.job(PARENT).path)

    def fork(self, name: str, title: str, step: int, without: Sequence[int] = (), **changes: JSON) -> None:
        """After this step. As the API begins a fork: it is brought what it needs."""
        settings = {key.replace("__", "."): value for key, value in changes.items()}
        origin.bring(self.data.jobs.job(PARENT), self.data.jobs.job(name), ParentSpec(job=PARENT, step=step))
        self._run(name, f"fork after step {step}, {title}", forked(self.spec, PARENT, step, settings), without)

    def _run(self, name: str, title: str, spec: JobSpec, without: Sequence[int] = ()) -> None:
        training = LoggedTraining(CELL, spec, self.data.jobs.job(name))
        self.runs.append(training.go_on(title, LAST, without, lambda text: print(text, flush=True)))

    def weights(self, name: str) -> list[str]:
        return weights_at(self.data.jobs.job(name), LAST)


def measure(work: Path, seed: int) -> Measured:
    case = Case(work, seed)
    far = case.runs[0].far
    step = max((one for one in far if one > LEARNED_AT), key=lambda one: far[one])
    looks = [look_into(case.past, one) for one in (step, step + 1)]
    first, second = (look["influences"][0]["group"] for look in looks)
    case.fork("job_control", "nothing changed", step - 1)
    case.fork("job_without", f"without group {first}", step - 1, [first])
    case.fork("job_bounded", "`max_grad_growth: 1`", step - 1, optimizer__max_grad_growth=1.0)
    case.fork("job_later", f"without group {second}", step, [second])
    case.fork("job_both", f"without groups {first} and {second}", step - 1, [first, second])
    return {
        "day": str(datetime.now(UTC).date()),
        "cell": CELL.name,
        "seed": seed,
        "cpus": os.cpu_count() or 0,
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "tasks": case.spec.evaluation.tasks if case.spec.evaluation else 0,
        "learned": LEARNED_AT + 1,
        "last": LAST,
        "step": step,
        "way": origin.plan(case.data.jobs.job(PARENT), step - 1).num_replayed,
        "control": case.weights("job_control") == case.weights(PARENT),
        "same": replay(case.past, ReplayQuestion(step, LAST)).is_same,
        "runs": [{"name": run.name, "curve": spelled(run.curve), "far": spelled(run.far)} for run in case.runs],
        "looks": looks,
        "without": otherwise(case.past, step, first),
    }


def otherwise(past: Past, step: int, group: int) -> WithoutGroup:
    answer = replay(past, ReplayQuestion(step, step, without=Without.parse([str(group)])))
    found = answer.otherwise
    assert found is not None
    return {
        "loss": answer.steps[0].loss,
        "loss_otherwise": answer.losses_otherwise[0],
        "share": found.share or 0.0,
        "cosine": found.cosine or 0.0,
    }


def spelled(values: Mapping[int, float]) -> dict[str, float]:
    """JSON has no numbers as keys."""
    return {str(step): value for step, value in values.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="where models and jobs are kept")
    parser.add_argument("--seed", type=int, default=16)
    parser.add_argument("--record", type=Path, default=RECORD)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(given.work.resolve(), given.seed)
    given.record.write_text(f"{json.dumps(found, indent=1)}\n")
    given.record.with_suffix(".md").write_text(page(found))
    print(page(found))


if __name__ == "__main__":
    main()
